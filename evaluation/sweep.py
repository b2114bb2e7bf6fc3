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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynakv.config import GATE
from dynakv.training_config import COMPRESSOR, TrainConfig
from lowrank_kv.calibration.known_text import KnownText
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, device_of, load_model, load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.config import configuration, option, parse_config, read_yaml, require, section, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.provenance import path_input
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration

from .cells import measured_by
from .compare import new_comparison, rows_of_cells
from .methods import FULL, Method, MethodConfig, learned, uncompressed
from .reading import Reading
from .run_setup import cells_in, identity_of, setting_of, warn_of_known
from .texts import TextConfig, check_texts, documents_told, measured_texts, read_texts
from .window_cells import measure_cells

BASES, POINTS = "bases", "points"
# Follows what launches a Python module; by its name the command is found wherever `lowrank_kv_cli` is.
TRAIN = ("-m", "lowrank_kv_cli", "train")
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
        for key, values in (("targets", self.targets), ("alphas", self.alphas)):
            names = [f"{value:g}" for value in values]  # of the points' directories
            require(len(set(names)) == len(names), key, values, "numbers that differ in their first six digits")
        check_texts(self.texts)
        require(self.block_length >= 2, "block_length", self.block_length, "at least 2 tokens")
        require(0 <= self.prefix < self.block_length - 1, "prefix", self.prefix, "below `block_length` by two at least")
        require(self.blocks >= 1, "blocks", self.blocks, "at least 1")
        labels = [variant.label for variant in self.variants]
        require(len(set(labels)) == len(labels), "variants", labels, "of different labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One training run of a sweep.

    Attributes:
        variant: label of its curve.
        name: of its directory.
        arguments: of the training command, without `--output`.
        run: what they say.
        after: name of the point that it trains on from; None for one that starts from the calibration.
    """

    variant: str
    name: str
    arguments: list[str]
    run: TrainConfig
    after: str | None

    def settings(self) -> dict[str, Any]:
        """What training it again must have in common with its beginning, wherever the sweep's directory is now."""
        settings = to_dict(self.run)
        bases = BASES if self.after is None else None
        return settings | {"initial_checkpoint": self.after, "calibration": settings["calibration"] | {"bases": bases}}


def points(config: SweepConfig, output: Path) -> list[Point]:
    """Every run of the sweep, in order.

    Raises:
        UserError: one of them could not be trained, or not in a sweep.
    """
    settings = [
        *((f"target-{rate:g}", ["--rate.target_retain_rate", f"{rate:g}"]) for rate in config.targets),
        *((f"alpha-{a:g}", ["--rate.target_retain_rate", "null", "--rate.alpha", f"{a:g}"]) for a in config.alphas),
    ]
    found = []
    for variant in config.variants or [Variant(label="dynakv")]:
        after = None
        for setting, rate in settings:
            name = f"{variant.label}-{setting}"
            arguments = ["--config", config.train, *variant.arguments, *rate, *_start_arguments(after, output)]
            run = _run_of(name, arguments)
            found.append(Point(variant=variant.label, name=name, arguments=arguments, run=run, after=after))
            after = name if config.staged else None
    _check(config, found)
    return found


def _start_arguments(after: str | None, output: Path) -> list[str]:
    """What a point starts from, the calibration or the point `after`; the other way is put out, whatever the training run's
    file says."""
    if after is None:
        return ["--calibration.bases", str(output / BASES), "--initial_checkpoint", "null"]
    return ["--calibration.bases", "null", "--initial_checkpoint", str(output / POINTS / after / CHECKPOINT)]


def _run_of(name: str, arguments: list[str]) -> TrainConfig:
    try:
        run, _ = parse_config(TrainConfig, arguments, description=__doc__)
    except UserError as error:
        raise UserError(f"the run `{name}` of the sweep: {error}") from error
    return run


def _check(config: SweepConfig, runs: list[Point]) -> None:
    """Raise :class:`UserError` where a sweep cannot have one of its runs."""

    def variants(condition: Callable[[TrainConfig], bool]) -> str:
        return ", ".join(dict.fromkeys(point.variant for point in runs if condition(point.run)))

    exact = variants(lambda run: run.compressor.reads_prompts_exactly)
    require(
        config.prefix > 0 or not exact,
        "prefix",
        config.prefix,
        f"above 0 with exact prompts ({exact}): in one pass nothing they compress is ever read",
    )
    planned = variants(lambda run: run.compressor.has_plan)
    require(
        not (config.staged and planned),
        "staged",
        config.staged,
        "false with plans of bits: a run that trains on from another keeps its bits, and so its rate",
    )
    require(
        not (config.alphas and planned),
        "alphas",
        config.alphas,
        f"left out where a plan of bits is learned ({planned}), which has a target and no price, or its arguments must say "
        f"`--compressor.rank_policy, {GATE}`",
    )
    joint = {point.variant: n for point in runs if (n := point.run.compressor.joint_layers)}
    require(
        len(set(joint.values())) <= 1,
        "compressor.joint_layers",
        ", ".join(f"{layers} ({label})" for label, layers in joint.items()),
        "one number beside 0: the points share a calibration, which says what so many layers have in common; sweep the "
        "others into another --output",
    )
    for point in runs:
        trainable = point.run.trainable
        require(
            trainable == COMPRESSOR, "trainable", trainable, f"{COMPRESSOR} in a sweep, whose points share a backbone"
        )


def sweep(config: SweepConfig, output: Path) -> tuple[dict[str, Any], Path]:
    """The record of this run, with rows of the full cache and of every point, and its file; it is written after every
    point.

    A sweep that is started again trains and measures what is missing: `summary.measured_by` names the runs that measured the
    windows of each point.

    Args:
        config: of the sweep.
        output: the record is written into `quality/` here; bases, training runs and cells lie beside that.

    Raises:
        UserError: a run failed, or `output` holds a sweep of other settings.
    """
    recipe, runs = read_yaml(config.train), points(config, output)
    source = runs[0].run.model
    name, tokenizer = name_of(source), load_tokenizer(source)
    texts = read_texts(config.texts, tokenizer, config.block_length, config.blocks, key="block_length")
    warn_of_known(_known_texts(config, runs), measured_texts(config.texts))
    device = device_of(config.device)
    # Training needs the device, too: the model is there only while it is in use.
    model = load_model(source, dtype=config.dtype, device="cpu")
    check_length(model, config.block_length, "block_length")
    with _moved(model, device):
        bases = _calibrate_once(config, runs, model, tokenizer, output)
    ids = {label: each.ids_NT for label, each in texts.items()}
    settings = to_dict(config) | {"model": name, "recipe": recipe}
    record = new_comparison(settings, [path_input("bases", bases)], model, ids, device)
    record |= {"summary": {"measured_by": {}, "documents": documents_told(texts)}}
    cells, reading = cells_in(output, record), Reading(prefix=config.prefix, step=MAX_DECODE_QUERIES)
    setting = setting_of(record, config.dtype)

    def measure(name: str, method: Method) -> None:
        *_, found = measure_cells(model, [method], ids, cells, reading, setting=setting, record=record)
        record["rows"] += rows_of_cells(found, texts)
        record["summary"]["measured_by"][name] = measured_by(cell for each in found.values() for cell in each)

    with _moved(model, device):
        measure(FULL, uncompressed(model))
    for point in runs:
        directory = output / POINTS / point.name
        _check_same(directory / POINT, point.settings())
        checkpoint = _train(directory, [*(config.launch or [sys.executable]), *TRAIN, *point.arguments])
        with _moved(model, device):
            measure(point.name, learned(MethodConfig(checkpoint=str(checkpoint), label=point.variant), model))
        record["inputs"].append(path_input("checkpoint", checkpoint) | {"name": point.name})
        path = run_record.write(record, output)
    return record, path


def _known_texts(config: SweepConfig, runs: list[Point]) -> list[KnownText]:
    """What the calibration and the training runs read."""
    option = "--calibration.heldout_share"
    known = [
        KnownText(reader="the calibration", record=config.calibration.record(), make="calibrate", share_option=option)
    ]
    read: list[dict[str, Any]] = []  # points of one recipe read the same
    for point in runs:
        for record in point.run.dataset.records():
            if record not in read:
                read.append(record)
                option = "--dataset.heldout_share"
                known.append(KnownText(reader=f"`{point.name}`", record=record, make="train", share_option=option))
    return known


def _calibrate_once(
    config: SweepConfig,
    runs: list[Point],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
) -> Path:
    """The directory of the calibration that all points start from, made where it is not there yet."""
    needs = needs_of(runs)
    asked = {key: needed for key, needed in needs.items() if needed}
    _check_same(output / CALIBRATION, identity_of(model) | dataclasses.asdict(config.calibration) | asked)
    bases = output / BASES
    if not bases.exists():
        blocks_NT = config.calibration.blocks(tokenizer)
        calibration = Calibration.from_text(
            model,
            blocks_NT,
            gradients=needs["gradients"],
            read_gradients=needs["read"],
            joint_layers=needs["joint_layers"],
        )
        calibration.save(bases, model=name_of(runs[0].run.model), **config.calibration.record())
    return bases


def needs_of(runs: list[Point]) -> dict[str, int]:
    """What some of the runs ask of a calibration beside moments of states: gradients, what is read of a cache, and for how
    many layers that are coded together, the same in all runs that code some so."""
    configs = [point.run for point in runs]
    return {
        "gradients": any(run.starts_from_gradients and not run.compressor.has_plan for run in configs),
        "read": any(run.compressor.has_plan for run in configs),
        "joint_layers": max(run.compressor.joint_layers for run in configs),
    }


@contextlib.contextmanager
def _moved(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Have a model on a device for a while; it is on the CPU before and after."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")


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
