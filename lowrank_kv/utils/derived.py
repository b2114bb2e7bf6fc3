"""What is worked out of a tensor once, for all who have that tensor."""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_DERIVED = WeakTensorKeyDictionary()


def derived_from(tensor: Tensor) -> dict[str, Any]:
    """Where to keep what was worked out of a tensor that does not change, by names; dropped when the tensor is gone."""
    return _DERIVED.setdefault(tensor, {})
