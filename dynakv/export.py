"""A trained compressor in few bytes, to be shared."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dynakv.checkpoint_files import CONFIG, WEIGHTS, checked_state, read_config, read_state, write_files
from dynakv.layer_compressor import kind_of_compressor, projection_widths
from dynakv.packed_projections import PACKABLE, is_packed, packed, projections_in, unpacked
from lowrank_kv.utils.atomic_write import copy_all_but, new_directory
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import name_of, path_of
from lowrank_kv.utils.torch_defaults import fp32_on_cpu

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
MOST_ERROR = 1e-3  # ‖U V − I‖ / ‖I‖


def export_compressor(directory: str | Path, output: str | Path, *, base_model: str | None = None) -> None:
    """Write a compressor checkpoint again with projections in eight bits: with a plan a tenth of the bytes.

    What is loaded from `output` rebuilds keys and values as exactly as before, with directions that are rounded. Everything
    else in `directory`, such as the model card, is copied. A model that was trained from a directory is named by the last
    part of its path, as the rest says nothing elsewhere and may name a user.

    Args:
        directory: of a compressor checkpoint.
        output: to write, whole or not at all; an earlier checkpoint there is replaced.
        base_model: hub id of the model that it is for; by default the name that `directory` has.

    Raises:
        UserError: `base_model` is no hub id; `directory` holds no compressor checkpoint, or a damaged or an exported one;
            its projections are not a matrix and its inverse, or cannot be inverted when rounded; `output` holds something
            else, or is `directory` or within it.
    """
    is_id = base_model is None or (isinstance(base_model, str) and _HUB_ID.fullmatch(base_model) is not None)
    require(is_id, "base_model", base_model, "a hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct, or left out")
    directory, output = path_of(directory, "directory"), path_of(output, "output")
    config = read_config(directory)
    decoder = kind_of_compressor(config.compressor).kind_of_projection(config.compressor)
    if decoder not in PACKABLE:
        raise UserError(
            f"`{directory}` was trained with `compressor.decoder: {decoder}`, and only `exact` keeps its quality in eight "
            f"bits; share the checkpoint as it is"
        )
    if is_packed(read_state(directory / WEIGHTS)):
        raise UserError(
            f"`{directory}` was exported already; share it as it is, or export the checkpoint it was made from"
        )
    if output.exists() and output.samefile(directory):
        raise UserError(f"`{output}` is the checkpoint itself, which training goes on from; choose another directory")
    if output.resolve().is_relative_to(directory.resolve()):
        raise UserError(
            f"`{output}` is within the checkpoint, which would be copied into itself; choose another directory"
        )
    state = packed(checked_state(directory, config), decoder)
    _check_rounded(
        unpacked(state, decoder, projection_widths(config.geometry, config.compressor), str(directory)), decoder
    )
    with new_directory(output, WEIGHTS) as partial:
        copy_all_but((WEIGHTS, CONFIG), directory, partial)
        write_files(partial, state, dataclasses.replace(config, base_model=base_model or _name(config.base_model)))


def _name(model: str) -> str:
    """A model's hub id, or the last part of its path, which need not exist here."""
    name = name_of(model)
    return name if _HUB_ID.fullmatch(name) else Path(name).name


@fp32_on_cpu()
def _check_rounded(state: Mapping[str, Tensor], decoder: str) -> None:
    """Raise :class:`UserError` naming the layer whose projection has no exact way back since it is rounded."""
    for projection in projections_in(state, decoder):
        projection.check_condition()
        error = projection.inversion_error()
        if error > MOST_ERROR:
            raise UserError(
                f"{projection.name} does not come back from eight bits: its directions and their inverse make an error of "
                f"{error:.1g} (at most {MOST_ERROR:g} is allowed); share the checkpoint as it is"
            )
