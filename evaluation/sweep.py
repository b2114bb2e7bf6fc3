"""The rate–quality curve of a training recipe: several prices or target rates, from one calibration.

Every point is a training run of its own in `points/`, started by the training command, so that it may be launched on many
processes. A sweep that is started again goes on with what is missing.
In a staged sweep each point trains on from the one before it.
"""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynakv.config import GATE, GRADIENT, LEARNED_BY_DEFAULT, NESTED, PCA, PLAN, SOFT_THRESHOLD, STARTS_FROM_PCA
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, device_of, load_model, load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.config import configuration, option, read_yaml, require, section, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import expand, name_of
from lowrank_kv.utils.provenance import path_input, weights_input
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration

from .cells import measured_by
from .compare import new_comparison, row_of
from .measure import Reading, measured
from .measurement import cells_in, setting_of
from .methods import FULL, Method, MethodConfig, learned, uncompressed
from .texts import TextConfig, check_texts, documents_told, read_texts

BASES, POINTS = "bases", "points"
# Follows what launches a Python module; by its name the command is found wherever `lowrank_kv_cli` is.
TRAIN = ("-m", "lowrank_kv_cli", "train")
START, COMPRESSOR = "--calibration.start", "compressor"
CALIBRATION, POINT, CHECKPOINT = "calibration.json", "point.json", "checkpoint"


@configuration
class Variant:
    """A recipe that gets a curve of its own."""

    label: str = option(help="name of its curve")
    arguments: list[str] = option([], help="further arguments of training, e.g. [--compressor.decoder, orthogonal]")

    def __post_init__(self):
        require(
            re.fullmatch(r"[\w.-]+", self.label) is not None, "label", self.label, "letters, digits, dots and dashes"
        )


