"""Run trainings from tests: inside this process, or launched over several."""

import json
import os
import subprocess
from pathlib import Path

import torch
import yaml
from ready_python import program as python
from safetensors.torch import load_file

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.config import build
from training.loop import train

ROOT = Path(__file__).parent.parent
SINGLE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
# A run with these changes sees the same text and learns nothing from it.
STILL = {"optimizer": dict.fromkeys(("lr_projection", "lr_gate", "lr_gate_bias", "lr_backbone"), 0.0)}
# With these numbers a cache that reads one token after another compresses whole periods.
EXACT = ExactTokens(num_sink_tokens=1, recent_window=3, update_period=4)
# A plan of bits, learned as it is served, with the classes of the calibration.
PLANNED = {
    "compressor": {
        "rank_policy": "plan",
        "learned_classes": False,
        "prefill": "exact",
        "exact_tokens": {"num_sink_tokens": 2, "recent_window": 3, "update_period": 4},
    },
    "calibration": {"start": None, "tokens": 1920},
    "rate": {"target_retain_rate": 0.12},
    "loss": {"cross_entropy": 0, "distillation": 1},
    "optimizer": {"steps": 60, "lr_projection": 1e-2},
}


def merged(values: dict, changes: dict) -> dict:
    """A nested mapping with some entries replaced."""
    out = dict(values)
    for key, value in changes.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def train_here(values: dict, output: Path, *, resume: bool = False, **changes) -> Path:
    """Train in this process; returns the final checkpoint."""
    config = build(TrainConfig, merged({**values, "output": str(output)}, changes))
    return train(config, resume=resume)


def launch(
    engine: str, processes: int, values: dict, output: Path, *extra: str, **changes
) -> subprocess.CompletedProcess:
    """Train under `accelerate launch`: `engine` is ``plain``, ``ddp`` or ``zero1`` to ``zero3``. Fails unless the run
    succeeds."""
    done = launched(engine, processes, values, output, *extra, **changes)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("checkpoint:") == 1, "not two runs side by side"
    return done


def launched(
    engine: str, processes: int, values: dict, output: Path, *extra: str, program: str = "train_dynakv.py", **changes
) -> subprocess.CompletedProcess:
    """The same of a run that may fail, and of another program with its arguments."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(merged({**values, "output": str(output)}, changes)))
    flags = [
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    flags += ["--main_process_port", "0"]
    environment = {**SINGLE_THREAD, "PYTHON_EXEC": python()}
    if engine == "ddp":
        flags += ["--multi_gpu"]
        environment["ACCELERATE_USE_CPU"] = "true"
    elif engine == "zero3":
        flags += ["--use_deepspeed", "--deepspeed_config_file", str(_everything_sharded(output.with_suffix(".json")))]
    elif engine != "plain":
        flags += ["--use_deepspeed", "--zero_stage", engine.removeprefix("zero")]
    command = [
        python(),
        "-m",
        "accelerate.commands.launch",
        *flags,
        program,
        "--config",
        str(file),
        *extra,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def _everything_sharded(file: Path) -> Path:
    """A configuration of ZeRO-3 that shards small parameters, too: by default all of a tiny model's stay whole."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_model_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    filled = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file.write_text(json.dumps({"zero_optimization": zero, **dict.fromkeys(filled, "auto")}))
    return file


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    found = rows(output)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1)), "every step once"
    return [row["loss"] for row in found]


def assert_learned(output: Path, still: Path, tolerance: float) -> None:
    """From its second step on a run's losses differ by more than `tolerance` from those of the same run with `STILL`, so
    that losses equal to within it say something of the steps."""
    for loss, unmoved in list(zip(losses(output), losses(still), strict=True))[1:]:
        assert abs(loss / unmoved - 1) > tolerance


def summary(output: Path) -> dict:
    return yaml.safe_load((output / "summary.yaml").read_text())


def assert_is_mean(output: Path, steps: list[int]) -> None:
    """The final compressor is the mean of the states after these steps, and says so."""
    states = [load_file(output / f"states/step-{step:06d}/compressor.safetensors") for step in steps]
    final = load_file(output / "checkpoint/compressor.safetensors")
    assert summary(output)["averaged_steps"] == steps
    for name, tensor in final.items():
        mean = torch.stack([state[name] for state in states]).double().mean(dim=0)
        torch.testing.assert_close(tensor, mean.float(), atol=0, rtol=2e-7)
    assert not all(torch.equal(tensor, states[-1][name]) for name, tensor in final.items()), (
        "it is not the last of them"
    )
