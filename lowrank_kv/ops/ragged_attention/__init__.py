"""Decode attention over a cache whose tokens keep different numbers of coefficients.

Shapes: B batch, H query heads, Q new queries, D head dim.
"""

from collections.abc import Sequence

from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.gradients import attend_without_graph
from lowrank_kv.ops.ragged_attention import eager, native
from lowrank_kv.ops.ragged_attention.tokens import RaggedTokens
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.utils.dispatch_log import log_choice
from lowrank_kv.utils.errors import UserError

__all__ = ["RaggedTokens", "ragged_attention"]


def ragged_attention(
    query_BHQD: Tensor, sequences: Sequence[RaggedTokens], decoders: Decoders, scoring: Scoring
) -> Tensor:
    """Attention of Q queries of each sequence over its cached tokens (DynaKV section 3.2, equation 3).

    Args:
        query_BHQD: rotated queries.
        sequences: the tokens of each of the B sequences, whose stores and rotations are all of one kind.
        decoders: of keys and values.
        scoring: what the model does to scores.

    Returns:
        (B, Q, H, D), contiguous, in the dtype of `query_BHQD`; 0 for a query that may see nothing. Scores and softmax are in
        fp32. A backward pass through it raises :class:`UserError`.

    Raises:
        UserError: there are not as many sequences as queries of them.
    """
    batch = query_BHQD.shape[0]
    if len(sequences) != batch:  # compiled code would write as many outputs
        raise UserError(f"`sequences` are {len(sequences)}, but `query_BHQD` has queries of {batch}; pass one of each")
    operation, backend, because = native, "native", native.unsupported_reason(sequences)
    if because is not None:
        operation, backend = eager, "eager"
    held = sequences[0].keys
    log_choice("ragged_attention", backend, held.dtype, held.device, because)
    return attend_without_graph(operation.ragged_attention, query_BHQD, sequences, decoders, scoring)
