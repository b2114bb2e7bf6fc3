"""How many bytes a cache may take, as people say it: ``4096 B/token``, or ``2 GiB/131072 tokens``."""

import math
import re

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.errors import UserError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_SIZE = r"\s*(?P<amount>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[KMG]i?B|B)\s*"
_TOKENS = r"\s*(?P<tokens>\d[\d_,]*)?\s*tokens?\s*"


@configuration
class Budget:
    """Bytes that a cache may take.

    Attributes:
        nbytes: of all layers' keys and values together.
        tokens: how many tokens these bytes are for; None where they are of each compressed token, whatever their number.
    """

    nbytes: float = option(help="of all layers' keys and values together", unit="bytes")
    tokens: int | None = option(None, help="that these bytes are for; null where they are of each compressed token")

    def __post_init__(self):
        require(self.nbytes > 0, "nbytes", self.nbytes, "positive")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "at least 1, or None for each token")

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """A budget from words such as ``4096 B/token``, ``4.5 KiB/token`` or ``2 GiB/131072 tokens``.

        Raises:
            UserError: the text says something else, or no byte, or no token.
        """
        found = re.fullmatch(f"{_SIZE}/{_TOKENS}", str(text), re.IGNORECASE)
        nbytes = _bytes_of(found) if found else 0.0
        tokens = int(re.sub("[_,]", "", found["tokens"])) if found and found["tokens"] else None
        if not nbytes or tokens == 0:
            raise UserError(
                f"`budget` must be bytes of a token or of some tokens together, such as `4096 B/token` or "
                f"`2 GiB/131072 tokens`, got {text!r}; give a share as `rate` instead"
            )
        return cls(nbytes=nbytes, tokens=tokens)


def parse_size(text: str, name: str) -> int:
    """A number of bytes from words such as ``24 GiB``, rounded down.

    Args:
        name: the argument, for errors.

    Raises:
        UserError: the text says something else, or no byte.
    """
    found = re.fullmatch(_SIZE, str(text), re.IGNORECASE)
    if not found or _bytes_of(found) < 1:
        raise UserError(f"`{name}` must be a number of bytes with its unit, such as `24 GiB` or `500 MB`, got {text!r}")
    return math.floor(_bytes_of(found))


def _bytes_of(found: re.Match[str]) -> float:
    """Bytes of what :data:`_SIZE` matched."""
    return float(found["amount"]) * _UNITS[found["unit"].upper()]
