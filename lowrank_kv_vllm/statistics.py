"""What a worker counts, for vLLM's log: bytes of a token, and rows that full pages coded more coarsely than asked for.

vLLM's own statistics are made in the scheduler's process and in the server's, and a worker cannot add to them.
"""

import dataclasses
import functools
import logging
import time

from torch import Tensor
from vllm import envs

logger = logging.getLogger("vllm.lowrank_kv")  # below vLLM's own, so that lines go where its do


@dataclasses.dataclass
class Statistics:
    """Of all layers of this process.

    Attributes:
        interval: seconds from line to line of the log, which has one only where tokens were written.
        token_bytes: that pages take of one token.
        uncompressed_bytes: that stock pages would.
        num_written: keys and values that were written, two for each token of a layer. First tokens that stay exact count,
            too, and so does each guess that was refused.
    """

    interval: float
    token_bytes: float = 0.0
    uncompressed_bytes: float = 0.0
    num_written: int = 0

    def __post_init__(self):
        self._cut: list[Tensor] = []
        self._last, self._said = time.monotonic(), 0

    def add_layer(self, token_bytes: float, uncompressed_bytes: float, cut: Tensor) -> None:
        """Count a layer's pages; `cut` is where they count rows of a cheaper class than asked for, on any device."""
        self._cut.append(cut)
        self.token_bytes += token_bytes
        self.uncompressed_bytes += uncompressed_bytes

    def add_written(self, count: int) -> None:
        """Count the keys and values that a layer has written."""
        self.num_written += count

    @property
    def num_cut(self) -> int:
        """Rows of a cheaper class than they asked for; it waits for a GPU."""
        return sum(int(cut) for cut in self._cut)

    def say(self) -> None:
        """Write a line where it is time: at once when the first tokens are there, for that line shows that pages are
        compressed."""
        now = time.monotonic()
        is_due = not self._said or now - self._last >= self.interval
        if not is_due or self.num_written == self._said:
            return
        self._last, self._said = now, self.num_written
        logger.info(str(self))

    def __str__(self) -> str:
        cut = self.num_cut
        share = cut / self.num_written if self.num_written else 0.0
        return (
            f"pages take {self.token_bytes:.0f} bytes a token ({self.token_bytes / self.uncompressed_bytes:.3f} of the "
            f"uncompressed); {cut} of {self.num_written} keys and values written ({share:.2%}, exact first tokens "
            f"counted) were coded more coarsely than asked for, because their page was full"
        )


@functools.cache
def of_process() -> Statistics:
    """Those of this process; their interval is that of vLLM's own, ``$VLLM_LOG_STATS_INTERVAL``."""
    return Statistics(interval=envs.VLLM_LOG_STATS_INTERVAL)
