"""Reports of a running training: a progress bar, TensorBoard, and lines of JSON; and the summary of a finished one.

`metrics.jsonl` has a line every `log_every` steps, and one for what was measured on held-out text, every `heldout_every`
steps. `inspections.jsonl` has one for every inspection of layers and tokens:
gate entropy, conditioning of every U, and the retain rate of each token of the fixed sentence in each layer (Figures 4
and 5).

Shapes: L compressed layers, T tokens; 2 is (keys, values).
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from dynakv.objective import RetainRates
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.atomic_write import append_line, write_text
from lowrank_kv.utils.config import to_dict
from lowrank_kv.utils.disk_errors import writing
from lowrank_kv.utils.peak_memory import peak_memory
from lowrank_kv.utils.progress import progress_bar

from .inspection import Inspection

HEAT_MAP_EVERY = 20
_CELL = 12  # pixels of a heat-map cell
_BAR = 160  # pixels of a full bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one step, from which the speed of a run is computed.

    Attributes:
        tokens: of all processes together.
        flops: of a token (see :func:`training.throughput.model_flops`).
        peak_flops: operations a second of all devices together.
        device: of this process.
    """

    tokens: int
    flops: float
    peak_flops: float
    device: torch.device


class Reporter:
    """Reports of one run; on all processes but the first it does nothing.

    Args:
        directory: `tensorboard/`, `metrics.jsonl` and `inspections.jsonl` are written here.
        steps: of the whole run. start: steps already done when resuming.
        work: of a step.
        every: steps between rows.
        enabled: false on all processes but the first.
    """

    def __init__(self, directory: Path, *, steps: int, start: int, work: Workload, every: int, enabled: bool):
        self.directory, self.every, self.work, self.enabled = directory, every, work, enabled
        self.started, self.first = time.monotonic(), start
        self.metrics, self.inspections = directory / "metrics.jsonl", directory / "inspections.jsonl"
        if enabled:
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                for path in (self.metrics, self.inspections):
                    _forget_rows_after(path, start)
                self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)
            self.bar = progress_bar(total=steps, initial=start, desc="training", unit="step")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is no part of training, whose speed is reported."""
        began = time.monotonic()
        yield
        self.started += time.monotonic() - began

    def step(self, step: int, values: dict[str, float], rates: RetainRates) -> None:
        """Report the end of step number `step`, counted from 1."""
        if not self.enabled:
            return
        with writing(self.directory):
            self._step(step, values, rates)

    def _step(self, step: int, values: dict[str, float], rates: RetainRates) -> None:
        speed = (step - self.first) * self.work.tokens / (time.monotonic() - self.started)
        (soft_keys, soft_values), (hard_keys, hard_values) = (
            rate_L2.float().mean(dim=0).tolist() for rate_L2 in (rates.soft_L2, rates.hard_L2)
        )
        values = {
            **values,
            "soft_rate_keys": soft_keys,
            "soft_rate_values": soft_values,
            "hard_rate_keys": hard_keys,
            "hard_rate_values": hard_values,
            "tokens_per_second": speed,
            "flop_utilization": speed * self.work.flops / self.work.peak_flops,
            "peak_memory_bytes": peak_memory(self.work.device),
        }
        self.bar.set_postfix_str(
            "loss {loss:.3f} CE {cross_entropy:.3f} soft {soft_rate:.3f} hard {hard_rate:.3f} α {alpha:.2f} "
            "{tokens_per_second:.0f} tok/s".format(**values)
        )
        self.bar.update(1)
        if step % self.every == 0:
            for name, value in values.items():
                self.writer.add_scalar(f"train/{name}", value, step)
            _append(self.metrics, {"step": step, **values})
        if step % HEAT_MAP_EVERY == 0 or step == self.bar.total:
            self.writer.add_image("rate/layers_by_keys_values", heat_map(rates.hard_L2, across=4), step)

    def inspection(self, step: int, found: Inspection, tokens: list[str]) -> None:
        """Report a look at the model after step number `step`.

        Args:
            found: what was seen.
            tokens: of the fixed sentence, as text.
        """
        if not self.enabled:
            return
        with writing(self.directory):
            self._inspection(step, found, tokens)

    def _inspection(self, step: int, found: Inspection, tokens: list[str]) -> None:
        values = found.values()
        for name, value in values.items():
            self.writer.add_scalar(f"inspection/{name}", value, step)
        self.writer.add_image(
            "conditioning/layers_by_keys_values", heat_map(_magnitude(found.condition_L2), across=4), step
        )
        rate_LT = found.rate_L2T.mean(dim=1)
        self.writer.add_image("sentence/tokens", bars(rate_LT.mean(dim=0)), step)
        self.writer.add_image("sentence/layers_by_tokens", heat_map(rate_LT), step)
        rows = [f"| {_cell(token)} | {rate:.3f} |" for token, rate in zip(tokens, rate_LT.mean(dim=0), strict=True)]
        self.writer.add_text("sentence/tokens", "\n".join(["| token | kept |", "|---|--:|", *rows]), step)
        row = {"step": step, **values, "condition": found.condition_L2.tolist()}
        row |= {"inversion_error": found.inversion_error_L2.tolist(), "tokens": tokens}
        row |= {f"rate_{side}": found.rate_L2T[:, i].tolist() for i, side in enumerate(("keys", "values"))}
        _append(self.inspections, row)

    def heldout(self, entry: dict[str, Any], *, is_best: bool) -> None:
        """Report what was measured on held-out text after a step, an entry of :class:`training.selection.Selection`."""
        if not self.enabled:
            return
        step, kl, rate, texts = (entry[key] for key in ("step", "kl", "rate", "texts"))
        with writing(self.directory):
            for name, values in (("mean", {"kl": kl, "rate": rate}), *texts.items()):
                for key, value in values.items():
                    self.writer.add_scalar(f"selection, {name}/{key}", value, step)
            _append(self.metrics, {"step": step, "heldout_kl": kl, "heldout_rate": rate, "heldout": texts})
        why_not = "too far from the target rate" if math.isfinite(kl) else "not finite"
        told = "the best so far" if is_best else "no better" if entry["is_accepted"] else why_not
        self.bar.write(f"held out, step {step}: kl {kl:.4g} at a rate of {rate:.4g}, {told}")

    def note(self, name: str, values: dict[str, Any], step: int) -> None:
        """Report the numbers among values measured once."""
        if not self.enabled:
            return
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        with writing(self.directory):
            for key, value in numbers.items():
                self.writer.add_scalar(f"{name}/{key}", value, step)
        self.bar.write(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.bar.write(message)

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            with writing(self.directory):
                self.writer.close()


def write_summary(output: Path, summary: dict[str, Any], config: TrainConfig) -> None:
    """Write `summary.yaml` and `config.yaml` of a finished run into `output`, its directory."""
    for name, values in (("summary.yaml", summary), ("config.yaml", to_dict(config))):
        write_text(output / name, yaml.safe_dump(values, allow_unicode=True, sort_keys=False))


def _append(path: Path, row: dict[str, Any]) -> None:
    append_line(path, json.dumps(row))


def _forget_rows_after(path: Path, step: int) -> None:
    """Drop rows of steps that a resumed run is about to repeat."""
    if path.exists():
        rows = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_text(path, "".join(row for row in rows if (found := _step_of(row)) is not None and found <= step))


def _step_of(row: str) -> int | None:
    """None of half a line, which a process that was killed while it wrote has left; other lines may follow it."""
    try:
        return json.loads(row)["step"] if row.endswith("\n") else None
    except json.JSONDecodeError:
        return None


def _cell(token: str) -> str:
    """A token as it may stand in a table of Markdown."""
    return f"`{token}`" if token.strip() and not set(token) & {"`", "|", "\n"} else f"`{token!r}`".replace("|", "\\|")


def _magnitude(condition_L2: Tensor) -> Tensor:
    """Condition numbers from 1 to 10⁴ as 0 to 1."""
    return condition_L2.log10() / 4


def heat_map(rate_LX: Tensor, *, across: int = 1) -> Tensor:
    """Layers downwards, darker red where more is kept (Figure 5): (3, height, width) in [0, 1].

    Args:
        rate_LX: what each cell shows, in [0, 1].
        across: width of a cell as a multiple of its height.
    """
    cells = rate_LX.detach().float().cpu().clamp(0, 1)
    cells = cells.repeat_interleave(_CELL, dim=0).repeat_interleave(across * _CELL, dim=1)
    return torch.stack([1 - 0.4 * cells, 1 - cells, 1 - cells])


def bars(rate_T: Tensor) -> Tensor:
    """A bar for each token, full height where all is kept (Figure 4): (3, height, width) in [0, 1]."""
    height_T = (rate_T.detach().float().cpu().clamp(0, 1) * _BAR).round()
    filled = torch.arange(_BAR, 0, -1)[:, None] <= height_T
    drawn = torch.zeros(len(rate_T), _CELL, dtype=torch.bool)
    drawn[:, 1:-1] = True
    filled = filled.repeat_interleave(_CELL, dim=1) & drawn.flatten()
    return torch.stack([1 - 0.4 * filled, 1 - filled.float(), 1 - filled.float()])
