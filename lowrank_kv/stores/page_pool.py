"""A pool of equally large pages of coefficients, which stores take and give back.

A page has room for one granule (g consecutive coefficients) of N tokens. A tile of N tokens at rank r takes r / g pages,
wherever they lie: pages fit all ranks, and nothing is ever moved to make room.

Shapes: P pages, N tokens of a page, g coefficients of a granule, Y bytes of a granule's codes.
"""

import torch
from torch import Tensor

from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

# A tensor core multiplies 16 tokens or coefficients at once.
MIN_TOKENS = 16
MIN_GRANULE = 16


def least_granule(quantization: IntegerQuantization | None) -> int:
    """The smallest granule: 4-bit codes are two halves of one."""
    return 2 * MIN_GRANULE if quantization and quantization.bits == 4 else MIN_GRANULE


class PagePool:
    """Pages and the stack of those that are free, both on the device, so that a kernel can take pages by itself.

    One pool may serve keys and values of all layers whose stores have the same dtype and quantization.

    Args:
        pages: P, how many there are; all memory is allocated here, once.
        tokens: N, a power of two, at least 16; 64 for head dims above 128, where 128 rebuilt keys spill registers.
        granule: g, a power of two, at least 16 (32 where codes have 4 bits).
        dtype: in which coefficients are read, and stored unless quantized.
        device: where the pages live.
        quantization: how coefficients are stored as integers, with one scale for each token; None to store them in `dtype`.

    Raises:
        UserError: a size is not as stated above, or the quantization has a group size.
    """

    @torch.inference_mode(False)  # tensors made in that mode could not be written outside it
    def __init__(
        self,
        pages: int,
        *,
        tokens: int = 128,
        granule: int = 64,
        dtype: torch.dtype,
        device: torch.device,
        quantization: IntegerQuantization | None = None,
    ):
        least = least_granule(quantization)
        require(pages >= 1, "pages", pages, "at least 1")
        require(_is_power(tokens) and tokens >= MIN_TOKENS, "tokens", tokens, f"a power of two from {MIN_TOKENS} on")
        require(_is_power(granule) and granule >= least, "granule", granule, f"a power of two from {least} on")
        require(
            quantization is None or quantization.group_size is None,
            "group_size",
            quantization and quantization.group_size,
            "none where coefficients lie in pages: all of a token's share one scale",
        )
        self.tokens, self.granule, self.dtype, self.quantization = tokens, granule, dtype, quantization
        row = (granule, dtype) if quantization is None else (quantization.row_bytes(granule), torch.uint8)
        self.page_PNY = torch.zeros(pages, tokens, row[0], dtype=row[1], device=device)
        self.free_P = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device)
        self.free_count = torch.full((1,), pages, dtype=torch.int32, device=device)
        # A lower bound of `free_count`, without what is reserved: to read that number the host waits for the device.
        self._min_free = pages

    @property
    def pages(self) -> int:
        return self.page_PNY.shape[0]

    @property
    def bits(self) -> int:
        """Of a code; 16 where coefficients are held as they are."""
        return 16 if self.quantization is None else self.quantization.bits

    @property
    def device(self) -> torch.device:
        return self.page_PNY.device

    def reserve(self, count: int) -> None:
        """Make sure that `count` pages can be taken; waits for the device only if fewer may be free.

        All pages that stores of this pool may take before the next call are reserved at once: the device, once it is asked,
        says nothing of pages that have been reserved and not yet taken.

        Raises:
            UserError: fewer pages are free.
        """
        if self._min_free < count:
            self.check_free(count)
            self._min_free = int(self.free_count)
        self._min_free -= count

    def check_free(self, count: int, *, given_back: int = 0) -> None:
        """Raise :class:`UserError` unless `count` pages are free once `given_back` more are; waits for the device."""
        free = int(self.free_count) + given_back
        if free < count:
            raise UserError(
                f"`pages` (of a cache: `rate`) must be larger for so many tokens and sequences; {free} of {self.pages} are "
                f"free, and up to {count} are needed"
            )

    def take(self, count: int) -> Tensor:
        """`count` pages off the stack, (count,) int64; :meth:`reserve` has reserved them."""
        free = int(self.free_count)
        self.free_count -= count
        return self.free_P[free - count : free].long()

    def give_back(self, page_X: Tensor) -> None:
        """Put pages back on the stack."""
        free, count = int(self.free_count), page_X.numel()
        self.free_P[free : free + count] = page_X.flatten().to(torch.int32)
        self.free_count += count
        self._min_free = free + count

    def pack(self, code_XR: Tensor) -> Tensor:
        """Coefficients or codes (…, R), R a multiple of g, as they lie in pages, (…, R / g, Y)."""
        granule_XKG = code_XR.unflatten(-1, (-1, self.granule))
        return granule_XKG if self.quantization is None else self.quantization.pack(granule_XKG)

    def unpack(self, raw_XKY: Tensor, scale_X2: Tensor | None) -> Tensor:
        """Undo :meth:`pack`, (…, R), in the pool's dtype; scales (…, 2) are None unless the pool is quantized."""
        if self.quantization is None:
            return raw_XKY.flatten(-2)
        code_XR = self.quantization.unpack(raw_XKY, self.granule).flatten(-2)
        return (code_XR.float() * scale_X2[..., :1].float() + scale_X2[..., 1:].float()).to(self.dtype)


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
