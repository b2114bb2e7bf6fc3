"""How a model rotates keys: its family's own function and module, and what trying them tells about them.

Families differ in both. Nearly all rotate halves: dim j of a head with dim j + E/2, by one angle for both. Keys are then
rotated in fewer passes, and kernels can rotate them by a table of angles. Families that rotate otherwise keep their own
function. Whether a family rotates halves is found by calling its function and comparing the results.

Shapes: B batch, G heads, T tokens, D head dim, E rotary dims (≤ D), F = E/2 pairs.
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.ops import native
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.utils.errors import UserError

_LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary kinds
# Families whose layers with full attention leave queries and keys as they are, if the others have a window.
_ONLY_WINDOWS_ROTATE = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
# Positions at which a module's cos and sin are compared with those of its frequencies.
_PROBED_POSITIONS = (0, 1, 2, 3, 10, 127, 1000, 4099, 32_771, 131_071)


class Rotary:
    """The rotation of a model's compressed layers.

    Args:
        function: the family's ``apply_rotary_pos_emb(q, k, cos, sin)``.
        module: the model's rotary module.
        layer_type: of the compressed layers, where the module holds frequencies for each layer type; else None.
    """

    def __init__(self, function: Callable, module: nn.Module, layer_type: str | None = None):
        self.function, self.module, self.layer_type = function, module, layer_type
        self._halves_agree: bool | None = None  # whether cos and sin are the same for both dims of a pair, once seen

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "Rotary | None":
        """The rotation of a model; None for a family without rotary embeddings.

        Raises:
            UserError: the model has several rotary modules, or its compressed layers rotate differently.
        """
        decoder = model.get_decoder()
        modules = [module for name, module in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
        if not modules:  # LFM2-MoE has another name for it
            modules = [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]
        if len(modules) > 1:
            raise UserError(f"{type(model).__name__} has {len(modules)} rotary modules; models with one are supported")
        functions = [rotary_function(module) for module in attention_modules(model).values()]
        function = next((each for each in functions if each is not None), None)
        if not modules or function is None:
            return None
        [module] = modules
        return cls(function, module, _layer_type(model) if isinstance(_rope_type(module), dict) else None)

    @property
    def rope_type(self) -> str:
        """The kind of rotation, as transformers names it."""
        rope_type = _rope_type(self.module)
        return rope_type if self.layer_type is None else rope_type[self.layer_type]

    @property
    def is_length_dependent(self) -> bool:
        """Whether frequencies depend on the length seen so far; a cached key keeps the rotation it was given."""
        return self.rope_type in _LENGTH_DEPENDENT

    @property
    def num_dims(self) -> int:
        """E."""
        name = "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"
        return 2 * getattr(self.module, name).numel()

    @property
    def rotates_halves(self) -> bool:
        """See :func:`rotates_halves`."""
        return rotates_halves(self.function)

    def cos_sin(self, position_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The module's cos and sin at some positions, (B, T, E) each in `dtype`, scaling included."""
        like = torch.empty(0, dtype=dtype, device=position_BT.device)
        layer_type = () if self.layer_type is None else (self.layer_type,)
        return self.module(like, position_BT.long(), *layer_type)

    def compiled_table(self, position_BT: Tensor, dtype: torch.dtype) -> RotaryTable | None:
        """The pairs' cos and sin at int32 positions by compiled code, fp32, as the module gives them in a dtype: it spends
        milliseconds on them at every step. None where there is no compiled code for them."""
        if dtype not in (torch.float32, torch.bfloat16):
            return None
        if not native.computes_cos_sin(position_BT.device) or not self.follows_frequencies:
            return None
        return self._table_of_frequencies(position_BT, rounds_to_bf16=dtype == torch.bfloat16)

    def table_of_rows(self, cos_BTE: Tensor, sin_BTE: Tensor) -> RotaryTable | None:
        """The pairs' cos and sin, fp32, from those of all dims; None where a pair's two dims rotate by different angles.

        Only first calls look, as on a GPU they wait for the result. A module that gives both dims of a pair one angle does
        so at every position but 0, where all angles are equal.
        """
        half = cos_BTE.shape[2] // 2
        halves = [states.float().split(half, dim=2) for states in (cos_BTE, sin_BTE)]
        if self._halves_agree is None:
            agree = all(torch.equal(first, second) for first, second in halves)
            self._halves_agree = agree if not agree or bool(sin_BTE.any()) else None
        return None if self._halves_agree is False else RotaryTable(*(first.contiguous() for first, _ in halves))

    @functools.cached_property
    def follows_frequencies(self) -> bool:
        """Whether the module's cos and sin are those of position · frequency, which compiled code computes, too.

        The module is called once at a few positions and compared; its frequencies must be on a device for which there is
        compiled code.
        """
        frequency_F = None if self.layer_type is not None else getattr(self.module, "inv_freq", None)
        if not isinstance(frequency_F, Tensor) or frequency_F.dim() != 1:
            return False
        if not native.computes_cos_sin(frequency_F.device) or frequency_F.abs().max() > math.pi / 2:
            return False
        # The device is named, as torch's default may be another.
        position_BT = torch.tensor([_PROBED_POSITIONS], dtype=torch.int32, device="cpu")
        table = self._table_of_frequencies(position_BT)
        pairs = zip((table.cos_BTF, table.sin_BTF), self.cos_sin(position_BT, torch.float32), strict=True)
        return all(
            theirs_BTE.shape[-1] == 2 * ours_BTF.shape[-1]
            and torch.allclose(ours_BTF.repeat(1, 1, 2), theirs_BTE.float(), rtol=0, atol=1e-6)
            for ours_BTF, theirs_BTE in pairs
        )

    def _table_of_frequencies(self, position_BT: Tensor, *, rounds_to_bf16: bool = False) -> RotaryTable:
        scaling = getattr(self.module, "attention_scaling", 1.0)
        table = native.cos_sin(position_BT, self.module.inv_freq, scaling, rounds_to_bf16=rounds_to_bf16)
        follow_one_another = bool((position_BT.diff(dim=1) == 1).all())
        return RotaryTable(*table, self._slow_from if follow_one_another else None)

    @functools.cached_property
    def _slow_from(self) -> int:
        """Of the module's frequencies, which :attr:`follows_frequencies` says are fixed."""
        return native.slow_from(self.module.inv_freq)


