"""What is recorded, in groups that run apart: every method on tiny models, tiny trainings, and the demo model.

Labels are `group/method` or `group/variant`. A method's name has the values of its overrides and none of their keys, so
that renaming a setting renames no label.

Shapes: B batch, T tokens, V vocabulary.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from byte_tokenizer import byte_tokenizer
from families import FAMILIES
from methods import METHODS, MakeCache, calibration_of, dynakv_model, tiny_model
from safetensors.torch import load_file
from threads import threads_of
from torch import Tensor
from training_runs import losses, train_here
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils import paths
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan

Cells = dict[str, dict]

RATE = 0.4
SAMPLE = 8  # numbers of a tensor that are kept readable
DECODED = 8  # tokens read one by one after the prompt
PROMPT, NEW = 23, 12
PADDED_LENGTHS = (PROMPT + DECODED, 17 + DECODED)
DEMO_PROMPT, DEMO_NEW = 150, 16
DEMO_PRESETS = ("ojakv", "ojakv-pf", "ojakv-joint", "static-pca-joint", "subspace-g")
STEPS = 10
TRAINING = {
    "threads": 1,
    "checkpoint_every": 0,
    "report": {"inspect_every": 0, "peak_flops": 1e12},
    "optimizer": {"steps": STEPS, "batch_size": 2},
    "calibration": {"tokens": 256},
    "compressor": {"rank_policy": "gate", "granularity": 4},
}
# What distinguishes tiny trainings, by their labels.
VARIANTS = {
    "from-pca": {"calibration": {"start": "pca"}},
    "from-gradients": {
        "calibration": {"start": "gradient"},
        "rate": {"target_retain_rate": 0.4, "calibrate_threshold_tokens": 128},
    },
    "orthogonal-distilled": {
        "calibration": {"start": "pca"},
        "compressor": {"decoder": "orthogonal"},
        "loss": {"distillation": 0.5},
    },
    "nested": {
        "compressor": {"decoder": "orthogonal", "rank_policy": "nested"},
        "rate": {"target_retain_rate": 0.4, "calibrate_threshold_tokens": 128},
    },
}


def digest(tensor: Tensor) -> str:
    """SHA-256 of the contiguous fp32 bytes."""
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def sample(tensor: Tensor) -> list[str]:
    """Evenly spaced numbers of a tensor, first and last among them, as ``float.hex`` has them."""
    flat = tensor.flatten()
    index = torch.linspace(0, flat.numel() - 1, SAMPLE, dtype=torch.float64).long()
    return [number.hex() for number in flat[index].tolist()]


@torch.no_grad()
def said(model: PreTrainedModel, make_cache: MakeCache, ids_BT: Tensor, mask_BT: Tensor, new: int) -> dict:
    """What a model says of a text whose last :data:`DECODED` tokens are read one by one, and `new` greedy tokens after the
    rest of it. Logits of padding are left out: nothing depends on them."""
    prompt = ids_BT.shape[1] - DECODED
    cache, seen, parts = make_cache(), 0, []
    for part in (ids_BT[:, :prompt], *ids_BT[:, prompt:].split(1, dim=1)):
        seen += part.shape[1]
        parts.append(model(part, attention_mask=mask_BT[:, :seen], past_key_values=cache, use_cache=True).logits)
    logits_NV = torch.cat(parts, dim=1)[mask_BT.bool()]
    tokens = model.generate(
        ids_BT[:, :prompt],
        attention_mask=mask_BT[:, :prompt],
        max_new_tokens=new,
        do_sample=False,
        past_key_values=make_cache(),
    )
    return {
        "logits": {"sha256": digest(logits_NV), "sample": sample(logits_NV)},
        "tokens": tokens[:, prompt:].tolist(),
    }


def two_texts(lengths: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Random ids (2, T) and their mask; with `lengths` padded on the left to these."""
    total = PROMPT + DECODED
    ids_BT = torch.randint(1, 97, (2, total), generator=torch.Generator().manual_seed(5))
    return ids_BT, (torch.arange(total) >= total - torch.tensor(lengths or (total, total))[:, None]).long()


def every_method(
    group: str, make_model: Callable[[], PreTrainedModel], lengths: tuple[int, int] | None = None
) -> Cells:
    """Every method on a model; what it refuses is recorded as the error's text.

    Args:
        lengths: of the two texts, padded on the left; all are equally long by default.
    """
    ids_BT, mask_BT = two_texts(lengths)
    cells = {}
    for method in METHODS:
        model = make_model()
        try:
            cell = said(model, method.build(model, RATE), ids_BT * mask_BT, mask_BT, NEW)
        except UserError as error:
            cell = {"error": str(error)}
        cells[f"{group}/{method.name}"] = cell
    return cells


def options(group: str) -> Cells:
    """Integers, eviction and both, with learned ranks and with the two layouts of online bases."""
    evicting = {"eviction": {"keep_ratio": 0.5, "window_size": 4, "kernel_size": 3}}
    variants = {
        "int8": {"cache_dtype": "int8"},
        "int4": {"cache_dtype": "int4"},
        "int4-groups": {"cache_dtype": "int4", "group_size": 4},
        "evicting": evicting,
        "evicting-int8": {"cache_dtype": "int8", **evicting},
    }
    online = {"update_period": 4, "recent_window": 3, "rank_multiple": 4}
    ids_BT, mask_BT = two_texts(PADDED_LENGTHS)
    cells = {}
    for variant, settings in variants.items():
        model = tiny_model()
        make = dynakv_model(model, RATE, **settings)
        cells[f"{group}/dynakv-{variant}"] = said(model, make, ids_BT * mask_BT, mask_BT, NEW)
        for preset in ("ojakv-joint", "ojakv-pf"):
            model = tiny_model()
            plan = make_plan(calibration_of(model), OjaKVConfig.preset(preset, rate=RATE, **online, **settings))
            cells[f"{group}/{preset}-{variant}"] = said(
                model, functools.partial(OjaKVCache, model, plan), ids_BT * mask_BT, mask_BT, NEW
            )
    return cells


