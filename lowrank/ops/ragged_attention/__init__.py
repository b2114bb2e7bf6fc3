"""Decode attention over a cache whose tokens keep different numbers of coefficients.

Shapes: H query heads, Q new queries, D head dim, C joint width, T cached tokens.
"""

from torch import Tensor

from lowrank.ops.chosen import log_choice
from lowrank.ops.decoders import Decoders
from lowrank.ops.ragged_attention import bucketed, compiled
from lowrank.ops.rotation import Rotation
from lowrank.ragged import RaggedStore

__all__ = ["ragged_attention"]


def ragged_attention(
    query_HQD: Tensor,
    keys: RaggedStore,
    values: RaggedStore,
    decoders: Decoders,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    place_T: Tensor | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """Attention of Q queries of one sequence over its T cached tokens (DynaKV section 3.2, equation 3).

    Args:
        query_HQD: rotated queries.
        keys, values: the sequence's coefficient stores, T rows each; their ranks need not agree.
        decoders: of keys and values.
        scaling: the model's own score scale, usually 1/√D.
        rotation: of rebuilt keys, given their places in the sequence; None for a family without one.
        place_T: int64 places of the stores' rows in the sequence, which `rotation` is told; None where row t is token t.
        softcap: scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, section 2); None leaves them.
        mask_QT: True where a query may see a row's token; None when it may see all.

    Returns:
        (H, Q, D) in the dtype of `query_HQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.
    """
    operation, backend, because = compiled, "compiled", compiled.refusal(keys, rotation)
    if because is not None:
        operation, backend = bucketed, "bucketed"
    log_choice("ragged_attention", backend, keys.dtype, keys.device, because)
    return operation.ragged_attention(
        query_HQD,
        keys,
        values,
        decoders,
        scaling=scaling,
        rotation=rotation,
        place_T=place_T,
        softcap=softcap,
        mask_QT=mask_QT,
    )
