"""The pages that all layers of a cache share."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowrank_kv.stores.memory_report import COEFFICIENTS, POSITIONS
from lowrank_kv.stores.page_pool import PagePool, least_granule
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import number, whole_number

# Kernels rebuild keys a granule at a time; above this they gain nothing.
_MAX_GRANULE = 64


class SharedPagePool:
    """A pool of pages, allocated once, when the first layer learns the number of sequences, their dtype and their device.

    Args:
        max_length: the most tokens a sequence will have.
        rate: the share of all coefficients that fits in the pages.
        stores: how many stores will share the pages: keys and values of every layer.
        granularity: of the ranks.
        width: C, of every store.
        quantization: how coefficients are stored as integers; None to store them in the model's dtype.

    Attributes:
        appends_without_kernels: whether some store's rows are appended by torch. Then all are: a kernel takes pages that the
            first layer has reserved for a step, of which what torch takes would not be counted.

    Raises:
        UserError: a size is out of range, or ranks are not multiples of 16 coefficients (32 in 4 bits).
    """

    def __init__(
        self,
        *,
        max_length: int,
        rate: float,
        stores: int,
        granularity: int,
        width: int,
        quantization: IntegerQuantization | None,
    ):
        max_length, rate = whole_number("max_length", max_length), number("rate", rate)
        require(max_length >= 1, "max_length", max_length, "at least 1 token")
        require(
            quantization is None or quantization.group_size is None,
            "group_size",
            quantization and quantization.group_size,
            "null for a paged cache: all coefficients of a token share one scale",
        )
        require(0 < rate <= 1, "rate", rate, "in (0, 1]: the share of coefficients that there is to be room for")
        self.max_length, self.rate, self.stores, self.quantization = max_length, rate, stores, quantization
        least = least_granule(quantization)
        granule = _MAX_GRANULE
        while granule >= least and (granularity % granule or width % granule):
            granule //= 2
        if granule < least:
            raise UserError(
                f"`granularity` is {granularity} and the joint width {width}, but pages hold whole granules of {least} "
                f"coefficients or a power of two more; set `granularity` to a multiple of {least}, e.g. "
                f"dynakv.configure(model, granularity={least})"
            )
        self.width, self.granule, self.granules = width, granule, width // granule
        self.pool: PagePool | None = None
        self.appends_without_kernels = False
        self._made: list[PagedStore] = []

    def new_store(self, batch: int, dtype: torch.dtype, device: torch.device) -> PagedStore:
        """An empty store that takes its pages from here."""
        if self.pool is None:
            # Kernels of larger heads would spill with larger tiles. Of short sequences larger ones would be mostly empty.
            tokens = 64 if self.max_length >= 1024 else 16
            granules = self.granules
            tiles = -(-self.max_length // tokens)
            # Beside the room asked for, every rank may have a tile that is not full.
            pages = int(self.rate * tiles * granules) + 1 + granules * (granules + 1) // 2
            self.pool = PagePool(
                pages * batch * self.stores,
                tokens=tokens,
                granule=self.granule,
                dtype=dtype,
                device=device,
                quantization=self.quantization,
            )
        self._made.append(PagedStore(batch, self.width, capacity=self.max_length, pool=self.pool))
        return self._made[-1]

    def reserve_step(self, batch: int) -> None:
        """Reserve pages for one more token of each of `batch` sequences in all stores. The first layer asks for it in every
        step, so that a token that does not fit is refused before any layer has stored it.

        Raises:
            UserError: too few pages are free.
        """
        self.pool.reserve(self.stores * batch * self.granules)

    def check_select(self, index_B: Tensor) -> None:
        """Raise :class:`UserError` unless all stores, one after another, find pages for copies of the sequences at
        `index_B`; waits for the device."""
        pages_XB = torch.stack([store.pages_of_sequences() for store in self._made])
        more_X = pages_XB[:, index_B].sum(dim=1) - pages_XB.sum(dim=1)
        self.pool.check_free(int(more_X.cumsum(dim=0).max()))

    def release(self) -> None:
        """Give up the pages; stores made before hold no rows any more."""
        self.pool, self._made, self.appends_without_kernels = None, [], False

    def free_nbytes(self) -> int:
        """Bytes of the free pages; waits for the device."""
        return 0 if self.pool is None else int(self.pool.free_count) * self.pool.page_PNY[0].nbytes

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of the pages, free ones included, and of the stack of free pages."""
        if self.pool is not None:
            yield COEFFICIENTS, self.pool.page_PNY
            yield POSITIONS, self.pool.free_P
            yield POSITIONS, self.pool.free_count
