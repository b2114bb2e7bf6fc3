"""What measurements of methods have in common: the keys of their configurations, the model, its calibration, and the cells
that were measured before.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynakv.checkpoint_files import read_config
from dynakv.known_texts import known_texts
from lowrank_kv.calibration.known_text import KnownText
from lowrank_kv.calibration.spectrum import DAMPING
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES
from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.provenance import content_input, model_input, path_input, weights_input
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration

from .cells import Cells, Measurer
from .methods import MethodConfig, check_labels
from .peers.peer import READ
from .scores import WindowScore


class MeasuredText(NamedTuple):
    """A text that is measured.

    Attributes:
        name: hub id or file.
        share: of its documents, as `heldout_share` counts them; 0 for all.
        split: of a data set of the hub; None where there is none.
    """

    name: str
    share: float = 0.0
    split: str | None = None


@configuration
class MeasurementConfig:
    """The keys that all of them have."""

    model: str | None = option(None, help="hub id or directory; by default what the first checkpoint was trained on")
    dtype: str = option("bfloat16", help="of the model", choices=DTYPES)
    device: str | None = option(None, help=DEVICE_HELP)
    fraction: float = option(1.0, help="share of the windows or items to measure, for a first look")
    step: int = option(MAX_DECODE_QUERIES, help="tokens read at a time after the prompt", unit="tokens")
    bases: str | None = option(
        None, help="directory written by `lowrank-kv calibrate`; by default `calibration` is run where it is needed"
    )
    calibration: CalibrationText | None = option(None, help="text to calibrate on where there are no `bases`")

    def __post_init__(self):
        require(0 < self.fraction <= 1, "fraction", self.fraction, "in (0, 1]")
        require(self.step >= 1, "step", self.step, "at least 1")

    def share_of(self, count: int) -> int:
        """How many of `count` windows or items are measured: `fraction` of them, and at least one."""
        return max(1, round(count * self.fraction))

    @property
    def checkpoints(self) -> list[str]:
        """Those that are measured, each once."""
        return []

    def load_bases(self) -> Calibration | None:
        """`bases` as its files are, of no model yet: where they cannot be read nobody waits for the model first."""
        return None if self.bases is None else Calibration.load(self.bases)


@configuration
class MethodsConfig(MeasurementConfig):
    """The keys of those that measure any methods."""

    methods: list[MethodConfig] = option(help="what to compare; the uncompressed cache is always there")

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.methods), "methods", self.methods, "at least one")
        check_labels(self.methods)
        require(bool(self.model or self.checkpoints), "model", self.model, "given where there is no checkpoint")
        needing = [method.name for method in self.methods if method.needs]
        require(
            not needing or self.bases is not None or self.calibration is not None,
            "bases",
            self.bases,
            f"given where there are presets, or peers that are calibrated ({', '.join(needing)}), or `calibration`",
        )

    @property
    def model_name(self) -> str:
        """Hub id or directory."""
        return self.model or read_config(self.checkpoints[0]).base_model

    @property
    def checkpoints(self) -> list[str]:
        return list(dict.fromkeys(method.checkpoint for method in self.methods if method.checkpoint))

    @property
    def needs_calibration(self) -> bool:
        """Whether one of the methods is made of it."""
        return any(method.needs for method in self.methods)

    @property
    def needs_read_gradients(self) -> bool:
        """Whether the calibration must say what is read of a compressed cache."""
        return any(READ in method.needs for method in self.methods)


def calibration_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: MeasurementConfig,
    bases: Calibration | None,
    *,
    read_gradients: bool,
    measured: Iterable[MeasuredText],
    needed: bool = True,
) -> tuple[Calibration | None, list[dict[str, Any]]]:
    """The model's calibration, and what it was made of as inputs of a record; (None, []) where there is neither bases nor
    text. Warns where it, or a checkpoint of `config`, can have read what is measured.

    Args:
        bases: those of `config`, loaded.
        read_gradients: whether it is to say what is read of a compressed cache.
        measured: the texts.
        needed: whether anything asks for it; a text is calibrated on only then.
    """
    known = list(itertools.chain.from_iterable(map(known_texts, config.checkpoints)))
    calibration, inputs = None, []
    if bases is not None:
        calibration = bases.for_model(model)
        inputs = [path_input("bases", config.bases)]
    elif config.calibration is not None and not needed:
        print("`calibration` is left out: nothing that is measured needs it")
    elif config.calibration is not None:
        ids_NT = config.calibration.blocks(tokenizer)
        # The same tokens in other blocks, or by another version's rule, are another calibration, whose cells are others.
        how = json.dumps({"blocks": list(ids_NT.shape), "read_gradients": read_gradients, "damping": DAMPING})
        content = how.encode() + ids_NT.cpu().numpy().tobytes()
        inputs = [content_input("calibration", ",".join(config.calibration.name), content)]
        calibration = Calibration.from_text(model, ids_NT, read_gradients=read_gradients)
        calibration = dataclasses.replace(calibration, record=config.calibration.record())
    if calibration is not None:
        known.append(calibration.known_text)
    warn_of_known(known, measured)
    return calibration, inputs


def warn_of_known(known: Iterable[KnownText], measured: Iterable[MeasuredText]) -> None:
    """Warn of each measured text that may be among known ones."""
    for read, text in itertools.product(known, measured):
        read.warn_of(text.name, share=text.share, split=text.split)


def setting_of(record: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What all cells of a measurement have in common, as JSON: another model, dtype or other bases make other cells.

    Args:
        record: of the measurement; its inputs name the model, its weights and the bases.
        dtype: of the model.
    """
    hashes = {each["role"]: each["sha256"] for each in record["inputs"]}
    bases = [each["sha256"] for each in record["inputs"] if each["role"] in ("bases", "calibration")]
    return {"model": hashes["model"], "weights": hashes["weights"], "dtype": dtype, "bases": bases}


def identity_of(model: PreTrainedModel) -> dict[str, str]:
    """What tells a model from others in the keys of what is measured once, as JSON."""
    return {"model": model_input(model)["sha256"], "weights": weights_input(model)["sha256"]}


def cells_in(output: Path, record: dict[str, Any], kind: type = WindowScore) -> Cells:
    """The cells of a directory; says so where some were measured there before, and where not as this run measures.

    Args:
        record: of this run.
        kind: the class of the scores.
    """
    cells, now = Cells(output, kind), Measurer.of_run(record)
    if len(cells):
        print(f"{len(cells)} cells were measured here before; those of equal settings are not measured again")
    for by, count in collections.Counter(cell.by for cell in cells).items():
        # Numbers of other processors and versions differ in their last digits, those of other code as their commits say; of
        # uncommitted code nothing is known.
        theirs, ours = ((each.commit, each.version, each.torch, each.processor) for each in (by, now))
        if by.dirty or theirs != ours:
            of_commit = f"version {by.version}" if by.commit is None else f"commit {by.commit}"
            code = "uncommitted code" if by.dirty else of_commit
            machine = "an unknown machine" if by.processor is None else f"{by.processor}, torch {by.torch}"
            print(
                f"{count} of them by run {by.run_id} with {code} on {machine}; in another --output all are measured anew"
            )
    return cells
