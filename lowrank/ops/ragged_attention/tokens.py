"""What ragged attention is told of one sequence.

Shapes: Q new queries, T cached tokens.
"""

from typing import NamedTuple

from torch import Tensor

from lowrank.ops.rotation import Rotation
from lowrank.ragged import RaggedStore


class RaggedTokens(NamedTuple):
    """The tokens of one sequence.

    Attributes:
        keys, values: coefficient stores, T rows each; their ranks need not agree.
        rotation: of rebuilt keys, given their places in the sequence; None for a family without one.
        place_T: int64 places of the stores' rows in the sequence, which `rotation` is told; None where row t is token t.
        mask_QT: True where a query may see a row's token; None when it may see all.
    """

    keys: RaggedStore
    values: RaggedStore
    rotation: Rotation | None = None
    place_T: Tensor | None = None
    mask_QT: Tensor | None = None