def trained(values: dict, output: Path, **changes) -> dict:
    """The losses of a training run, and a digest of the weights it ends with that depends on none of their names."""
    checkpoint = train_here(values, output, **changes)
    found = losses(output)
    assert len(found) == STEPS
    digests = sorted(digest(tensor) for tensor in load_file(Path(checkpoint) / "compressor.safetensors").values())
    return {
        "losses": [loss.hex() for loss in found],
        "weights": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }


def tiny_trainings(group: str) -> Cells:
    """Every variant of :data:`VARIANTS` through the training loop, on a tiny model and a made-up text."""
    letters = "cache keeps what later tokens ask"
    lines = ["".join(letters[(i * k) % len(letters)] for k in range(1, 300)) for i in range(1, 30)]
    with tempfile.TemporaryDirectory() as directory:
        model, text = Path(directory, "tiny"), Path(directory, "text.jsonl")
        tiny_model(vocab_size=257, eos_token_id=0).save_pretrained(model)
        byte_tokenizer().save_pretrained(model)
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        values = {
            **TRAINING,
            "model": str(model),
            "dtype": "float32",
            "dataset": {"name": str(text), "sequence_length": 64},
        }
        return {
            f"{group}/{name}": trained(values, Path(directory, name), **changes) for name, changes in VARIANTS.items()
        }


@functools.cache
def demo_tokens() -> Tensor:
    """The start of the longest held-out text of the demo, (1, T)."""
    with open(paths.home() / "text/addresses-heldout.jsonl") as file:
        texts = [json.loads(line)["text"] for line in file]
    return load_tokenizer(str(_demo_dir()))(max(texts, key=len), return_tensors="pt")["input_ids"][:, :1024]


def demo_dynakv(group: str) -> Cells:
    """PCA bases of the demo model, and gates whose ranks differ from token to token, at about a trained one's rate."""
    model = load_model(str(_demo_dir()))
    moments = calibrate(model, demo_tokens()[:, :512], progress=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig())
    dynakv.initialize_from_moments(model, moments)
    generator = torch.Generator().manual_seed(2)
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            gate = compressor.gate
            gate.weight.data.copy_(0.05 * torch.randn(gate.weight.shape, generator=generator))
            gate.bias.data.copy_(-((torch.arange(gate.bias.numel()) - 150.0) ** 2) / 200)
    dynakv.use_dynakv_cache(model)
    return {f"{group}/spread-gates": _said_of_demo(model, lambda: dynakv.DynaKVCache.from_model(model))}


def demo_ojakv(group: str) -> Cells:
    """Presets on the demo model, of one calibration."""
    model = load_model(str(_demo_dir()))
    calibration = Calibration.from_text(model, demo_tokens()[:, :512], progress=False)

    def of(preset: str) -> MakeCache:
        config = OjaKVConfig.preset(preset, rate=RATE)
        return lambda: OjaKVCache.from_model(model, config, bases=calibration)

    return {f"{group}/{preset}": _said_of_demo(model, of(preset)) for preset in DEMO_PRESETS}


def demo_training(group: str) -> Cells:
    """A few short steps of the demo's training."""
    values = {
        **TRAINING,
        "model": str(_demo_dir()),
        "dtype": "float32",
        "dataset": {"name": str(paths.home() / "text/addresses-heldout.jsonl"), "sequence_length": 96},
        "optimizer": {"steps": STEPS, "batch_size": 1},
        "rate": {"target_retain_rate": 0.3, "calibrate_threshold_tokens": 192},
        "compressor": {"rank_policy": "gate", "granularity": 8},
    }
    with tempfile.TemporaryDirectory() as directory:
        return {f"{group}/from-gradients": trained(values, Path(directory, "run"))}


def _demo_dir() -> Path:
    return paths.home() / "SmolLM2-135M-Instruct"


def _said_of_demo(model: PreTrainedModel, make_cache: MakeCache) -> dict:
    """What the demo model says of a text it was not calibrated on."""
    ids_BT = demo_tokens()[:, 600 : 600 + DEMO_PROMPT + DECODED]
    return said(model, make_cache, ids_BT, torch.ones_like(ids_BT), DEMO_NEW)


TINY: dict[str, Callable[[str], Cells]] = {
    "tiny": lambda group: every_method(group, tiny_model),
    "tiny-padded": lambda group: every_method(group, tiny_model, PADDED_LENGTHS),
    **{f"family-{one.name}": functools.partial(every_method, make_model=one.model) for one in FAMILIES},
    "options": options,
    "training": tiny_trainings,
}
DEMO: dict[str, Callable[[str], Cells]] = {
    "demo-dynakv": demo_dynakv,
    "demo-ojakv": demo_ojakv,
    "demo-training": demo_training,
}


def record(group: str) -> Cells:
    """What one of :data:`TINY` or :data:`DEMO` computes now, on one thread."""
    with threads_of(1):
        torch.manual_seed(0)
        return {**TINY, **DEMO}[group](group)
