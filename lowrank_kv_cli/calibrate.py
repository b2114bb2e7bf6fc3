"""Read a text once with a model, for caches that need no training and for training to start from.

    lowrank-kv calibrate --model MODEL --name TEXT.jsonl --read_gradients true --output bases/mine
    lowrank-kv calibrate --model MODEL --read_gradients true --output bases/mine \\
        --name Salesforce/wikitext --subset wikitext-2-raw-v1

MODEL is a hub id or a directory. TEXT.jsonl has a document a line, under the key `text`.

Writes the second moments of keys, values and queries, from which the bases of every layout, rank and preset are computed.
With `--read_gradients true` it also writes what plans of bits are made from, by `adaptive-mixed` and by training; so it does
with `--read_energy true`, by a forward pass alone, for a model whose backward pass does not fit. With `--gradients true` it
writes what training of gates can start from.
"""

from pathlib import Path

from lowrank_kv.calibration.calibration import JOINT_LAYERS, Calibration, check_read
from lowrank_kv.calibration.calibration_files import MOMENTS
from lowrank_kv.hf.loading import (
    AUTO,
    DEVICE_HELP,
    DTYPE_HELP,
    DTYPES,
    check_length,
    device_of,
    dtype_for,
    dtype_words,
    load_model,
    load_tokenizer,
)
from lowrank_kv.utils.atomic_write import check_directory, check_replaceable
from lowrank_kv.utils.config import configuration, option, parse_config, require
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.text_data import NAME_HELP, CalibrationText
from lowrank_kv_auto.compression import PRESET, PRESET_WITHOUT_READ
from ojakv import OjaKVConfig


@configuration
class CalibrateConfig(CalibrationText):
    """One calibration."""

    model: str = option(help="hub id or directory")
    name: list[str] = option(help=NAME_HELP)
    output: str = option(help="directory for the calibration; an earlier one there is replaced")
    dtype: str = option(AUTO, help=DTYPE_HELP, choices=(*DTYPES, AUTO))
    device: str | None = option(None, help=DEVICE_HELP)
    gradients: bool = option(
        False, help="also take the loss's gradients, for training gates with `calibration.start: gradient`"
    )
    read_gradients: bool = option(
        False,
        help="also take the gradients of what later tokens read of a compressed cache, for the `mixed` presets, for "
        "`weigh_by: loss` and for training plans of bits",
    )
    read_energy: bool = option(
        False,
        help="in place of `read_gradients`, for a model whose backward pass does not fit: coefficients get bits by their "
        "energy, which needs more of them",
    )
    joint_layers: int = option(
        JOINT_LAYERS,
        help="with `read_gradients` or `read_energy`: for how many consecutive layers whose keys and values are coded "
        "together, as by `joint-mixed`; the file grows with it; 0 leaves that out",
        unit="layers",
    )
    self_check: bool = option(
        True, help="first compare the model with a full-rank compressed cache to the model by itself"
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.joint_layers >= 0, "joint_layers", self.joint_layers, "zero or positive")
        check_read(self.read_gradients, self.read_energy)
        require(
            self.is_read or self.joint_layers == JOINT_LAYERS,
            "joint_layers",
            self.joint_layers,
            "left out without `read_gradients` or `read_energy`, where it changes nothing",
        )

    @property
    def is_read(self) -> bool:
        """Whether the calibration is to say what is read of a compressed cache."""
        return self.read_gradients or self.read_energy


def main(argv: list[str]) -> None:
    config, _ = parse_config(CalibrateConfig, argv, description=__doc__)
    # Before the model, which may take minutes to load: a wrong place, or a text that is not there, should not.
    check_directory(Path(config.output).parent)
    check_replaceable(config.output, MOMENTS)
    blocks_NT = config.blocks(load_tokenizer(config.model))
    device = device_of(config.device)
    model = load_model(config.model, dtype=dtype_for(config.dtype, device), device=device)
    check_length(model, config.block_length, "length")
    calibration = Calibration.from_text(
        model,
        blocks_NT,
        gradients=config.gradients,
        read_gradients=config.read_gradients,
        read_energy=config.read_energy,
        joint_layers=config.joint_layers,
        self_check=config.self_check,
    )
    digest = calibration.save(config.output, model=name_of(config.model), **config.record())
    print(f"{config.output}: {calibration.geometry.describe()}, {blocks_NT.numel():,} tokens, SHA-256 {digest[:16]}…")
    if not config.is_read:
        kept = OjaKVConfig.preset(PRESET_WITHOUT_READ).rate
        print(
            f"without `--read_gradients true` these bases serve `{PRESET_WITHOUT_READ}`, at {kept:.0%} of the coefficients, "
            f"and not `{PRESET}`, at a tenth of the bytes"
        )
    print(
        f"next: lowrank-kv generate --model {config.model}{dtype_words(config.dtype)} --bases {config.output} "
        f"--prompt @LONG_PROMPT.txt"
    )
