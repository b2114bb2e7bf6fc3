"""A few directions of one text's own, beside a shared basis: what the shared plan drops of this text and the loss asks for.

A calibration's basis fits other texts. Of the coefficients that its plan drops, a text may hold much along a few directions.
They are found when a prompt is compressed. Their coefficients take places in the plan of bits as if the basis had always had
them: where they stand in the order of importance. The last ones of a row make room, so that no row has more bytes. What the
own coefficients say is taken from the shared ones.

Shapes: N tokens, C coefficients of the shared basis, R that a plan keeps at most, K own directions, W width of a state.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.stores.quantization import Quantization
from lowrank_kv.stores.token_plans import TokenPlans

# The sketch has so many directions more than are asked for, and the text is read so often (Halko, Martinsson and Tropp 2011,
# algorithm 4.4, arXiv 0909.4061).
_OVERSAMPLING, _PASSES = 4, 3
_LARGEST_CODE = 127
# A text is reckoned to become so many times as long as the prompt that directions are found in (docs/log/bit-plans.md).
TEXT_PER_PROMPT = 2
_MOST_ROWS = 1024  # of a prompt, in which directions are sought
_BITS_PER_BYTE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSpace:
    """What all sequences share of one layer's keys, or values, so that each can have directions of its own.

    Attributes:
        weight_C: the root of what the loss asks of each coefficient, which have mean square 1; falling, fp32.
        decoder_CW: states are coefficients · decoder, of all coefficients; fp32.
    """

    weight_C: Tensor
    decoder_CW: Tensor

    @classmethod
    def weighed(cls, importance_C: Tensor, decoder_CW: Tensor) -> "SharedSpace":
        """By what the loss asks of each coefficient, fp32."""
        # A coefficient that the loss asks nothing of still has a direction; a weight of zero would divide by it.
        least = torch.finfo(torch.float32).eps * float(importance_C.max())
        return cls(weight_C=importance_C.clamp(min=least).sqrt(), decoder_CW=decoder_CW.contiguous())

    def to(self, device: torch.device) -> "SharedSpace":
        return SharedSpace(weight_C=self.weight_C.to(device), decoder_CW=self.decoder_CW.to(device))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnDirections:
    """Directions of weighted coefficients, and where their coefficients stand in a row.

    Attributes:
        code_CK: the directions, int8.
        scale_K: what a code's unit is, fp32.
        size_K: root mean square of each own coefficient over the text they were found in, fp32.
        places: of the own coefficients in a row, rising.
    """

    code_CK: Tensor
    scale_K: Tensor
    size_K: Tensor
    places: tuple[int, ...]

    @classmethod
    def of_prompt(
        cls,
        coef_NC: Tensor,
        weight_C: Tensor,
        count: int,
        *,
        plan: Quantization | TokenPlans | None,
        rank: int,
        writer: Any,
    ) -> "OwnDirections | None":
        """What :meth:`find` finds in a prompt.

        Args:
            coef_NC: all coefficients of its tokens in the shared basis, fp32.
            plan, rank: how rows are packed, and how many coefficients they have at most.
            writer: what tells a token's class, where there are several: the plan, or compiled code that does as it does.
        """
        # Directions are those of many tokens: evenly spaced ones tell them as well.
        sample_NC = coef_NC[:: -(-len(coef_NC) // _MOST_ROWS)]
        if isinstance(plan, TokenPlans):
            rank_N = plan.rank_K[writer.classes(sample_NC)]
        else:
            rank_N = torch.full((len(sample_NC),), rank, device=sample_NC.device)
        return cls.find(sample_NC, rank_N, weight_C, count, tokens=len(coef_NC))

    @classmethod
    def find(
        cls, coef_NC: Tensor, rank_N: Tensor, weight_C: Tensor, count: int, *, tokens: int
    ) -> "OwnDirections | None":
        """The leading directions of what is not kept, as many as pay; None where none does.

        The last coefficient that a token keeps makes room. As plans are made it is worth about one bit, and equally much in
        tokens of all classes: so what is dropped is told in units of it. A direction pays where it saves more than one unit
        for each token, and as many more as it has bits itself for each token of a text twice as long as this prompt. Tokens
        whose rows end before its place save nothing.

        Args:
            coef_NC: coefficients of the prompt, or of a sample of it, in the shared basis, fp32.
            rank_N: how many of them its plan keeps of each token, at least one; int64.
            weight_C: see :class:`SharedSpace`.
            count: K at most.
            tokens: of the prompt.
        """
        width = coef_NC.shape[1]
        weighted_NC = coef_NC * weight_C
        is_kept_NC = torch.arange(width, device=coef_NC.device) < rank_N[:, None]
        dropped_NC = weighted_NC.masked_fill(is_kept_NC, 0.0) / weight_C[rank_N - 1][:, None]
        vector_CK = leading_directions(dropped_NC, count)
        scale_K = vector_CK.abs().amax(dim=0) / _LARGEST_CODE
        code_CK = (vector_CK / scale_K).round().to(torch.int8)
        vector_CK = code_CK * scale_K  # as they are held
        size_K = (weighted_NC @ vector_CK).square().mean(dim=0).sqrt()
        order_K = size_K.argsort(descending=True)
        code_CK, scale_K, vector_CK, size_K = (
            code_CK[:, order_K],
            scale_K[order_K],
            vector_CK[:, order_K],
            size_K[order_K],
        )
        # Own coefficient j stands behind the shared ones that matter more, and behind the j own ones before it.
        before_K = torch.searchsorted(-weight_C, -size_K, right=True)
        place_K = before_K + torch.arange(len(before_K), device=before_K.device)
        is_held_NK = place_K < rank_N[:, None]
        saved_K = ((dropped_NC @ vector_CK).square() * is_held_NK).mean(dim=0)
        pays_K = saved_K > 1 + _BITS_PER_BYTE * cls.nbytes(width, 1) / (TEXT_PER_PROMPT * tokens)
        if not pays_K.any():
            return None
        return cls(
            code_CK=code_CK[:, pays_K].contiguous(),
            scale_K=scale_K[pays_K],
            size_K=size_K[pays_K],
            places=tuple(before + j for j, before in enumerate(before_K[pays_K].tolist())),
        )

    def encode(self, coef_NC: Tensor, shared: SharedSpace, rank: int) -> Tensor:
        """The first `rank` coefficients of rows as a plan packs them, own ones among them, (N, R) fp32."""
        vector_CK = self._vectors()
        own_NK = (coef_NC * shared.weight_C) @ vector_CK
        rest_NC = coef_NC - own_NK @ (vector_CK / shared.weight_C[:, None]).mT
        return self._among(rest_NC[:, :rank], own_NK / self.size_K, rank, dim=1)

    def decoder(self, shared: SharedSpace, rank: int) -> Tensor:
        """States are the coefficients of :meth:`encode` · decoder, (R, W) fp32."""
        own_KW = (self._vectors() * self.size_K / shared.weight_C[:, None]).mT @ shared.decoder_CW
        return self._among(shared.decoder_CW[:rank], own_KW, rank, dim=0)

    def _vectors(self) -> Tensor:
        return self.code_CK * self.scale_K

    def _among(self, shared: Tensor, own: Tensor, rank: int, *, dim: int) -> Tensor:
        """What belongs to each coefficient, along `dim`, in the order of a row: own ones at their places, shared ones in
        theirs between them."""
        parts, taken = [], 0
        for j, place in enumerate(self.places):
            if place >= rank:
                break
            parts += [shared.narrow(dim, taken, place - j - taken), own.narrow(dim, j, 1)]
            taken = place - j
        room = rank - sum(part.shape[dim] for part in parts)
        return torch.cat([*parts, shared.narrow(dim, taken, room)], dim=dim)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.code_CK, self.scale_K, self.size_K)

    @staticmethod
    def nbytes(width: int, count: int) -> int:
        """Bytes of the tensors of `count` directions of C coefficients."""
        return count * (width + 4 + 4)


class LastDecoder:
    """A decoder, and what attention has made of it, as long as what it was made for is there. A copy is empty."""

    def __init__(self):
        self._made: tuple[weakref.ref, torch.dtype, Tensor, dict[str, Any]] | None = None

    def of(self, own: OwnDirections, dtype: torch.dtype, make: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """The decoder of these directions, made where it is not the last one."""
        made = self._made  # read and replaced as a whole, so that no thread finds one sequence's with another's
        if made is None or made[0]() is not own or made[1] != dtype:
            made = self._made = (weakref.ref(own, self._forget), dtype, make(), {})
        return made[2:]

    def _forget(self, gone: weakref.ref) -> None:
        made = self._made
        if made is not None and made[0] is gone:
            self._made = None

    def __reduce__(self) -> tuple:
        return LastDecoder, ()


def leading_directions(row_NC: Tensor, count: int) -> Tensor:
    """About the `count` leading right singular vectors of rows, (C, K) fp32, by a randomized range finder.

    Each pass is a step of Oja's rule on all rows whose rate has no bound, made orthonormal. Torch's random state stays as it
    is: the same rows have the same directions.
    """
    width = row_NC.shape[1]
    sketch = min(count + _OVERSAMPLING, *row_NC.shape)
    generator = torch.Generator().manual_seed(0)
    range_CS = torch.randn(width, sketch, generator=generator, dtype=torch.float32, device="cpu")
    range_CS = range_CS.to(row_NC.device)
    for _ in range(_PASSES):
        range_CS = torch.linalg.qr(row_NC.mT @ (row_NC @ range_CS)).Q
    _, _, right_SS = torch.linalg.svd(row_NC @ range_CS, full_matrices=False)
    return range_CS @ right_SS[:count].mT