@configuration
class SweepConfig:
    """One sweep: every variant at every target rate and at every α."""

    train: str = option(help="YAML file of the training run")
    targets: list[float] = option([], help="hard retain rates to train for, e.g. 0.5,0.3,0.2")
    alphas: list[float] = option([], help="prices to hold fixed (paper), e.g. 1,4,16")
    staged: bool = option(
        False,
        help="train each point of a recipe on from the one before it, in the order given, rather than each from the "
        "calibration; a point's tokens then add up",
    )
    variants: list[Variant] = option([], help="recipes to compare; by default the training run's own, as `dynakv`")
    launch: list[str] = option(
        [], help="launcher of the training module, e.g. accelerate,launch,--config_file,FILE; by default this Python"
    )
    texts: list[TextConfig] = option(help="texts to measure on")
    dtype: str = option("float32", help="of the model when measured", choices=DTYPES)
    device: str | None = option(None, help=f"of the model when measured: {DEVICE_HELP}")
    block_length: int = option(1024, help="length of a scored block, the prompt included", unit="tokens")
    prefix: int = option(
        0,
        help="length of a block's prompt, after which it is scored, read as generation reads it; 0 scores one pass",
        unit="tokens",
    )
    blocks: int = option(4, help="blocks of each text", unit="blocks")
    calibration: CalibrationText = section(CalibrationText)

    def __post_init__(self):
        require(bool(self.targets or self.alphas), "targets", self.targets, "given, or `alphas`")
        require(all(0 < rate <= 1 for rate in self.targets), "targets", self.targets, "numbers in (0, 1]")
        require(all(alpha >= 0 for alpha in self.alphas), "alphas", self.alphas, "zero or positive")
        check_texts(self.texts)
        require(self.block_length >= 2, "block_length", self.block_length, "at least 2 tokens")
        require(0 <= self.prefix < self.block_length - 1, "prefix", self.prefix, "below `block_length` by two at least")
        require(self.blocks >= 1, "blocks", self.blocks, "at least 1")
        labels = [variant.label for variant in self.variants]
        require(len(set(labels)) == len(labels), "variants", labels, "of different labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One training run of a sweep; `after` names the one it trains on from, None where it starts from the calibration."""

    variant: str
    name: str
    arguments: list[str]
    after: str | None


def points(config: SweepConfig) -> list[Point]:
    """Every run of the sweep."""
    settings = [
        *((f"target-{rate:g}", ["--rate.target_retain_rate", f"{rate:g}"]) for rate in config.targets),
        *((f"alpha-{a:g}", ["--rate.target_retain_rate", "null", "--rate.alpha", f"{a:g}"]) for a in config.alphas),
    ]
    found = []
    for variant in _variants(config):
        after = None
        for name, arguments in settings:
            name = f"{variant.label}-{name}"
            found.append(
                Point(variant=variant.label, name=name, arguments=[*variant.arguments, *arguments], after=after)
            )
            after = name if config.staged else None
    return found


def sweep(config: SweepConfig, output: Path) -> dict[str, Any]:
    """The record of this run, with rows of the full cache and of every point; it is written after every point.

    A sweep that is started again trains and measures what is missing: `summary.measured_by` names the runs that measured the
    windows of each point.

    Args:
        config: of the sweep.
        output: the record is written into `quality/` here; bases, training runs and cells lie beside that.

    Raises:
        UserError: a run failed, or `output` holds a sweep of other settings.
    """
    recipe = read_yaml(config.train)
    needs = {
        "gradients": starts_from_gradients(config, recipe),
        "read": has_plans(config, recipe),
    }  # of the calibration
    _check_recipe(config, recipe, has_plan=needs["read"])
    source = expand(recipe["model"])
    name, tokenizer = name_of(source), load_tokenizer(source)
    texts = read_texts(config.texts, tokenizer, config.block_length, config.blocks)
    device = device_of(config.device)
    # Training needs the device, too: the model is there only while it is in use.
    model = load_model(source, dtype=config.dtype, device="cpu")
    check_length(model, config.block_length, "block_length")
    with _moved(model, device):
        bases = _calibrate_once(config, source, needs, model, tokenizer, output)
    ids = {label: each.ids_NT for label, each in texts.items()}
    settings = to_dict(config) | {"model": name, "recipe": recipe}
    record = new_comparison(settings, [path_input("bases", bases)], model, ids, device)
    record |= {"summary": {"measured_by": {}, "documents": documents_told(texts)}}
    cells, reading = cells_in(output), Reading(prefix=config.prefix, step=MAX_DECODE_QUERIES)
    setting = setting_of(record, config.dtype) | reading._asdict()

    def measure(name: str, method: Method) -> None:
        *_, found = measured(model, [method], ids, cells, reading, setting=setting, record=record)
        record["rows"] += [
            row_of(label, text, {text: [cell.score for cell in each]}, texts) for (text, label), each in found.items()
        ]
        record["summary"]["measured_by"][name] = measured_by(cell for each in found.values() for cell in each)

    with _moved(model, device):
        measure(FULL, uncompressed(model))
    for point in points(config):
        directory = output / POINTS / point.name
        arguments = ["--config", config.train, *point.arguments, *start_arguments(point, output)]
        _check_same(directory / POINT, {"recipe": recipe, "arguments": arguments})
        checkpoint = _train(directory, [*(config.launch or [sys.executable]), *TRAIN, *arguments])
        with _moved(model, device):
            measure(point.name, learned(MethodConfig(checkpoint=str(checkpoint), label=point.variant), model))
        record["inputs"].append(path_input("checkpoint", checkpoint) | {"name": point.name})
        run_record.write(record, output)
    return record


def _check_recipe(config: SweepConfig, recipe: dict[str, Any], *, has_plan: bool) -> None:
    """Raise :class:`UserError` where the training run cannot be swept."""
    require(
        isinstance(recipe.get("model"), str), "model", recipe.get("model"), f"a hub id or directory in {config.train}"
    )
    exact = [variant.label for variant in _variants(config) if _reads_exactly(config, recipe, variant)]
    require(
        config.prefix > 0 or not exact,
        "prefix",
        config.prefix,
        f"above 0 with exact prompts ({', '.join(exact)}): in one pass nothing they compress is ever read",
    )
    require(
        not (config.staged and has_plan),
        "staged",
        config.staged,
        "false with plans of bits: a run that trains on from another keeps its bits, and so its rate",
    )
    for variant in _variants(config):
        trainable = _given(variant.arguments, "--trainable", recipe.get("trainable", COMPRESSOR))
        require(
            trainable == COMPRESSOR, "trainable", trainable, f"{COMPRESSOR} in a sweep, whose points share a backbone"
        )


def _calibrate_once(
    config: SweepConfig,
    source: str,
    needs: dict[str, bool],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
) -> Path:
    """The directory of the calibration that all points start from, made where it is not there yet.

    Args:
        source: hub id or directory of the model.
        needs: what it must have, as :meth:`Calibration.from_text` takes it.
    """
    asked = {key: True for key, needed in needs.items() if needed}
    of_model = {"model": source, "weights": weights_input(model)["sha256"]}
    _check_same(output / CALIBRATION, of_model | dataclasses.asdict(config.calibration) | asked)
    bases = output / BASES
    if not bases.exists():
        calibration = Calibration.from_text(model, config.calibration.blocks(tokenizer), **needs)
        calibration.save(bases, model=name_of(source), **config.calibration.record())
    return bases


@contextlib.contextmanager
def _moved(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Have a model on a device for a while; it is on the CPU before and after."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")


def starts_from_gradients(config: SweepConfig, recipe: dict[str, Any]) -> bool:
    """Whether some of its runs do, so that the calibration must have the loss's gradients.

    Args:
        config: of the sweep.
        recipe: what `config.train` holds.

    Raises:
        UserError: such a run would have a price and no target.
    """

    def setting(variant: Variant, part: str, key: str) -> str | None:
        return _setting(config, recipe, variant, part, key)

    gated = [variant for variant in _variants(config) if not _has_plan(config, recipe, variant)]
    starts = {variant.label: setting(variant, "calibration", "start") for variant in gated}
    asked = [label for label, start in starts.items() if start == GRADIENT]
    if asked and config.alphas:
        raise UserError(
            f"`alphas` is {config.alphas}, but {', '.join(asked)} starts from gradients, which needs a target: leave "
            f"`alphas` out, or add `{START}, {PCA}` to its arguments"
        )
    shared = [v.label for v in gated if setting(v, "compressor", "rank_policy") in (NESTED, SOFT_THRESHOLD)]
    if shared and config.alphas:
        raise UserError(
            f"`alphas` is {config.alphas}, but {', '.join(shared)} has one rank for all tokens, which needs a target: "
            f"leave `alphas` out, or take it from `variants`"
        )
    # Training starts so of its own accord where it can.
    free = [variant for variant in gated if starts[variant.label] is None and config.targets]
    can = [all(setting(v, "compressor", key) not in refused for key, refused in STARTS_FROM_PCA.items()) for v in free]
    return bool(asked) or any(can)


def has_plans(config: SweepConfig, recipe: dict[str, Any]) -> bool:
    """Whether some of its runs learn plans of bits, so that the calibration must say what is read of a cache."""
    planned = [variant.label for variant in _variants(config) if _has_plan(config, recipe, variant)]
    if planned and config.alphas:
        raise UserError(
            f"`alphas` is {config.alphas}, but {', '.join(planned)} learns a plan of bits, which has a target and no price: "
            f"leave `alphas` out, or add `--compressor.rank_policy, {GATE}` to its arguments"
        )
    return bool(planned)


def _has_plan(config: SweepConfig, recipe: dict[str, Any], variant: Variant) -> bool:
    return (_setting(config, recipe, variant, "compressor", "rank_policy") or LEARNED_BY_DEFAULT) == PLAN


def _reads_exactly(config: SweepConfig, recipe: dict[str, Any], variant: Variant) -> bool:
    prefill = _setting(config, recipe, variant, "compressor", "prefill")
    return prefill == "exact" or (prefill is None and _has_plan(config, recipe, variant))


def _setting(config: SweepConfig, recipe: dict[str, Any], variant: Variant, part: str, key: str) -> str | None:
    """What a variant's runs say in a key of a section; None where nothing does."""
    values = recipe.get(part) or {}
    if not isinstance(values, dict):
        raise UserError(f"`{part}` must be a section with keys, got {values!r} in {config.train}")
    value = _given(variant.arguments, f"--{part}.{key}", values.get(key))
    return None if value in ("null", "none") else value


def _given(arguments: list[str], flag: str, default: str | None) -> str | None:
    """The last value that command-line arguments give a flag, as ``--flag value`` or ``--flag=value``."""
    for place in reversed(range(len(arguments))):
        name, equals, value = arguments[place].partition("=")
        if name == flag:
            if not equals and place + 1 == len(arguments):
                raise UserError(f"`arguments` ends with `{flag}`, which needs a value")
            return value if equals else arguments[place + 1]
    return default


def _variants(config: SweepConfig) -> list[Variant]:
    return config.variants or [Variant(label="dynakv")]


def start_arguments(point: Point, output: Path) -> list[str]:
    """What a point starts from; the other way is put out, whatever the training run's file says."""
    if point.after is None:
        return ["--calibration.bases", str(output / BASES), "--initial_checkpoint", "null"]
    return ["--calibration.bases", "null", "--initial_checkpoint", str(output / POINTS / point.after / CHECKPOINT)]


def _train(directory: Path, command: list[str]) -> Path:
    """Train in `directory`, from the newest state there if any; returns the checkpoint."""
    checkpoint, states = directory / CHECKPOINT, directory / "states"
    if not checkpoint.exists():
        resume = ["--resume"] if states.is_dir() and any(states.glob("step-*")) else []
        done = subprocess.run([*command, "--output", str(directory), *resume], check=False)
        if done.returncode:
            raise UserError(
                f"training of {directory} ended with status {done.returncode}, see above; start the sweep again to go on"
            )
    return checkpoint


def _check_same(path: Path, settings: dict) -> None:
    """Write the settings of a point, or of the calibration, or refuse to go on with others."""
    if not path.exists():
        write_text(path, json.dumps(settings, indent=2) + "\n")
    elif json.loads(path.read_text(encoding="utf-8")) != settings:
        raise UserError(
            f"`{path.parent}` was begun with other settings than now; remove it, or choose another --output"
        )
