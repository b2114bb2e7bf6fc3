"""OjaKV: online low-rank bases for the key–value cache. The configuration lives here; the method is being built."""

from ojakv.config import OjaKVConfig

__all__ = ["OjaKVConfig"]
