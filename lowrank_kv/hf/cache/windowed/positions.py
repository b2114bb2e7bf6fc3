"""The positions in the text of the tokens that one sequence of one layer holds.

Shapes: N low-rank tokens, F tokens at full rank, Q new tokens, P parts.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from lowrank_kv.ops.rotation import Positions
from lowrank_kv.stores.growable_tensor import GrowingTensor


class TokenPositions:
    """Positions of full-rank tokens and of padding. All others are low-rank tokens, until some of these are evicted.

    Attributes:
        length: tokens seen, padding and evicted ones included.
        full_rank: positions of the tokens at full rank, in the order of their rows, (F,) int32.
        padding: positions of padding, which is never stored, int32.
    """

    def __init__(self, device: torch.device):
        self.length = 0
        self.full_rank = GrowingTensor(torch.empty(0, dtype=torch.int32, device=device))
        self.padding = torch.empty(0, dtype=torch.int32, device=device)
        self._low_rank: GrowingTensor | None = None  # (1 or P, N), once the others no longer tell
        self._low_rank_run: slice | None = None  # the low-rank tokens, where they follow one another

    def is_whole(self) -> bool:
        """Whether all positions are of tokens that were seen, and the run is that of the low-rank ones, as in a file that
        nobody changed."""
        held = [self.full_rank.rows, self.padding, *(() if self._low_rank is None else (self._low_rank.rows,))]
        if not all(bool(((each >= 0) & (each < self.length)).all()) for each in held):
            return False
        twin = copy.copy(self)
        twin._find_run()
        return twin._low_rank_run == self._low_rank_run

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def num_present(self) -> int:
        """Tokens seen, without padding."""
        return self.length - self.padding.shape[0]

    @property
    def num_low_rank(self) -> int:
        """N, of each part."""
        if self._low_rank is not None:
            return self._low_rank.length
        return self.num_present - self.full_rank.length

    def low_rank(self) -> Tensor:
        """Positions of the low-rank tokens, rising, (N,) int64, or (P, N) where each part has tokens of its own."""
        if self._low_rank is not None:
            position_PN = self._low_rank.rows.long()
            return position_PN[0] if len(position_PN) == 1 else position_PN
        is_low_rank = torch.ones(self.length, dtype=torch.bool, device=self.padding.device)
        is_low_rank[self.full_rank.rows.long()] = False
        is_low_rank[self.padding.long()] = False
        return torch.nonzero(is_low_rank).flatten()

    def low_rank_positions(self) -> Positions:
        """The same, as a slice where the low-rank tokens follow one another."""
        return self._low_rank_run or self.low_rank()

    def stored(self) -> Tensor:
        """Positions of all tokens held, low-rank ones first, (N + F,) int64, or (P, N + F) where parts differ."""
        low_rank, full_rank_F = self.low_rank(), self.full_rank.rows.long()
        return torch.cat([low_rank, full_rank_F.expand(*low_rank.shape[:-1], -1)], dim=-1)

    # -- writing --------------------------------------------------------------------------------------------------

    def append_one(self) -> None:
        """A token at full rank."""
        self.full_rank.append_number(self.length)
        self.length += 1

    def append(self, count: int, present_Q: Tensor | None, *, leaves_room: bool = True) -> None:
        """`count` tokens at full rank, or padding where `present_Q` is False; for `leaves_room` see
        :meth:`GrowingTensor.append`."""
        position_Q = torch.arange(self.length, self.length + count, dtype=torch.int32, device=self.padding.device)
        if present_Q is not None:
            self.padding = torch.cat([self.padding, position_Q[~present_Q]])
            position_Q = position_Q[present_Q]
        self.full_rank.append(position_Q, leaves_room=leaves_room)
        self.length += count

    def with_low_rank(self, position_N: Tensor, full_rank: GrowingTensor) -> "TokenPositions":
        """The positions once these tokens have become low rank, and only `full_rank` are at full rank. They share what does
        not change, and these positions stay as they are."""
        twin = copy.copy(self)
        twin.full_rank = full_rank
        if self._low_rank is not None:
            position_PN = position_N.to(torch.int32).expand(self._low_rank.buffer.shape[0], -1)
            twin._low_rank = self._low_rank.sharing_buffers()
            twin._low_rank.append(position_PN)
        twin._low_rank_run = self._continued_run(position_N)
        if twin._low_rank_run is None:
            twin._find_run()
        return twin

    def _continued_run(self, position_N: Tensor) -> slice | None:
        """The run of low-rank tokens with these, which rise, where they follow it; else None. To look for a run among all
        tokens takes longer the more there are."""
        run, count = self._low_rank_run, len(position_N)
        if run is None or not count or int(position_N[0]) != run.stop or int(position_N[-1]) != run.stop + count - 1:
            return None
        return slice(run.start, run.stop + count)

    def with_only(self, position_PN: Tensor) -> "TokenPositions":
        """The positions once only these low-rank tokens are left, (1 or P, N). They share what does not change, and these
        positions stay as they are."""
        twin = copy.copy(self)
        twin._low_rank = GrowingTensor(position_PN.to(torch.int32), dim=1)
        twin._find_run()
        return twin

    def forget_uncounted(self) -> None:
        """Forget the tokens of an :meth:`append` that was cut short before it counted them."""
        self.full_rank.crop(int((self.full_rank.rows < self.length).sum()))

    def cropped(self, length: int, num_low_rank: int, full_rank: GrowingTensor) -> "TokenPositions":
        """The positions of the first `length` tokens, `num_low_rank` of them low rank and `full_rank` at full rank. They
        share what does not change, and these positions stay as they are."""
        twin = copy.copy(self)
        twin.full_rank, twin.padding, twin.length = full_rank, self.padding[self.padding < length], length
        if self._low_rank is not None:
            twin._low_rank = self._low_rank.sharing_buffers()
            twin._low_rank.crop(num_low_rank)
        twin._find_run()
        return twin

    def _find_run(self) -> None:
        low_N = self.low_rank()
        is_run = low_N.dim() == 1 and len(low_N) and int(low_N[-1] - low_N[0]) == len(low_N) - 1
        self._low_rank_run = slice(int(low_N[0]), int(low_N[-1]) + 1) if is_run else None

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def clone(self) -> "TokenPositions":
        twin = copy.copy(self)
        twin.full_rank, twin.padding = self.full_rank.clone(), self.padding.clone()
        twin._low_rank = None if self._low_rank is None else self._low_rank.clone()
        return twin

    def tensors(self) -> Iterator[Tensor]:
        yield self.full_rank.buffer
        yield self.padding
        if self._low_rank is not None:
            yield self._low_rank.buffer
