"""Which tokens of a prompt are kept: SnapKV's choice, which can be combined with any compression of the kept tokens.

Shapes: H query heads, G KV heads, J = H/G, Q queries, W of the window, T tokens of the prompt, D head dim, P parts (1 where
all heads of a layer share their coefficients, G where each has its own), N rows of a store, M of the prompt.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.errors import UserError


@configuration
class Eviction:
    """Keep the tokens that the prompt's last queries look at, and forget the others (SnapKV; DynaKV section 5.2)."""

    keep_ratio: float = option(1.0, help="share of a prompt's tokens kept; 1 forgets none")
    window_size: int = option(
        32, help="last queries of the prompt, which choose; their own tokens are kept", unit="tokens"
    )
    kernel_size: int = option(
        7, help="neighbouring scores before the window of which each token takes the largest", unit="tokens"
    )

    def __post_init__(self):
        require(0 < self.keep_ratio <= 1, "keep_ratio", self.keep_ratio, "in (0, 1]; 0.2 keeps a fifth of a prompt")
        require(self.window_size >= 1, "window_size", self.window_size, "at least 1")
        require(
            self.kernel_size >= 1 and self.kernel_size % 2,
            "kernel_size",
            self.kernel_size,
            "odd, so that it is centred on its token",
        )

    @property
    def is_on(self) -> bool:
        return self.keep_ratio < 1

    @torch.no_grad()
    def scores(
        self, query_HQD: Tensor, key_GTD: Tensor, scaling: float, present_T: Tensor | None, *, parts: int
    ) -> Tensor:
        """How much the window's queries look at each token, (P, T) fp32; +inf for the window's own tokens, −inf for padding.

        Args:
            query_HQD: rotated queries up to the prompt's last one; at most the last W of them are used.
            key_GTD: rotated keys of the prompt's tokens.
            scaling: the model's score scale.
            present_T: False for padding, None where there is none.
            parts: 1 to sum over all heads, G to score each KV head separately.
        """
        tokens = key_GTD.shape[1]
        window = min(self.window_size, query_HQD.shape[1])
        groups = key_GTD.shape[0]
        query_GJWD = query_HQD[:, -window:].float().unflatten(0, (groups, -1))
        position_T = torch.arange(tokens, device=key_GTD.device)
        sees_WT = position_T <= position_T[-window:, None]
        if present_T is not None:
            sees_WT = sees_WT & present_T
        score_GT = key_GTD.new_zeros(groups, tokens, dtype=torch.float32)
        # One KV head at a time: the window's weights over a long prompt are much larger than their sums.
        for score_T, query_JWD, key_TD in zip(score_GT, query_GJWD, key_GTD, strict=True):
            weight_JWT = (query_JWD @ key_TD.float().T * scaling).masked_fill(~sees_WT, -torch.inf).softmax(dim=-1)
            score_T.copy_(weight_JWT.nan_to_num(0.0).sum(dim=(0, 1)))
        score_PT = score_GT.view(parts, -1, tokens).sum(dim=1)
        score_PT[:, -window:] = torch.inf
        if window < tokens:
            # Without the window's own scores, as SnapKV pools: being next to the window is no reason to keep a token.
            score_PT[:, :-window] = F.max_pool1d(score_PT[:, :-window], self.kernel_size, 1, self.kernel_size // 2)
        if present_T is not None:
            score_PT[:, ~present_T] = -torch.inf
        return score_PT

    def num_kept(self, tokens: int, *, beside: int = 0) -> int:
        """How many of a prompt's tokens are kept, at least those of the window.

        Args:
            tokens: those that may be evicted.
            beside: other tokens of the prompt, all of which are kept and count as kept.
        """
        wanted = max(self.window_size, round(self.keep_ratio * (tokens + beside)))
        return min(tokens, max(0, wanted - beside))

    def rows_kept(
        self, score_PT: Tensor, position_PN: Tensor, prompt: slice, *, beside: int = 0
    ) -> tuple[Tensor, int] | None:
        """Which rows of a store stay once a prompt's tokens with the least scores are forgotten.

        Args:
            score_PT: of the prompt's tokens, as :meth:`scores` gives them; −inf for padding.
            position_PN: each row's position in the text, rising, (1 or P, N) int64.
            prompt: positions of its tokens; none of these, and none after them, is evicted yet.
            beside: tokens of the prompt that are not in the store, all of which are kept.

        Returns:
            The rows that stay, rising, (P, ≤ N) int64, and the fewest tokens the sequence can then be cropped to: all up to
            the last one that any part forgets. None where all stay.
        """
        position_PN = position_PN.expand(len(score_PT), -1)
        first, end = (int((position_PN[0] < position).sum()) for position in (prompt.start, prompt.stop))
        score_PM = score_PT.gather(1, position_PN[:, first:end] - prompt.start)
        tokens = int((score_PM[0] > -torch.inf).sum())
        num_kept = self.num_kept(tokens, beside=beside)
        if num_kept == tokens:
            return None
        row_PN = torch.arange(position_PN.shape[1], device=score_PT.device).expand(len(score_PT), -1)
        kept_PN = top_scores(score_PM, num_kept) + first
        kept_PN = torch.cat([row_PN[:, :first], kept_PN, row_PN[:, end:]], dim=1)
        is_kept_PN = torch.zeros_like(position_PN, dtype=torch.bool).scatter_(1, kept_PN, True)
        last_forgotten = int(torch.nonzero(~is_kept_PN.all(dim=0)).max())
        return kept_PN, int(position_PN[0, last_forgotten]) + 1


def check_not_padded_right(mask_QT: Tensor) -> None:
    """Raise :class:`UserError` where padding stands behind text whose last queries are to choose tokens.

    Args:
        mask_QT: bool, True where a query of a call may see a token of its prompt.
    """
    present_T = mask_QT.any(dim=0)
    if bool(present_T.any()) and not bool(present_T[-1]):
        raise UserError(
            "a sequence is padded on the right, and the last tokens of its prompt choose which of its tokens are kept; pad "
            "on the left (`tokenizer.padding_side = 'left'`)"
        )


def top_scores(score_PT: Tensor, count: int) -> Tensor:
    """The indices of each row's `count` largest scores, rising, (P, count).

    Pooling makes equal scores, of which the first are chosen, whatever padding there is.
    """
    return score_PT.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def check_croppable(length: int, min_crop_length: int) -> None:
    """Raise :class:`UserError` for a crop into tokens some of which were evicted."""
    if length < min_crop_length:
        raise UserError(
            f"the cache cannot be cropped to {length} tokens: of the first {min_crop_length} some were evicted; read the "
            f"prompt again, or keep all of it (`eviction.keep_ratio: 1`)"
        )
