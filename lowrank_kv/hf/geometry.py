"""The shape of a model's key–value cache, and the modules that fill it."""

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from lowrank_kv.utils.config import check_entries
from lowrank_kv.utils.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The shape of a model's cache.

    Attributes:
        layers: indices of the layers that are compressed (sliding-window layers keep their native cache).
        num_kv_heads: G. head_dim: D.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_json(cls, values: dict[str, Any], source: str | Path) -> "KVGeometry":
        """What :func:`dataclasses.asdict` gave, read back from JSON.

        Raises:
            UserError: it is something else; `source` is the file it names.
        """
        names = {"layers": list, "num_kv_heads": int, "head_dim": int}
        check_entries(values, names, f"`geometry` in {source}")
        layers = values["layers"]
        are_indices = layers and all(type(index) is int and index >= 0 for index in layers)
        rise = are_indices and layers == sorted(set(layers))
        if not rise or min(values["num_kv_heads"], values["head_dim"]) < 1 or values.keys() != names.keys():
            raise UserError(f"`geometry` in {source} is damaged: it is {values!r}; restore the file, or make it again")
        return cls(**{**values, "layers": tuple(layers)})

    @property
    def width(self) -> int:
        """C = G·D, the joint width of one layer's keys or values."""
        return self.num_kv_heads * self.head_dim

    def full_nbytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of an uncompressed cache of `tokens` tokens (all sequences together) in the compressed layers."""
        return tokens * len(self.layers) * 2 * self.width * itemsize

    def check_equal(self, other: "KVGeometry", what: str) -> None:
        """Raise :class:`UserError` unless both describe the same shape; `what` names the other one's origin."""
        if self != other:
            raise UserError(
                f"{what} was made for {other.describe()}, but this model has {self.describe()}; "
                f"use the model it was made for, or make one for this model"
            )

    def describe(self) -> str:
        return f"{len(self.layers)} compressed layers of {self.num_kv_heads} KV heads × {self.head_dim} dims"


def warn_of_another(model: PreTrainedModel, made_on: str | None, what: str, remedy: str) -> None:
    """Warn where `what` was made on a model of the same shape but another name, whose states may be quite different."""
    if warning := warning_of_another(model.config._name_or_path, made_on, what, remedy):
        warnings.warn(warning, stacklevel=3)


def warning_of_another(model: str, made_on: str | None, what: str, remedy: str) -> str | None:
    """What to say of that, from the models' names; None where there is nothing to say.

    Names are compared by their last part: a directory may hold a copy of what the hub has.
    """
    made_on, name = (Path(each or "").name for each in (made_on, model))
    if not made_on or not name or made_on == name:
        return None
    return f"{what} was made on `{made_on}`, and this model is `{name}`; unless one was fine-tuned from the other, {remedy}"