def rotary_function(module: nn.Module) -> Callable | None:
    """``apply_rotary_pos_emb(q, k, cos, sin)`` of an attention module's family; None for a module that rotates no keys."""
    function = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    return None if function is None or not _rotates(module) else _of_queries_and_keys(function)


def _rotates(module: nn.Module) -> bool:
    """Whether an attention module rotates its keys, in a family that has a function for it.

    Rows that were never rotated must not be turned back: they would cost more coefficients. That a family is listed here is
    tested on all families there are (tests/scripts/test_decoder_families.py).
    """
    if not getattr(module, "use_rope", True):  # SmolLM3
        return False
    config = module.config
    layer_types, of_types = getattr(config, "layer_types", None), getattr(config, "rope_parameters", None) or {}
    if layer_types and set(layer_types) & of_types.keys() and of_types.get(layer_types[module.layer_idx]) is None:
        return False  # beam: rotations are given for each kind of layers, and none for this one
    if config.model_type not in _ONLY_WINDOWS_ROTATE or getattr(config, "sliding_window", None) is None:
        return True
    return config.layer_types[module.layer_idx] != "full_attention" or getattr(module, "force_rope", False)


@functools.cache
def _of_queries_and_keys(function: Callable) -> Callable:
    """The function as (q, k, cos, sin) → (q, k); some families have one of (states, cos, sin) (Gemma 4)."""
    is_of_both = list(inspect.signature(function).parameters)[1] != "cos"
    return function if is_of_both else _OfBoth(function)


@dataclasses.dataclass(frozen=True)
class _OfBoth:
    """A family's function of (states, cos, sin), called on queries and on keys; it goes into saved caches."""

    function: Callable

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(query, cos, sin), self.function(key, cos, sin)


