"""What gives a layer's keys and values from their coefficients.

Shapes: C = G·D joint width.
"""

from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.utils.derived import derived_from


class Decoders:
    """U⁻¹ of keys and of values.

    Attributes:
        key_CC, value_CC: rows in order of the coefficients, in the cache's dtype and on its device.
    """

    def __init__(self, key_CC: Tensor, value_CC: Tensor):
        self.key_CC, self.value_CC = key_CC, value_CC
        self._compiled: dict[bool, native.PackedDecoders | None] = {}  # a loaded copy has None

    def compiled(self, *, rebuilds_keys: bool = True) -> native.PackedDecoders:
        """Both for compiled code, or the values' only, where keys are not rebuilt. Copies in fp32 are made once for all
        caches with these tensors, and kept as long as these are."""
        found = self._compiled.get(rebuilds_keys)
        if found is None:
            key_CC, key_memo = (self.key_CC, derived_from(self.key_CC)) if rebuilds_keys else (None, None)
            value_memo = derived_from(self.value_CC)
            found = native.PackedDecoders(key_CC, self.value_CC, key_memo=key_memo, value_memo=value_memo)
            self._compiled[rebuilds_keys] = found
        return found