def check_model(model: PreTrainedModel) -> None:
    """Raise :class:`UserError` where the model wraps another, or is none."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"`model` must be a transformers model, got a {type(model).__name__}; load one with "
            f"`AutoModelForCausalLM.from_pretrained(…)`"
        )
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"`model` must be a transformers model, got a {type(model).__name__}; pass the model it wraps: of peft "
            f"`model.get_base_model()` or, merged, `model.merge_and_unload()`, of a parallel one `model.module`; compile "
            f"with `model.compile()`, which wraps nothing"
        )


def model_within(model: nn.Module) -> PreTrainedModel:
    """The transformers model that a wrapper holds, such as one of peft, `torch.compile` or `nn.DataParallel`; a model that
    nothing wraps is itself.

    Raises:
        UserError: there is none, or there are several that are no parts of one another.
    """
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if found and set(found) <= set(found[0].modules()):
            return found[0]
    check_model(model)
    return model


def geometry_of(model: PreTrainedModel) -> KVGeometry:
    """The geometry of any stock decoder.

    Raises:
        UserError: the model wraps another, or has no layer that can be compressed.
    """
    check_model(model)
    config = model.config.get_text_config(decoder=True)
    _check_family(model, config)
    geometry = geometry_of_config(model.config)
    all_layers = range(len(DynamicCache(config=config).layers) or config.num_hidden_layers)
    if not set(geometry.layers) <= attention_modules(model).keys() <= set(all_layers):
        raise UserError(
            f"{config.model_type} has other layers than its cache: some attend to the keys and values of another layer, or "
            f"run several times, which a compressed cache cannot serve; use a model of another family"
        )
    return geometry


def geometry_of_config(config: PreTrainedConfig) -> KVGeometry:
    """The geometry that a model's configuration describes.

    Raises:
        UserError: no layer can be compressed.
    """
    config = config.get_text_config(decoder=True)
    native = DynamicCache(config=config).layers
    layers = tuple(i for i, layer in enumerate(native) if type(layer) is DynamicLayer)
    if not layers and all(window_is_idle(config, getattr(layer, "sliding_window", None)) for layer in native):
        layers = tuple(range(len(native)))
    if native and not layers:
        window = getattr(config, "sliding_window", None)
        raise UserError(
            f"no layer of this {config.model_type} model has full attention (sliding_window={window}), and only such layers "
            f"are compressed, as the state of any other does not grow with the text; use a model without a window"
        )
    if not layers:
        # Families without per-layer declarations fill their cache lazily; every layer is a full-attention one then.
        layers = tuple(range(config.num_hidden_layers))
    # A model of several kinds of layers may say the shape of each layer by itself.
    shapes = {heads_of_layer(config, index) for index in layers}
    if len(shapes) > 1:
        raise UserError(
            f"the full-attention layers of this {config.model_type} model have KV heads × dims of {sorted(shapes)}, and a "
            f"compressed cache takes one shape; use a model of another family"
        )
    [(num_kv_heads, head_dim)] = shapes
    return KVGeometry(layers=layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


def window_is_idle(config: PreTrainedConfig, window: int | None) -> bool:
    """Whether a sliding window is so long that no text of the model leaves it, as that of Phi-3.5 is."""
    positions = getattr(config, "max_position_embeddings", None)
    return window is not None and positions is not None and window >= positions


def _check_family(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise :class:`UserError` for a family that cannot be served whatever its settings."""
    if not model._supports_attention_backend:
        raise UserError(
            f"{config.model_type} computes attention in its own modules, which transformers does not let a compressed "
            f"attention replace; use a model of another family"
        )
    if model.can_generate() and not model._supports_default_dynamic_cache():
        raise UserError(
            f"{config.model_type} fills a cache of a class of its own, which a compressed cache cannot replace; use a model "
            f"of another family"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UserError(
            f"{config.model_type} has layers that attend to the keys and values of another layer (num_kv_shared_layers="
            f"{config.num_kv_shared_layers}), which a compressed cache cannot give them; use a model of another family"
        )
    if getattr(config, "cross_attention_layers", None):
        raise UserError(
            f"{config.model_type} has layers that attend to an image and not to the text (cross_attention_layers), which a "
            f"compressed cache does not hold; use a model of another family"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UserError(
            f"{config.model_type} has multi-head latent attention (kv_lora_rank={config.kv_lora_rank}): its keys and values "
            f"are low-rank by design, of different widths, and partly shared by all heads; a compressed cache takes plain "
            f"keys and values, so use a model of another family"
        )


def heads_of_layer(config: PreTrainedConfig, index: int) -> tuple[int, int]:
    """KV heads of a layer, and dims of each; `config` is that of the text."""
    if hasattr(config, "per_layer_config"):
        config = config.per_layer_config[index]
    heads = config.num_attention_heads
    num_kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    return num_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Layer index → the decoder's attention module, for every layer. Raises :class:`UserError` when none is found, or
    the model is none."""
    if not isinstance(model, nn.Module):
        check_model(model)
    # Encoders of images or sounds may number their attention, too.
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    found = {
        module.layer_idx: module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} has no attention module with a `layer_idx`; this family is not supported"
        )
    return dict(sorted(found.items()))


def device_of_module(module: nn.Module, model: PreTrainedModel) -> torch.device:
    """Where a module of a model is, by its parameters, or by its buffers where a quantized module packs its weights in them;
    one that has neither is where the model is."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return model.device if tensor is None else tensor.device


def check_not_offloaded(device: torch.device, name: str) -> None:
    """Raise :class:`UserError`, which names what is there, where a device is none that has memory."""
    if device.type == "meta":
        raise UserError(
            f"{name} of the model has no memory: its layer is offloaded to the CPU or to disk; load the model without "
            f"offloading, e.g. with fewer layers to a GPU and `device_map` over more of them"
        )


def attention_projections(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name in the model → linear projection, of all that stand directly in attention modules."""
    attention = set(attention_modules(model).values())
    return {
        f"{path}.{name}": child
        for path, module in model.named_modules()
        if module in attention
        for name, child in module.named_children()
        if isinstance(child, nn.Linear | Conv1D)
    }


def layer_groups(layers: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Layers cut into groups of `count` that follow one another, of which the last may have fewer; none where it is 0."""
    return [tuple(layers[start : start + count]) for start in range(0, len(layers), count)] if count else []
