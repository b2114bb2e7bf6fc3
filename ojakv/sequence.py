"""One sequence of one layer: which tokens are low rank, which are whole, and when they change sides.

Shapes: H query heads, G KV heads, D head dim, N tokens, F tokens at full rank, Q queries, P parts, W width of a
part, T all tokens seen.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowrank_kv.eviction import Eviction, fixed_by, top_scores
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.ops.rotation import Positions, Rotate, Rotation
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import BUFFERS, POSITIONS
from ojakv.basis_plan import InitialBasis
from ojakv.config import OjaKVConfig
from ojakv.online_store import OnlineStore
from ojakv.retention import Prompt, largest_residuals


class OnlineSequence:
    """Tokens arrive at full rank and wait; :meth:`settle` compresses those whose time has come.

    Tokens at full rank lie in one block for keys and one for values: first those that stay, then, in order, those that
    wait. Keys there are rotated. Padding is never stored.

    What a basis has followed it cannot forget. Tokens that may yet be taken back (drafts) are therefore *held*: they wait,
    and neither they nor their number nor their queries decide anything, so that a :meth:`crop` of them leaves the very
    state of a sequence that never saw them.
    """

    def __init__(
        self,
        start: tuple[InitialBasis, InitialBasis],
        config: OjaKVConfig,
        *,
        head_dim: int,
        dtype: torch.dtype,
        layer: int,
    ):
        self.config = config
        self.key = OnlineStore(start[0], config, head_dim=head_dim, dtype=dtype, name=f"layer {layer} keys")
        self.value = OnlineStore(start[1], config, head_dim=head_dim, dtype=dtype, name=f"layer {layer} values")
        device = start[0].vectors_PWR.device
        self.length = 0
        self.staying = 0  # how many of the full-rank tokens stay
        self.full_position = GrowingTensor(torch.empty(0, dtype=torch.int32, device=device))
        self.absent_position = torch.empty(0, dtype=torch.int32, device=device)  # padding
        self.has_settled = False
        self.held_prompt: Prompt | None = None  # one that was held when it came
        self._arrived = 0  # tokens the running call stored
        self._low_place: GrowingTensor | None = None  # (1 or P, N) once tokens were evicted, and the gaps say nothing
        self.fixed = 0
        self._low_run: slice | None = None  # places of the low-rank tokens, if they follow one another

    # -- filling --------------------------------------------------------------------------------------------------

    def append(self, key_GQD: Tensor, value_GQD: Tensor, present_Q: Tensor | None) -> None:
        """New tokens, at full rank; `present_Q` is False for padding, None where there is none."""
        key_GQD, value_GQD = key_GQD.detach(), value_GQD.detach()
        count = key_GQD.shape[1]
        # Every decoded token, for which a dozen small operations less are worth it.
        if count == 1 and present_Q is None:
            self.key.full.append(key_GQD)
            self.value.full.append(value_GQD)
            self.full_position.append_number(self.length)
            self.length, self._arrived = self.length + 1, 1
            return
        position_N = torch.arange(self.length, self.length + count, dtype=torch.int32, device=key_GQD.device)
        if present_Q is not None and not bool(present_Q.all()):
            self.absent_position = torch.cat([self.absent_position, position_N[~present_Q]])
            key_GQD, value_GQD, position_N = key_GQD[:, present_Q], value_GQD[:, present_Q], position_N[present_Q]
        # A prompt is compressed at once; a step leaves room for those that follow.
        exact = count > self.config.update_period
        self.key.full.append(key_GQD, exact=exact)
        self.value.full.append(value_GQD, exact=exact)
        self.full_position.append(position_N, exact=exact)
        self.length += count
        self._arrived = position_N.shape[0]

    def settle(
        self,
        query_HQD: Tensor,
        scaling: float,
        rotation: Rotation | None,
        unrotate: Rotate | None,
        *,
        may_be_cropped: bool = False,
        prompt_end: int = 0,
    ) -> None:
        """Compress every token whose time has come.

        Args:
            query_HQD: the call's queries, which weigh the residuals of a prompt.
            scaling: the model's score scale.
            rotation, unrotate: of keys at given places; used where keys are compressed before rotation.
            may_be_cropped: whether the call's tokens may be taken back: they are held.
            prompt_end: the place where the prompt of the running `generate()` ends.
        """
        config = self.config
        prompt = self._prompt_of_call(query_HQD, prompt_end, may_be_cropped=may_be_cropped)
        is_held = may_be_cropped and not config.compresses_tokens_alone
        if is_held and prompt is not None:
            self.held_prompt = prompt.held(self.held_prompt, with_queries=bool(config.full_rank_ratio))
            return
        if self.held_prompt is not None:
            prompt, self.held_prompt = self._joined(prompt, query_HQD, is_held=is_held), None
        held = self._arrived if is_held else 0
        is_short = self.length - self.absent_position.shape[0] - held < config.min_length
        if prompt is not None and config.keep_prompt_full_rank:
            self._keep_whole(prompt, unrotate, is_short=is_short)
        elif not is_short:
            due = self._due(held, is_prompt=prompt is not None)
            picks = (
                self._largest_residuals(prompt, scaling, rotation)
                if config.full_rank_ratio and prompt is not None
                else None
            )
            if due:
                self._compress(due, picks, unrotate=unrotate, is_prompt=prompt is not None)

    def _prompt_of_call(self, query_HQD: Tensor, prompt_end: int, *, may_be_cropped: bool) -> Prompt | None:
        """The prompt of which the running call's tokens are, so far as this call brings it; None for other tokens.

        The tokens of a call that begins before `prompt_end` are a prompt. Where no `generate()` says where that is, the
        first call's are, and those of every later call of more than :data:`MAX_DECODE_QUERIES` that are no drafts, a further
        chunk or another turn's: bases follow them at the prompt's rate, and they are what `full_rank_ratio` chooses
        from, or what `keep_prompt_full_rank` keeps.
        """
        queries = query_HQD.shape[1]
        first = self.length - queries
        is_long = queries > MAX_DECODE_QUERIES and not may_be_cropped
        if first >= max(prompt_end, 1) and not is_long:
            return None
        return Prompt(first, prompt_end if first < prompt_end else self.length, query_HQD, self.length)

    def _joined(self, prompt: Prompt | None, query_HQD: Tensor, *, is_held: bool) -> Prompt:
        """The held prompt with what the running call brings of it; where it kept no queries the call's choose, of a held
        call its first, which is no draft's."""
        held = self.held_prompt
        if prompt is not None:
            return dataclasses.replace(prompt, start=held.start)
        if held.query_HQD is not None:
            return held
        first = self.length - query_HQD.shape[1]
        query_HQD = query_HQD[:, :1] if is_held else query_HQD
        return dataclasses.replace(held, query_HQD=query_HQD, query_end=first + query_HQD.shape[1])

    def _keep_whole(self, prompt: Prompt, unrotate: Rotate | None, *, is_short: bool) -> None:
        """Let bases follow a prompt, all of which stays at full rank."""
        self.has_settled = True
        # Tokens of earlier turns that still waited when this prompt came are no part of it.
        earlier = self._waiting_before(prompt.start)
        if earlier and not is_short:
            self._compress(earlier, None, unrotate=unrotate, is_prompt=False)
        self._compress(self._waiting_before(prompt.end), _all, unrotate=unrotate, is_prompt=True)

    def _waiting_before(self, place: int) -> int:
        return int((self.full_position.rows[self.staying :] < place).sum())

    def _due(self, held: int, *, is_prompt: bool) -> int:
        """How many of the waiting tokens have waited long enough, but for the last `held`."""
        config, present = self.config, self.full_position.length - held
        if self.has_settled:
            return max(0, present - self.staying - config.recent_window) // config.update_period * config.update_period
        due = max(0, present - config.num_sink_tokens - config.recent_window)
        # A prompt is compressed at once; one too short for that waits, like any token, until a period is full.
        if not is_prompt and due < config.update_period:
            return 0
        if due:
            self.staying, self.has_settled = config.num_sink_tokens, True
        return due

    def _largest_residuals(self, prompt: Prompt, scaling: float, rotation: Rotation | None) -> Callable:
        """What picks the tokens that stay whole, by the error of keys once their coefficients are known."""

        def picks(coef_PNR: Tensor, key_GND: Tensor, position_N: Tensor) -> Tensor:
            rebuilt_GND = self.key.rebuilt(coef_PNR)
            if self.config.rotates and rotation is not None:
                rebuilt_GND = rotation.rotate(rebuilt_GND, position_N)
            return largest_residuals(key_GND.float() - rebuilt_GND, position_N, prompt, scaling, self.config)

        return picks

    def _compress(self, due: int, choose: Callable | None, *, unrotate: Rotate | None, is_prompt: bool) -> None:
        """The `due` longest waiting tokens become coefficients, but for those that `choose` picks, which stay."""
        moving = slice(self.staying, self.staying + due)
        position_N = self.full_position.rows[moving].long()
        key_GND, value_GND = self.key.full.rows[:, moving], self.value.full.rows[:, moving]
        plain_GND = unrotate(key_GND, position_N) if self.config.rotates and unrotate is not None else key_GND
        with torch.autocast(position_N.device.type, enabled=False):  # bases are fp32, whatever the model computes in
            key_PNW, value_PNW = self.key.parts(plain_GND), self.value.parts(value_GND)
            self.key.follow(key_PNW, is_prompt=is_prompt)
            self.value.follow(value_PNW, is_prompt=is_prompt)
            key_PNR, value_PNR = self.key.projected(key_PNW), self.value.projected(value_PNW)
            picked_N = torch.zeros_like(position_N, dtype=torch.bool)
            if choose is not None:
                picked_N = choose(key_PNR, key_GND, position_N)
                key_PNR, value_PNR = key_PNR[:, ~picked_N], value_PNR[:, ~picked_N]
            self.key.store(key_PNR)
            self.value.store(value_PNR)
        stays = torch.ones(self.full_position.length, dtype=torch.bool, device=position_N.device)
        stays[moving] = picked_N
        self.staying += int(picked_N.sum())
        self._keep_full(stays)
        if self._low_place is not None:
            new_N = position_N[~picked_N].to(torch.int32)
            self._low_place.append(new_N.expand(self._low_place.buffer.shape[0], -1))
        self._note_run()

    def _keep_full(self, stays_F: Tensor) -> None:
        """Drop full-rank tokens and leave room for those that will wait until the next update."""
        room = self.staying + self.config.recent_window + self.config.full_period
        for side in (self.key, self.value):
            side.forget_operands()
            side.full = GrowingTensor(side.full.rows[:, stays_F], dim=1)
            side.full.reserve(max(room, side.full.length))
        self.full_position = GrowingTensor(self.full_position.rows[stays_F])
        self.full_position.reserve(max(room, self.full_position.length))

    def evict(self, score_PT: Tensor, places: slice, eviction: Eviction) -> None:
        """Of the low-rank tokens at `places`, forget those of least score; full-rank tokens are all kept.

        Args:
            score_PT: of the tokens at `places`, for all heads (P = 1) or for each part; −inf for padding.
            places: of tokens none of which, and none after which, is evicted yet.
        """
        place_PN = torch.atleast_2d(self.low_position()).expand(score_PT.shape[0], -1)
        old, end = (int((place_PN[0] < place).sum()) for place in (places.start, places.stop))
        new = end - old
        full = int(((self.full_position.rows >= places.start) & (self.full_position.rows < places.stop)).sum())
        count = max(0, eviction.count(new + full) - full)
        if count >= new:
            return
        kept_PN = top_scores(score_PT.gather(1, place_PN[:, old:end] - places.start), count)
        row_PN = torch.arange(place_PN.shape[1], device=kept_PN.device).expand(len(kept_PN), -1)
        index_PN = torch.cat([row_PN[:, :old], kept_PN + old, row_PN[:, end:]], dim=1)
        self.fixed = int(place_PN[0, old + fixed_by(0, kept_PN, new) - 1]) + 1
        for side in (self.key, self.value):
            side.coef.keep(index_PN)
        self._low_place = GrowingTensor(place_PN.gather(1, index_PN).to(torch.int32), dim=1)
        self._note_run()

    # -- reading --------------------------------------------------------------------------------------------------

    def low_position(self) -> Tensor:
        """Places of the low-rank tokens, rising, (N,) int64, or (P, N) where each part holds tokens of its own."""
        if self._low_place is not None:
            place_PN = self._low_place.rows.long()
            return place_PN[0] if len(place_PN) == 1 else place_PN
        is_low = torch.ones(self.length, dtype=torch.bool, device=self.full_position.buffer.device)
        is_low[self.full_position.rows.long()] = False
        is_low[self.absent_position.long()] = False
        return torch.nonzero(is_low).flatten()

    def low_places(self) -> Positions:
        """The same, as a slice where they follow one another."""
        return self._low_run or self.low_position()

    def _note_run(self) -> None:
        low_N = self.low_position()
        is_run = low_N.dim() == 1 and len(low_N) and int(low_N[-1] - low_N[0]) == len(low_N) - 1
        self._low_run = slice(int(low_N[0]), int(low_N[-1]) + 1) if is_run else None

    def places(self) -> Tensor:
        """Of all tokens held, low-rank ones first, (N + F,) int64, or (P, N + F) where parts differ."""
        low, full_F = self.low_position(), self.full_position.rows.long()
        return torch.cat([low, full_F.expand(*low.shape[:-1], -1)], dim=-1)

    def rebuilt(self, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of all tokens held, low-rank ones first, (G, N + F, D) each."""
        value_GND = self.value.operands().rebuild()
        return self._rebuilt_keys(rotation), torch.cat([value_GND, self.value.full.rows], 1)

    def keys_at(self, places: slice, rotation: Rotation | None) -> Tensor:
        """Rotated keys of the tokens at `places`, (G, T, D), none of which is evicted; zero where there was padding."""
        key_GND = self._rebuilt_keys(rotation)
        place_N = torch.atleast_2d(self.places())[0]  # parts differ in older tokens alone
        is_there_N = (place_N >= places.start) & (place_N < places.stop)
        key_GTD = key_GND.new_zeros(key_GND.shape[0], places.stop - places.start, key_GND.shape[2])
        key_GTD[:, place_N[is_there_N] - places.start] = key_GND[:, is_there_N]
        return key_GTD

    def _rebuilt_keys(self, rotation: Rotation | None) -> Tensor:
        key_GND = self.key.operands().rebuild()
        if self.config.rotates and rotation is not None:
            low = self.low_places()
            if isinstance(low, Tensor) and low.dim() == 2:
                heads = [rotation.rotate(key_GND[g : g + 1], low[g]) for g in range(len(key_GND))]
                key_GND = torch.cat(heads)
            else:
                key_GND = rotation.rotate(key_GND, low)
        return torch.cat([key_GND, self.key.full.rows], 1)

    def in_order(self, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same as they followed one another, for attention that takes causality from that, and their places."""
        place, order = self.places().sort(dim=-1)
        index_PND = torch.atleast_2d(order)[:, :, None]
        key_GND, value_GND = self.rebuilt(rotation)
        return key_GND.take_along_dim(index_PND, dim=1), value_GND.take_along_dim(index_PND, dim=1), place

    def dense(self, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """The same in their places, (G, T, D) each; zero where there was padding. Not for a sequence with evicted tokens."""
        place_N = self.places()

        def placed(rows_GND: Tensor) -> Tensor:
            states_GTD = rows_GND.new_zeros(rows_GND.shape[0], self.length, rows_GND.shape[2])
            states_GTD[:, place_N] = rows_GND
            return states_GTD

        key_GND, value_GND = self.rebuilt(rotation)
        return placed(key_GND), placed(value_GND)

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Forget tokens from place `length` on. Held ones leave no trace; a basis that has followed others stays."""
        low = self.key.coef.length - int((torch.atleast_2d(self.low_position())[0] >= length).sum())
        stays_F = self.full_position.rows < length
        self.staying = int(stays_F[: self.staying].sum())
        for side in (self.key, self.value):
            side.crop(low)
        if self._low_place is not None:
            self._low_place.crop(low)
        if not bool(stays_F.all()):
            self._keep_full(stays_F)
        self.absent_position = self.absent_position[self.absent_position < length]
        if self.held_prompt is not None:
            self.held_prompt = self.held_prompt.cropped(length)
        # Where the first tokens are gone, those that come next are the first.
        self.has_settled = self.has_settled and length - self.absent_position.shape[0] >= max(
            1, self.config.num_sink_tokens
        )
        self.length = length
        self._note_run()

    def clone(self) -> "OnlineSequence":
        twin = object.__new__(OnlineSequence)
        twin.__dict__.update(self.__dict__)
        twin.key, twin.value = self.key.clone(), self.value.clone()
        twin._low_place = None if self._low_place is None else self._low_place.clone()
        twin.full_position, twin.absent_position = self.full_position.clone(), self.absent_position.clone()
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.tensors_by_kind(self.staying)
        yield from self.value.tensors_by_kind(self.staying)
        yield POSITIONS, self.full_position.buffer
        yield POSITIONS, self.absent_position
        if self._low_place is not None:
            yield POSITIONS, self._low_place.buffer
        if self.held_prompt is not None and self.held_prompt.query_HQD is not None:
            yield BUFFERS, self.held_prompt.query_HQD


def columns_of(mask_QT: Tensor, place: Tensor, heads: int) -> Tensor:
    """A mask's columns of tokens at given places, (N,) or (P, N) → (Q, N), or (H, Q, N) where parts differ."""
    if place.dim() == 1:
        return mask_QT[:, place]
    return mask_QT[:, place].transpose(0, 1).repeat_interleave(heads // len(place), dim=0)


def _all(coef_PNR: Tensor, key_GND: Tensor, position_N: Tensor) -> Tensor:
    return torch.ones_like(position_N, dtype=torch.bool)
