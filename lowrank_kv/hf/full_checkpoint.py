"""Full checkpoints that stock ``AutoModelForCausalLM.from_pretrained`` loads, compressor included.

transformers lets a package register a quantization method: a named entry of `config.json` with hooks before and after
weight loading. That is just what a compressed model needs, so a method of this project registers itself as one. The
model class and `model_type` stay the stock ones, and without the package the same files load uncompressed, with a
warning.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import CONFIG_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowrank_kv.utils.atomic_write import new_directory
from lowrank_kv.utils.errors import UserError


class MethodConfig(QuantizationConfigMixin):
    """The `quantization_config` of full checkpoints, whatever their method; other entries of a `config.json` are ignored."""

    def __init__(self, quant_method: str, settings: dict[str, Any] | None = None, **ignored: Any):
        self.quant_method = quant_method
        self.settings = settings or {}


def register_method(
    method: str,
    *,
    before_loading: Callable[[PreTrainedModel, dict[str, Any]], None],
    after_loading: Callable[[PreTrainedModel], None],
) -> None:
    """Teach `from_pretrained` to load full checkpoints of `method`.

    Args:
        method: the ``quant_method`` in `config.json`.
        before_loading: adds the method's submodules to a model on the meta device, given the method's settings.
        after_loading: makes the loaded model run compressed.
    """

    class MethodLoader(HfQuantizer):
        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
            before_loading(model, self.quantization_config.settings)

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
            # The weights are ordinary floating-point ones: nothing about the model is quantized from here on, and
            # leaving the flags would forbid casting and training it.
            del model.hf_quantizer, model.quantization_method
            model.is_quantized = False
            model.config._is_quantized = False
            after_loading(model)
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    register_quantization_config(method)(MethodConfig)
    register_quantizer(method)(MethodLoader)


def declare(model: PreTrainedModel, method: str, settings: dict[str, Any]) -> None:
    """From now on the model's own `save_pretrained` writes full checkpoints of `method`; a quantized model's stays as it is,
    since a checkpoint can name only one method."""
    if not is_quantized(model, method):
        model.config.quantization_config = MethodConfig(method, settings)


def is_declared(model: PreTrainedModel, method: str) -> bool:
    """Whether the model saves itself as a full checkpoint of `method`."""
    return _method_of(getattr(model.config, "quantization_config", None)) == method


def _method_of(quantization: Any) -> str | None:
    return getattr(quantization, "quant_method", None)


def is_quantized(model: PreTrainedModel, method: str) -> bool:
    """Whether the model is quantized, by another method than `method`."""
    occupied = getattr(model.config, "quantization_config", None)
    return occupied is not None and _method_of(occupied) != method


def save_full(
    model: PreTrainedModel,
    directory: str | Path,
    method: str,
    settings: dict[str, Any],
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write backbone and compressor as one checkpoint for `from_pretrained`, whole or not at all; `state` replaces the
    model's own tensors.

    Raises:
        UserError: the base model is quantized, or `directory` holds anything but an earlier checkpoint of this method.
    """
    if is_quantized(model, method):
        raise UserError(
            "the base model is quantized, and a checkpoint can name only one method; save only the compressor and "
            "attach it to the quantized model instead"
        )
    occupied = getattr(model.config, "quantization_config", None)
    _check_replaceable(Path(directory), method)
    with new_directory(directory, CONFIG_NAME) as partial:
        declare(model, method, settings)
        try:
            model.save_pretrained(partial, state_dict=state)
        finally:
            if occupied is None:
                del model.config.quantization_config
            else:
                model.config.quantization_config = occupied


def _check_replaceable(directory: Path, method: str) -> None:
    """Models, calibrations and compressors all have a `config.json`, so its presence says little."""
    config = directory / CONFIG_NAME
    if not config.is_file():
        return
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    quantized = found.get("quantization_config") if isinstance(found, dict) else None
    if not isinstance(quantized, dict) or quantized.get("quant_method") != method:
        raise UserError(
            f"`{directory}` holds something else than a full {method} checkpoint, which would be lost; choose another name"
        )
