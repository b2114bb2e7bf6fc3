"""DynaKV on an NVIDIA GPU: a cache of pages that Triton kernels fill and read. Needs Triton (the `kernels` extra)."""

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from dynakv.cache import DynaKVCache
from dynakv.model_compressors import compressors, forget_changed_matrices, settings_of
from lowrank_kv.codec import LayerCodec
from lowrank_kv.hf.cache.paged_layer import PagedLayer
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.ops.triton.availability import has_kernels
from lowrank_kv.stores.shared_page_pool import SharedPagePool
from lowrank_kv.utils.errors import UserError


class PagedDynaKVCache(DynaKVCache):
    """As :class:`DynaKVCache`, in memory that is taken once: `generate(past_key_values=PagedDynaKVCache.from_model(…))`."""

    def __init__(self, model: PreTrainedModel, codecs: dict[int, LayerCodec], pages: SharedPagePool):
        """
        Args:
            model: attached.
            codecs: layer index → its codec, for every compressed layer.
            pages: of all of them.
        """
        self.pages = pages
        first = min(codecs)
        layers = {index: PagedLayer(codec, pages, is_first=index == first) for index, codec in codecs.items()}
        super().__init__(model, layers)
        if self.history is not None:
            self.history.check_rotates_halves()

    @classmethod
    def from_model(cls, model: PreTrainedModel, *, max_length: int, rate: float = 0.4) -> "PagedDynaKVCache":
        """An empty cache for a model with compressors.

        Args:
            model: attached, with a `granularity` of 16 coefficients (32 in 4 bits) or a multiple.
            max_length: the most tokens a sequence will have, prompt and answer.
            rate: share of all coefficients that there is to be room for; the compressor's retain rate and some more.

        Raises:
            UserError: no compressors, no NVIDIA GPU or several, a granularity that fits no pages, or something that only an
                ordinary compressed cache serves: eviction, ranks that no gate chooses, odd head dims, a rotation other than
                that of halves.
        """
        settings = settings_of(model)
        weights = (tensor for layer in compressors(model).values() for tensor in layer.parameters())
        devices = {str(model.device), *(str(tensor.device) for tensor in weights)}
        refused = [
            (not has_kernels(model.device), f"a model on `{model.device}` (it needs an NVIDIA GPU and Triton)"),
            (
                len(devices) > 1,
                f"a model spread over {', '.join(sorted(devices))} (all layers share one device's pages)",
            ),
            (settings.eviction.is_on, f"`eviction.keep_ratio` {settings.eviction.keep_ratio} (1 keeps all tokens)"),
            (geometry_of(model).head_dim % 2 == 1, f"heads of {geometry_of(model).head_dim} dims, an odd number"),
            (not settings.has_gates, f"`rank_policy: {settings.rank_policy}`, whose tokens are no whole granules"),
        ]
        for is_wrong, what in refused:
            if is_wrong:
                raise UserError(f"a paged cache does not serve {what}; use DynaKVCache.from_model(model)")
        forget_changed_matrices(model)
        codecs = {index: layer.codec() for index, layer in compressors(model).items()}
        pages = SharedPagePool(
            max_length=max_length,
            rate=rate,
            stores=2 * len(codecs),
            granularity=settings.granularity,
            width=geometry_of(model).width,
            quantization=settings.quantization,
        )
        return cls(model, codecs, pages)

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors_by_kind()
        yield from self.pages.tensors_by_kind()
