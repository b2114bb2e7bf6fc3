"""The OjaKV cache that stock `generate()` drives."""

from pathlib import Path

from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.attention import has_compressors
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import Side, WindowedLayer, layers_of
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.hf.geometry import geometry_of, model_within
from lowrank_kv.hf.prepare import restore
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.budget import Budget
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import check_type, whole_number
from ojakv.config import OjaKVConfig
from ojakv.model_plan import EXPECTED_TOKENS, plan_for_model
from ojakv.online_store import OnlineStore, new_store


class OjaKVLayer(WindowedLayer):
    """One layer whose bases follow each sequence (OjaKV, Algorithm 1)."""

    def new_store(self, initial: InitialBasis, side: Side) -> TokenStore:
        return new_store(initial, self.config, **self.store_settings(side))


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model the stock one that it was before a cache or a calibration was made with it; its caches serve no longer.

    A wrapper of the model serves as well (:func:`lowrank_kv.hf.geometry.model_within`). Returns what it was given.

    Raises:
        UserError: it has a DynaKV compressor, which `dynakv.detach` takes off.
    """
    if has_compressors(model_within(model)):
        raise UserError("the model has a DynaKV compressor; call dynakv.detach(model), which undoes everything")
    restore(model)
    return model


class OjaKVCache(LowRankCache):
    """Low-rank keys and values whose bases follow the text.

    ``model.generate(**inputs, past_key_values=OjaKVCache.from_model(model, config, bases=DIR))``
    """

    def __init__(self, model: PreTrainedModel, plan: Plan):
        """
        Args:
            model: the model to serve.
            plan: from :func:`ojakv.make_plan`; caches may share it.
        """
        how = "a plan: of make_plan(calibration, config), or call OjaKVCache.from_model(model, config, bases=DIR)"
        check_type("plan", plan, Plan, how)
        geometry_of(model).check_equal(plan.geometry, "the plan")
        super().__init__(model, layers_of(plan, OjaKVLayer))

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        config: OjaKVConfig,
        *,
        bases: str | Path | Calibration,
        self_check: bool = True,
        budget: str | Budget | None = None,
        expected_tokens: int = EXPECTED_TOKENS,
    ) -> "OjaKVCache":
        """An empty cache for `model`.

        Args:
            config: the settings; see :meth:`OjaKVConfig.preset`.
            bases: a calibration of this model, or the directory to which `lowrank-kv calibrate` wrote it.
            self_check: first compare the model with a full-rank compressed cache to the model by itself, once for each
                model; see :func:`lowrank_kv.hf.self_check.check_by_itself`.
            budget: the bytes that the cache may take, such as ``2 GiB/131072 tokens`` or ``4096 B/token``, in place of the
                settings' rate (:meth:`lowrank_kv.utils.budget.Budget.parse`).
            expected_tokens: how long sequences are at least. Where a sequence's own bases take more bytes than they save at
                that length, a warning says from which length on they pay.

        Raises:
            UserError: the calibration is missing or damaged, its model has another shape, no rate keeps within the
                budget, or the model does not pass the check.
        """
        expected_tokens = whole_number("expected_tokens", expected_tokens)
        require(expected_tokens >= 1, "expected_tokens", expected_tokens, "at least 1")
        plan = plan_for_model(model, config, bases, budget=budget, expected_tokens=expected_tokens, stacklevel=3)
        if self_check:
            check_by_itself(model)
        return cls(model, plan)

    @property
    def updates(self) -> int:
        """Basis updates so far, over all layers, sequences, keys and values."""
        return sum(store.updates for store in self._stores())

    @property
    def refused_updates(self) -> int:
        """Steps left out because even a small share of them would have lost more than ``max_loss``, or moved stored rows
        further than ``max_drift``. A step that turns integer coefficients rounds them again, which counts, too."""
        return sum(store.guard.num_refused for store in self._stores())

    @property
    def kept_energy(self) -> float:
        """Mean share of the stored rows' energy that still points where it did after all updates; 1.0 when nothing moved.

        Each update takes at most ``max_loss`` of it, of integers as far as their rounding was foreseen. How far the rows
        have moved altogether is :attr:`drift`.
        """
        kept = [store.guard.kept_energy for store in self._stores()]
        return sum(kept) / len(kept) if kept else 1.0

    @property
    def drift(self) -> float:
        """A bound on how far updates have moved stored rows, ‖now − when stored‖ / ‖now‖ over the rows of one layer's keys
        or values of one sequence, the largest of all; 0.0 when nothing has moved. It is at most ``max_drift``, unless crops
        and evictions have taken rows away since, or integers were rounded more than was foreseen."""
        return max((store.drift() for store in self._stores()), default=0.0)

    def _stores(self) -> list[OnlineStore]:
        return [
            store
            for layer in self.compressed_layers()
            for sequence in layer.sequences
            for store in (sequence.key, sequence.value)
            if isinstance(store, OnlineStore)
        ]
