"""One call for every method; `lowrank_kv.compress` and `lowrank_kv.uncompress` are these two.

The core knows no method, and the two methods do not know each other, so what chooses between them stands above all three.
"""

from lowrank_kv_auto.compression import compress, uncompress

__all__ = ["compress", "uncompress"]
