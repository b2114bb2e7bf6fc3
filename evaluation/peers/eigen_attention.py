"""EigenAttention: each head's keys and values in a basis of few dims (arXiv 2408.05646).

For models that rotate, the authors' code keeps low-rank keys of before the rotation, finds their basis without queries, and
rotates keys as they are rebuilt; queries keep their rank. For others keys and queries share a basis, in which attention is
computed (section 3).

The preset `eigen` is another thing: the baseline "Eigen-N" of the OjaKV paper, which compresses rotated keys.
"""

from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.rotary import Rotary
from ojakv import OjaKVCache, OjaKVConfig, make_plan

from .peer import MakeCache, TextLength, token_share


def eigen_maker(
    model: PreTrainedModel, calibration: Calibration, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches in which every token is compressed, and whose prompt attends to rebuilt states, too. One share of the dims of
    every layer, where the paper searches a threshold of energy for each."""
    settings = {"rope": "pre", "query_key": False} if Rotary.from_model(model) else {}
    config = OjaKVConfig.preset("eigen", **settings)
    rate = token_share(config, model, share, text)
    plan = make_plan(calibration, OjaKVConfig.preset("eigen", **settings, rate=min(rate, 1.0)))
    return lambda: OjaKVCache(model, plan)