@functools.lru_cache
def rotates_halves(function: Callable) -> bool:
    """Whether a family's function is the usual rotation of halves: it is called once on random keys and compared with
    :func:`rotate_halves`, over all of a head and over a part of it.

    :func:`rotate_halves` then takes two passes over the keys instead of five, which is much of the time of decoding on a
    CPU.
    """
    # Device and dtype are named, as torch's defaults may be others.
    options = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    key = torch.randn(1, 2, 3, 8, **options)
    for rotary in (8, 4):
        cos, sin = torch.randn(2, 1, 3, rotary, **options)
        try:
            theirs = function(key[:, :0], key, cos, sin)[1]
        except RuntimeError:
            if rotary == key.shape[-1]:
                return False
            continue  # a family that rotates all of a head cannot be tried on a part of one
        if theirs.shape != key.shape or not torch.allclose(theirs, _rotate_halves(key, cos, sin), atol=1e-6):
            return False
    return True


def family_rotates_neighbours(config: PreTrainedConfig) -> bool:
    """Whether the family of a configuration rotates dim 2j of a head with dim 2j + 1, as GPT-J does: its function is called
    once, and no model is made. False where the family has no function of queries, keys, cos and sin, or transformers does
    not know it."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    function = None if family is None else getattr(sys.modules[family.__module__], "apply_rotary_pos_emb", None)
    if function is None or list(inspect.signature(function).parameters)[1] not in ("k", "cos"):
        return False
    key = torch.zeros(1, 1, 1, 8, device="cpu", dtype=torch.float32)
    key[..., 0] = 1.0
    cos, sin = torch.full((2, 1, 1, 8), 0.5, device="cpu", dtype=torch.float32)
    try:
        turned = _of_queries_and_keys(function)(key, key, cos, sin)[1]
    except RuntimeError:
        return False  # a family whose cos and sin have another shape
    return turned.flatten().nonzero().flatten().tolist() == [0, 1]


def rotate_halves(key_BGTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """(k₁ cos₁ − k₂ sin₁, k₂ cos₂ + k₁ sin₂) of the halves of a head's first E dims, the other dims unchanged; keys, cos and
    sin are of one dtype. Differentiable in the keys."""
    return _RotateHalves.apply(key_BGTD, cos_BTE, sin_BTE)


def _rotate_halves(key_BGTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    rotary = cos_BTE.shape[-1]
    half = rotary // 2
    cos, sin = cos_BTE.unsqueeze(1), sin_BTE.unsqueeze(1)
    first, second = key_BGTD[..., :half], key_BGTD[..., half:rotary]
    out = torch.empty_like(key_BGTD)
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=out[..., half:rotary]).addcmul_(first, sin[..., half:])
    out[..., rotary:] = key_BGTD[..., rotary:]
    return out


class _RotateHalves(torch.autograd.Function):
    """:func:`_rotate_halves` with a backward pass that is as short: rotation is linear, and its transpose rotates back."""

    @staticmethod
    def forward(ctx: FunctionCtx, key_BGTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTE, sin_BTE)
        return _rotate_halves(key_BGTD, cos_BTE, sin_BTE)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BGTD: Tensor) -> tuple[Tensor, None, None]:
        cos_BTE, sin_BTE = ctx.saved_tensors
        # Each half's sine multiplied the other half of the keys, so the transpose swaps the halves of the sines.
        return _rotate_halves(grad_BGTD, cos_BTE, -sin_BTE.roll(sin_BTE.shape[-1] // 2, dims=-1)), None, None


def _rope_type(module: nn.Module) -> str | dict[str, str]:
    """A rotary module's kind of rotation, or that of each layer type."""
    return getattr(module, "rope_type", "default")


def _layer_type(model: PreTrainedModel) -> str:
    """The layer type of all compressed layers; raises :class:`UserError` where they have several."""
    layer_types = model.config.get_text_config(decoder=True).layer_types
    types = sorted({layer_types[index] for index in geometry_of(model).layers})
    if len(types) > 1:
        raise UserError(
            f"the compressed layers of {type(model).__name__} rotate differently ({', '.join(types)}), but a cache "
            f"remembers one rotation of each token; models whose full-attention layers rotate alike are supported"
        )
    return types[0]
