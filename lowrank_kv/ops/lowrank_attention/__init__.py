"""Decode attention over low-rank tokens and tokens at full rank, in one softmax.

Shapes: H query heads, Q new queries, D head dim.
"""

from torch import Tensor

from lowrank_kv.ops.gradients import attend_without_graph
from lowrank_kv.ops.lowrank_attention import eager, native, triton
from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens, Operands
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.utils.dispatch_log import log_choice

__all__ = ["LowRankTokens", "Operands", "lowrank_attention"]


def lowrank_attention(query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
    """Attention of Q queries of one sequence over its low-rank and full-rank tokens.

    Args:
        query_HQD: rotated queries.
        scoring: what the model does to scores.

    Returns:
        (H, Q, D) in the dtype of `query_HQD`; 0 for a query that may see nothing. Scores and softmax are in fp32. A backward
        pass through it raises :class:`UserError`.
    """
    operation, backend, because = triton, "triton", triton.unsupported_reason(query_HQD, tokens)
    if because is not None and query_HQD.is_cpu:
        operation, backend, because = native, "native", native.unsupported_reason(tokens)
    if because is not None:
        operation, backend = eager, "eager"
    log_choice("lowrank_attention", backend, tokens.keys.coef.dtype, query_HQD.device, because)
    return attend_without_graph(operation.lowrank_attention, query_HQD, tokens, scoring)
