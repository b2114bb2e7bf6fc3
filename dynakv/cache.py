"""The cache of a DynaKV model: each token's keys and values at the rank its gate chose, or by a plan of bits."""

from collections.abc import Callable

from transformers import PreTrainedModel

from dynakv.model_compressors import compressors, forget_changed_matrices, initial_bases, settings_of
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.ragged_layer import RaggedLayer
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer, layers_of
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.hf.geometry import geometry_of


class DynaKVCache(LowRankCache):
    """A cache filled by the model's own compressors; `generate()` of an attached model makes one by itself.

    Where gates choose ranks it is ragged. Where a plan of bits is kept of every token, first and latest tokens stay at full
    rank (`exact_tokens`).
    """

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "DynaKVCache":
        return cls.maker(model)()

    @classmethod
    def maker(cls, model: PreTrainedModel) -> Callable[[], "DynaKVCache"]:
        """A maker of caches that keep to the compressors as they are set now, also once these are taken off the model."""
        layers, config = compressors(model), settings_of(model)
        forget_changed_matrices(model)
        if not config.has_plan:
            codecs = {index: layer.codec() for index, layer in layers.items()}
            return lambda: cls(model, {index: RaggedLayer(codec) for index, codec in codecs.items()})
        plan = Plan(config=config.windowed, geometry=geometry_of(model), layers=initial_bases(layers))
        return lambda: cls(model, layers_of(plan, WindowedLayer))
