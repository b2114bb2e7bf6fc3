"""EigenAttention: each head's rotated keys and queries share a basis, in which attention is computed (arXiv 2408.05646)."""

import dataclasses

from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from ojakv import OjaKVCache, OjaKVConfig, make_plan

from .peer import MakeCache, TextLength, token_share


def eigen_maker(
    model: PreTrainedModel, calibration: Calibration, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches of the preset `eigen`: every token is compressed, and the prompt attends to rebuilt states, too. One share of
    the dims of every layer, where the paper searches a threshold of energy for each."""
    config = OjaKVConfig.preset("eigen")
    rate = token_share(config, calibration.geometry, share, text, itemsize=model.dtype.itemsize)
    plan = make_plan(calibration, dataclasses.replace(config, rate=min(rate, 1.0)))
    return lambda: OjaKVCache(model, plan)
