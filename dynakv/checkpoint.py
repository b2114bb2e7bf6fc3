"""Compressor checkpoints (:mod:`dynakv.checkpoint_files`): from a model's compressors, and back onto a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynakv.attaching import add_compressors, detach, use_dynakv_cache
from dynakv.attaching import open_gates as keep_everything
from dynakv.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    CheckpointConfig,
    checked_state,
    read_config,
    read_state,
    write_files,
)
from dynakv.config import METHOD, WEIGHTS_DEPEND_ON, DynaKVConfig
from dynakv.layer_compressor import LayerCompressor, layer_compressor
from dynakv.model_compressors import compressors, settings_of, token_compressors
from dynakv.planned_bits import PlannedBits
from dynakv.rank_gate import RankGate
from lowrank_kv.hf import full_checkpoint
from lowrank_kv.hf.geometry import check_not_offloaded, geometry_of, warn_of_another
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.atomic_write import copy_all_but, new_directory
from lowrank_kv.utils.config import require, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.torch_defaults import fp32_on_cpu
from lowrank_kv.utils.values import check_type, plain_json


def compressor_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model's compressors by their names in a checkpoint, on the CPU."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in tensors_of(compressors(model)).items()
    }


def tensors_of(layers: dict[int, LayerCompressor]) -> dict[str, Tensor]:
    """``layers.{index}.{key|value|key_value}.…`` → the compressors' own tensors."""
    return {
        f"layers.{index}.{name}": tensor
        for index, layer in layers.items()
        for name, tensor in layer.state_dict(keep_vars=True).items()
    }


def write_compressor(
    model: PreTrainedModel,
    directory: Path,
    state: dict[str, Tensor],
    summary: dict[str, Any] | None = None,
    *,
    base_model: str | None = None,
) -> None:
    """Write the files of a compressor checkpoint into an existing directory.

    Args:
        model: an attached model, for the settings and the shape.
        directory: to write into.
        state: the tensors, as :func:`compressor_state` names them; sharded training gathers them first.
        summary: anything worth keeping beside the weights, such as held-out rates.
        base_model: of the compressor; by default the name of `model`.

    Raises:
        UserError: the summary is no dictionary, as that of a checkpoint that is loaded is, or JSON cannot hold it.
    """
    check_type("summary", summary, dict | None, "a dictionary, or left out")
    config = CheckpointConfig(
        method=METHOD,
        base_model=base_model or str(model.config._name_or_path),
        geometry=geometry_of(model),
        compressor=settings_of(model),
        summary=plain_json("summary", summary or {}),
    )
    write_files(directory, state, config)


def save_compressor(model: PreTrainedModel, directory: str | Path, *, summary: dict[str, Any] | None = None) -> None:
    """Write a compressor checkpoint, whole or not at all; an earlier one in `directory` is replaced.

    Raises:
        UserError: a projection cannot be inverted, the summary is no dictionary or JSON cannot hold it, or `directory` holds
            something else; nothing is written.
    """
    directory = path_of(directory, "directory")
    for compressor in token_compressors(model):
        compressor.projection.check_condition()
    with new_directory(directory, WEIGHTS) as partial:
        write_compressor(model, partial, compressor_state(model), summary)


def save_again(model: PreTrainedModel, directory: str | Path, summary: dict[str, Any]) -> None:
    """Write a checkpoint over the one that `model` has from `directory`, whole or not at all; what else lies there, such as
    its card, stays, and so do the projections, in eight bits where it was exported.

    Raises:
        UserError: the summary is no dictionary.
    """
    directory = path_of(directory, "directory")
    config, state = read_config(directory), compressor_state(model)
    kept = {name: state.get(name, tensor) for name, tensor in read_state(directory / WEIGHTS).items()}
    with new_directory(directory, WEIGHTS) as partial:
        copy_all_but((WEIGHTS, CONFIG), directory, partial)
        write_compressor(model, partial, kept, summary, base_model=config.base_model)


