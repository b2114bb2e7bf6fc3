"""What transformers calls the cache that a call reads and fills: ``past_key_values``, and from 5.24 on ``cache``. A user may
still give the old name there."""

from collections.abc import Mapping
from typing import Any

import transformers

_SINCE = (5, 24)
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= _SINCE else "past_key_values"
_NAMES = (CACHE, "past_key_values", "layer_past")  # the last one of attention modules of a few families


def cache_name(kwargs: Mapping[str, Any]) -> str:
    """The name under which a call's keyword arguments hold the cache; where they hold none, the one to give it under."""
    return next((name for name in _NAMES if name in kwargs), CACHE)
