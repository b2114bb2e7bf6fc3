"""What gives a layer's keys and values from their coefficients.

Shapes: C = G·D joint width.
"""

from torch import Tensor

from lowrank_kv.ops import native


class Decoders:
    """U⁻¹ of keys and of values.

    Attributes:
        key_CC, value_CC: rows in order of the coefficients, in the cache's dtype and on its device.
    """

    def __init__(self, key_CC: Tensor, value_CC: Tensor):
        self.key_CC, self.value_CC = key_CC, value_CC
        self._compiled: native.PackedDecoders | None = None

    def compiled(self) -> native.PackedDecoders:
        """Both for compiled code; kept unless that takes copies, which a cache would have to count."""
        if self._compiled is not None:
            return self._compiled
        compiled = native.PackedDecoders(self.key_CC, self.value_CC)
        if not compiled.is_copy:
            self._compiled = compiled
        return compiled