def attach(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    self_check: bool = True,
    replace: bool = False,
    open_gates: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Put a compressor checkpoint on its base model; `generate()` then fills a :class:`dynakv.DynaKVCache` by itself, and
    `save_pretrained` writes a full checkpoint.

    Args:
        model: the stock model it was trained for.
        directory: of the checkpoint.
        self_check: first compare the model with a full-rank compressed cache to the model by itself, once for each model;
            see :func:`lowrank_kv.hf.self_check.check_by_itself`.
        replace: take off what compresses the model already, as soon as the checkpoint is known to fit; else a model with
            compressors is refused.
        open_gates: keep every coefficient of every token (:func:`dynakv.open_gates`): a control, which says what the trained
            projections do to a text where nothing is dropped.
        overrides: keys of :class:`DynaKVConfig` that may differ from training, such as ``eviction={"keep_ratio": 0.3}``
            or, of gates, ``threshold=0.2``.

    Warns where it was trained on a model of the same shape but another name.

    Raises:
        UserError: the checkpoint is damaged, or was made for a model of another shape, or an override is unknown, out of
            range, or would change nothing, or gates are to be opened that a plan of bits does not have; the model is then
            unchanged. Or the model does not pass the check; it is then stock.
    """
    check_type("open_gates", open_gates, bool, "true or false")
    config = read_config(directory)
    settings = config.compressor.overridden(**overrides)
    if open_gates:
        _check_opened(settings, overrides)
    _check_model(model, config, directory)
    state = checked_state(directory, config)
    if replace:
        detach(model)
    if self_check:
        check_by_itself(model)
    add_compressors(model, settings)
    try:
        load_state(model, state, str(directory))
        if open_gates:
            keep_everything(model)
        use_dynakv_cache(model)
        full_checkpoint.declare(model, METHOD, to_dict(settings))
    except BaseException:  # whatever ended it, an interrupt or want of memory, too, the model is stock again
        detach(model)
        raise
    return model


def _check_opened(settings: DynaKVConfig, overrides: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` unless there are gates to open, and no override that would then change nothing."""
    require(not settings.has_plan, "open_gates", True, "left out of a plan of bits, which rounds whatever it keeps")
    for key in ("threshold", "granularity", "mask"):
        require(key not in overrides, key, overrides.get(key), "left out with `open_gates`, which keeps everything")


def initialize_from_checkpoint(model: PreTrainedModel, directory: str | Path) -> None:
    """Fill the compressors of `model`, as :func:`add_compressors` left them, with those of a checkpoint, to train on.

    What the checkpoint's settings say of serving, its calibrated threshold among it, is not taken over.

    Raises:
        UserError: the checkpoint is damaged, was made for a model of another shape, or with another value of
            :data:`~dynakv.config.WEIGHTS_DEPEND_ON`. The model is then unchanged.
    """
    config, settings = read_config(directory), settings_of(model)
    _check_model(model, config, directory)
    for key in WEIGHTS_DEPEND_ON:
        trained, wanted = getattr(config.compressor, key), getattr(settings, key)
        if trained != wanted:
            raise UserError(
                f"`compressor.{key}` is {wanted!r}, and the checkpoint `{directory}` was trained with {trained!r}; set "
                f"`compressor.{key}` to that, or start without `initial_checkpoint`"
            )
    load_state(model, checked_state(directory, config), str(directory))


def _check_model(model: PreTrainedModel, config: CheckpointConfig, directory: str | Path) -> None:
    what = f"the checkpoint `{directory}`"
    geometry_of(model).check_equal(config.geometry, what)
    warn_of_another(model, config.base_model, what, "attach it to the model it was trained on, or train one for this")


def load_state(model: PreTrainedModel, state: dict[str, Tensor], origin: str) -> None:
    """Fill the compressors of `model`; names, shapes and dtypes must match, all numbers be finite and gates be
    ones that can serve, and nothing is filled unless all do."""
    _fill(compressors(model), state, origin)


def load_compressors(directory: str | Path, **overrides: Any) -> dict[int, LayerCompressor]:
    """The compressors of a checkpoint without a model, layer index → compressor, in fp32 and for inference.

    Args:
        directory, overrides: as :func:`attach` takes them.

    Raises:
        UserError: the checkpoint is damaged, or an override is unknown, out of range, or would change nothing.
    """
    config = read_config(directory)
    geometry, settings = config.geometry, config.compressor.overridden(**overrides)
    with fp32_on_cpu(), torch.inference_mode(False):  # as `add_compressors` has it
        layers = {
            index: layer_compressor(geometry, settings, index).eval().requires_grad_(False) for index in geometry.layers
        }
    _fill(layers, checked_state(directory, config), str(directory))
    return layers


def _misfit(origin: str, what: str) -> UserError:
    return UserError(
        f"`{origin}` does not fit this model: {what}; restore it, go back to an earlier checkpoint, or train it again"
    )


@torch.no_grad()
def _fill(layers: dict[int, LayerCompressor], state: dict[str, Tensor], origin: str) -> None:
    targets = tensors_of(layers)
    if targets.keys() != state.keys():
        missing, extra = sorted(targets.keys() - state.keys()), sorted(state.keys() - targets.keys())
        raise _misfit(origin, f"missing {missing[:3]}, unexpected {extra[:3]}")
    for name, tensor in targets.items():
        check_not_offloaded(tensor.device, name)
        if tensor.shape != state[name].shape:
            raise _misfit(origin, f"{name} is {tuple(state[name].shape)}, needed {tuple(tensor.shape)}")
        if tensor.dtype != state[name].dtype:
            found, needed = (str(each.dtype).removeprefix("torch.") for each in (state[name], tensor))
            raise _misfit(origin, f"{name} is of {found}, needed is {needed}")
    check_numbers(layers, state, origin)
    for name, tensor in targets.items():
        tensor.copy_(state[name])


def check_numbers(layers: dict[int, LayerCompressor], state: Mapping[str, Tensor], origin: str) -> None:
    """Raise :class:`UserError` unless all numbers are finite and the gates are ones that can serve."""
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{name} of `{origin}` has numbers that are not finite; go back to an earlier checkpoint")
    for index, layer in layers.items():
        for side, compressor in layer.sides.items():
            gate, place = compressor.gate, f"layers.{index}.{side}.gate."
            check_gate(gate, {name: state[place + name] for name in gate.state_dict()}, place, origin)


def check_gate(gate: RankGate | PlannedBits, tensors: Mapping[str, Tensor], place: str, origin: str | Path) -> None:
    """Raise :class:`UserError` unless these tensors, whose names begin with `place` in `origin`, can fill the gate."""
    if fault := gate.fault_in(tensors):
        raise UserError(f"{place}{fault}; `{origin}` is damaged: restore it or go back to an earlier checkpoint")
