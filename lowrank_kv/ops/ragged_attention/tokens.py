"""One sequence's tokens, as ragged attention takes them, and attention to one sequence after another.

Shapes: B batch, H query heads, D head dim, Q new queries, T cached tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.rotation import Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax import join_sequences
from lowrank_kv.stores.ragged import RaggedStore


class RaggedTokens(NamedTuple):
    """The tokens of one sequence.

    Attributes:
        keys, values: coefficient stores, T rows each; their ranks need not agree.
        rotation: of rebuilt keys; None for a family without one.
        position_T: int64 positions of the stores' rows in the sequence, for `rotation`; None where row t is token t.
        mask_QT: True where a query may see a row's token; None when it may see all.
    """

    keys: RaggedStore
    values: RaggedStore
    rotation: Rotation | None = None
    position_T: Tensor | None = None
    mask_QT: Tensor | None = None


# (query_HQD, tokens, decoders, scoring) → (H, Q, D)
AttentionOfOne = Callable[[Tensor, RaggedTokens, Decoders, Scoring], Tensor]


def one_by_one(
    attention_of_one: AttentionOfOne,
    query_BHQD: Tensor,
    sequences: Sequence[RaggedTokens],
    decoders: Decoders,
    scoring: Scoring,
) -> Tensor:
    """Ragged attention, (B, Q, H, D), by a form that takes one sequence at a time."""
    pairs = zip(query_BHQD, sequences, strict=True)
    return join_sequences([attention_of_one(query, tokens, decoders, scoring) for query, tokens in pairs])
