"""Calling the compiled way from new tokens' keys and values to their coefficients.

Shapes: T tokens, G KV heads, D head dim, C = G·D joint width, R coefficients, X positions, F pairs of dims.
"""

import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, lanes, library
from lowrank_kv.ops.native.pages import NewTokens, states_of
from lowrank_kv.ops.native.store_view import KINDS

_PROJECTING = struct.Struct("21q")  # the members of `struct projecting` in new_tokens.h, in their order


class Projection:
    """One layer's way from states to coefficients, where it is a product with a matrix.

    Args:
        key_CR, value_CR: coefficients are states · these; of keys before rotation.
        turn_back: cos and sin that undo the rotation at each place, (X, F) fp32, contiguous.
        num_kv_heads: G.

    Attributes:
        widths: numbers from one token's coefficients to the next, of keys and of values.
    """

    def __init__(self, key_CR: Tensor, value_CR: Tensor, turn_back: tuple[Tensor, Tensor], *, num_kv_heads: int):
        self._ranks = key_CR.shape[1], value_CR.shape[1]
        self._vectors = [_padded(each.float()).contiguous() for each in (key_CR, value_CR)]
        cos_XF, sin_XF = self._turn_back = turn_back
        self.widths = [vectors.shape[1] for vectors in self._vectors]
        self._addresses = [vectors.data_ptr() for vectors in self._vectors]
        self._rotation = cos_XF.data_ptr(), sin_XF.data_ptr(), cos_XF.shape[1]
        self._heads = num_kv_heads, len(key_CR) // num_kv_heads

    def __call__(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        """The coefficients of tokens' keys and values, (T, R) fp32 each, those of a token side by side."""
        tokens = len(new.position_T)
        coefs = [torch.empty(tokens, width, dtype=torch.float32, device=CPU) for width in self.widths]
        states = *states_of(new.key_TGD), *states_of(new.value_TGD)
        kind, addresses = KINDS[new.key_TGD.dtype], [coef.data_ptr() for coef in coefs]
        call = self.packed(states, kind, addresses, new.position_T.data_ptr(), tokens, torch.get_num_threads())
        if library().project_states(call):
            raise MemoryError("no memory for the scratch space of projecting states")
        key_TR, value_TR = (coef[:, :rank] for coef, rank in zip(coefs, self._ranks, strict=True))
        return key_TR, value_TR

    def packed(
        self,
        states: Sequence[int],
        kind: int,
        coefs: Sequence[int],
        position: int,
        tokens: int,
        threads: int,
    ) -> bytes:
        """A call of the compiled code.

        Args:
            states: of keys and then of values, as :func:`lowrank_kv.ops.native.pages.states_of` gives them.
            kind: of their numbers.
            coefs: addresses of what is written, of keys and of values: (T, width) fp32 each, see :attr:`widths`.
            position: address of the tokens' positions, int64.
        """
        return _PROJECTING.pack(
            *states,
            *self._addresses,
            *coefs,
            *self.widths,
            position,
            *self._rotation,
            tokens,
            *self._heads,
            kind,
            threads,
        )


def _padded(vectors_CR: Tensor) -> Tensor:
    """With zeros behind each row, so that whole registers are read; itself where rows are as long already."""
    missing = -vectors_CR.shape[1] % lanes()
    return F.pad(vectors_CR, (0, missing)) if missing else vectors_CR
