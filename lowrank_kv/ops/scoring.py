"""What a model does to attention's scores besides masking them."""

from typing import NamedTuple

from torch import Tensor


class Scoring(NamedTuple):
    """How dot products of queries and keys become the scores of a softmax.

    Attributes:
        scaling: the model's own score scale, usually 1/√D (D head dim, not the rank).
        softcap: scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, section 2); None leaves them.
        sink_H: one more score of each head's softmax, final as it is, of a token without a value (GPT-OSS model card,
            section 2.3); None where there is none.
    """

    scaling: float
    softcap: float | None = None
    sink_H: Tensor | None = None
