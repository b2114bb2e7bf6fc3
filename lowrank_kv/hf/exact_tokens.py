"""Which tokens a query sees exactly in a pass without a cache, as if the others had been read from a compressed one.

Shapes: B batch, G KV heads, Q queries, T tokens (as many as queries), D head dim.
"""

import torch
from torch import Tensor

from lowrank_kv.utils.config import configuration, option, require


@configuration
class ExactTokens:
    """A cache keeps its first tokens and its latest ones at full rank, and compresses the others a period at a time, in all
    layers together. Where layers take turns, a token is exact as long on average."""

    num_sink_tokens: int = option(4, help="first tokens kept at full rank", unit="tokens")
    recent_window: int = option(16, help="latest tokens kept at full rank", unit="tokens")
    update_period: int = option(32, help="how many tokens wait at full rank to be compressed together", unit="tokens")

    def __post_init__(self):
        for key, least in (("num_sink_tokens", 0), ("recent_window", 0), ("update_period", 1)):
            require(getattr(self, key) >= least, key, getattr(self, key), f"at least {least}")

    def is_read_compressed(self, position_BT: Tensor) -> Tensor:
        """(B, Q, T) bool: True where a query reads the compressed form of a token, if it may see that token at all.

        Args:
            position_BT: each token's place in its own document, int64.
        """
        end_BQ = self.end_of_compressed(position_BT)
        return (position_BT >= self.num_sink_tokens)[:, None] & (position_BT[:, None] < end_BQ[:, :, None])

    def end_of_compressed(self, position: Tensor | int) -> Tensor | int:
        """The place before which queries at these places, or at one, read tokens compressed, but for the first."""
        # A token waits while it may still be taken back, so that the newest of those before a query never counts.
        return (position - 1) // self.update_period * self.update_period - self.recent_window

    def read_by_some(self, tokens: int) -> slice:
        """The tokens of a pass that some query reads compressed whose prediction is scored, as the last one's is not; none
        if the pass is too short."""
        return slice(self.num_sink_tokens, max(self.end_of_compressed(tokens - 2), self.num_sink_tokens))

    def joined(
        self,
        exact: tuple[Tensor, Tensor],
        compressed: tuple[Tensor, Tensor],
        position_BT: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values for one softmax over both forms, (B, G, 2·T, D) each, and its mask, (B or 1, 1, Q, 2·T) bool.

        Args:
            exact, compressed: rotated keys, and values, of the same tokens, (B, G, T, D) each.
            position_BT: each token's place in its own document; None where all are of one.
            mask: bool (B or 1, 1, Q, T), True where a query may see a token; None where only causality masks.
        """
        tokens, device = exact[0].shape[2], exact[0].device
        if mask is None:
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
        if position_BT is None:
            position_BT = torch.arange(tokens, device=device)[None]
        reads = self.is_read_compressed(position_BT)[:, None]
        key, value = (torch.cat(pair, dim=2) for pair in zip(exact, compressed, strict=True))
        return key, value, torch.cat([mask & ~reads, mask & reads], dim=3)
