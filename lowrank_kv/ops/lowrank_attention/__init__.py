"""Decode attention over low-rank tokens and tokens at full rank, in one softmax.

Shapes: H query heads, Q new queries, D head dim, P parts, N low-rank tokens, F full-rank tokens.
"""

from torch import Tensor

from lowrank_kv.ops.lowrank_attention import eager, native, triton
from lowrank_kv.ops.lowrank_attention.eager import Operands
from lowrank_kv.ops.rotation import Positions, Rotation
from lowrank_kv.utils.dispatch_log import log_choice

__all__ = ["Operands", "lowrank_attention"]


def lowrank_attention(
    query_HQD: Tensor,
    keys: Operands,
    values: Operands,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    places: Positions | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """Attention of Q queries of one sequence over its N low-rank and F full-rank tokens.

    Args:
        query_HQD: rotated queries.
        keys, values: of the same tokens.
        scaling: the model's own score scale, usually 1/√D (not 1/√R).
        rotation: of keys compressed before it; None when they were compressed after it.
        places: of the low-rank tokens, or (P, N) where each part holds tokens of its own; needed with `rotation`.
        softcap: scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, section 2); None leaves them.
        mask_QT: True where a query may see a token, low-rank tokens first, then full-rank ones; None when it may see all.
            (H, Q, T) where each part holds tokens of its own.

    Returns:
        (H, Q, D) in the dtype of `query_HQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.
    """
    operation, backend = triton, "triton"
    because = triton.unsupported_reason(query_HQD, keys, values, rotation, places, mask_QT)
    if because is not None and query_HQD.is_cpu:
        operation, backend = native, "native"
        because = native.unsupported_reason(keys, values, rotation, places, mask_QT)
    if because is not None:
        operation, backend = eager, "eager"
    log_choice("lowrank_attention", backend, keys.coef.dtype, keys.coef.device, because)
    return operation.lowrank_attention(
        query_HQD,
        keys,
        values,
        scaling=scaling,
        rotation=rotation,
        places=places,
        softcap=softcap,
        mask_QT=mask_QT,
    )
