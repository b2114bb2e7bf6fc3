"""A whole model with its compressors, saved as an ordinary transformers directory (:mod:`lowrank_kv.hf.full_checkpoint`)."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dynakv.attaching import add_compressors, use_dynakv_cache
from dynakv.checkpoint import check_numbers, tensors_of
from dynakv.config import METHOD, DynaKVConfig
from dynakv.model_compressors import compressors, settings_of
from lowrank_kv.hf import full_checkpoint
from lowrank_kv.hf.attention import TRANSFORM
from lowrank_kv.utils.config import build, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of


def save_full(model: PreTrainedModel, directory: str | Path, *, state: dict[str, Tensor] | None = None) -> None:
    """Write a full checkpoint: after ``import dynakv``, ``AutoModelForCausalLM.from_pretrained(directory)`` loads it.

    Args:
        model: an attached model.
        directory: to write; an existing one is replaced.
        state: the tensors to write instead of the model's own, by their names in a stock model with compressors; sharded
            training gathers them first.
    """
    directory = path_of(directory, "directory")
    full_checkpoint.save_full(model, directory, METHOD, to_dict(settings_of(model)), state)


def _before_loading(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    add_compressors(model, build(DynaKVConfig, settings, source="`quantization_config` of the checkpoint"))
    # Whatever dtype the backbone is loaded in, U, W and b stay as they were trained.
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), TRANSFORM}


def _after_loading(model: PreTrainedModel) -> None:
    layers = {
        index: layer
        for index, layer in compressors(model).items()
        if not any(tensor.is_meta for tensor in layer.state_dict().values())  # an offloaded one is not there yet
    }
    state, origin = tensors_of(layers), str(model.config._name_or_path)
    # transformers marks what it loads; it warns of what is missing, and leaves that as the memory was.
    if missing := [name for name, tensor in state.items() if not getattr(tensor, "_is_hf_initialized", False)]:
        raise UserError(f"`{origin}` has no {missing[0]}; the checkpoint is incomplete, so copy it again")
    check_numbers(layers, state, origin)
    use_dynakv_cache(model)


full_checkpoint.register_method(METHOD, before_loading=_before_loading, after_loading=_after_loading)
