"""Directions of each document's own in a pass without a cache, which stands for decoding behind a prompt.

A cache finds them in a prompt. Of a document in a block of text its first half stands for the prompt, because directions are
chosen as if a text became twice as long as its prompt. They are those that a cache would find in the same keys, or values,
and what is rebuilt is what it would rebuild of each token that it compresses.

Shapes: B batch, T tokens, N tokens of a document, C coefficients of the shared basis, R in a row, W width of a state.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from dynakv.config import DynaKVConfig
from lowrank_kv.hf.cache.windowed.own_directions import TEXT_PER_PROMPT, OwnDirections, SharedSpace
from lowrank_kv.hf.cache.windowed.retention import RetentionSchedule
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.token_plans import TokenPlans


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentDirections:
    """How the tokens of one pass become rows of one layer's keys, or values, and rows become states.

    Gradients pass through coefficients and the shared decoder, and not through the directions.

    Attributes:
        shared: what the documents have in common.
        rank: R.
        documents: of each sequence, the tokens of each document, in order, and its directions; None where it has none.
    """

    shared: SharedSpace
    rank: int
    documents: list[list[tuple[slice, OwnDirections | None]]]

    @classmethod
    @torch.no_grad()
    def find(
        cls,
        coef_BTC: Tensor,
        position_BT: Tensor | None,
        shared: SharedSpace,
        plan: BitPlan | TokenPlans,
        config: DynaKVConfig,
    ) -> "DocumentDirections":
        """What a cache of this configuration would find in the first half of each document.

        A document has none where that half has fewer tokens to compress than `own_directions_from`, or where none pays.

        Args:
            coef_BTC: all coefficients in the shared basis, fp32.
            position_BT: each token's place in its own document, (B or 1, T) int64; None where all are of one.
        """
        rank = plan.num_coefficients

        def own_of(coef_NC: Tensor) -> OwnDirections | None:
            due = _prompt_of(len(coef_NC), config)
            if due.stop - due.start < config.own_directions_from:
                return None
            return OwnDirections.of_prompt(
                coef_NC[due], shared.weight_C, config.own_directions, plan=plan, rank=rank, writer=plan
            )

        spans = _documents(position_BT, coef_BTC.shape[:2])
        documents = [
            [(span, own_of(coef_TC[span])) for span in of_sequence]
            for coef_TC, of_sequence in zip(coef_BTC, spans, strict=True)
        ]
        return cls(shared=shared, rank=rank, documents=documents)

    def encode(self, coef_BTC: Tensor) -> Tensor:
        """The rows that a plan packs, (B, T, R) fp32."""

        def row(coef_NC: Tensor, own: OwnDirections | None) -> Tensor:
            return coef_NC[:, : self.rank] if own is None else own.encode(coef_NC, self.shared, self.rank)

        return self._each(coef_BTC, row)

    def decode(self, row_BTR: Tensor) -> Tensor:
        """The states of rows, (B, T, W) fp32."""

        def states(row_NR: Tensor, own: OwnDirections | None) -> Tensor:
            return row_NR @ (
                self.shared.decoder_CW[: self.rank] if own is None else own.decoder(self.shared, self.rank)
            )

        return self._each(row_BTR, states)

    def _each(self, tokens_BTX: Tensor, change: Callable[[Tensor, OwnDirections | None], Tensor]) -> Tensor:
        """What `change` makes of the tokens of each document."""
        return torch.stack(
            [
                torch.cat([change(tokens_TX[span], own) for span, own in of_sequence])
                for tokens_TX, of_sequence in zip(tokens_BTX, self.documents, strict=True)
            ]
        )


def _documents(position_BT: Tensor | None, shape: tuple[int, int]) -> list[list[slice]]:
    """The tokens of each document of each sequence: one begins where positions do."""
    batch, tokens = shape
    if position_BT is None:
        return [[slice(0, tokens)]] * batch
    found = []
    for position_T in position_BT.expand(batch, tokens):
        starts = [0, *((position_T[1:] == 0).nonzero().flatten() + 1).tolist(), tokens]
        found.append([slice(start, end) for start, end in zip(starts, starts[1:], strict=False)])
    return found


def _prompt_of(tokens: int, config: DynaKVConfig) -> slice:
    """Of a document of so many tokens, those that a cache would compress together as its prompt's."""
    length = tokens // TEXT_PER_PROMPT
    step = RetentionSchedule(config.windowed).due(
        num_pinned=0, num_waiting=length, num_seen=length, has_started=False, is_prompt=True
    )
    return slice(0, 0) if step is None else step.due
