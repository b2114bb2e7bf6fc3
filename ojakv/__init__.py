"""OjaKV: online low-rank bases for the key–value cache, and every fixed or sketched basis it is compared with."""

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.hf.compile_decoding import compile_decoding
from ojakv.basis_plan import make_plan
from ojakv.byte_budget import plan_for_budget, plan_for_bytes
from ojakv.cache import OjaKVCache, detach
from ojakv.config import PRESETS, OjaKVConfig
from ojakv.planned_bytes import break_even_tokens

__all__ = [
    "PRESETS",
    "Calibration",
    "OjaKVCache",
    "OjaKVConfig",
    "Plan",
    "break_even_tokens",
    "compile_decoding",
    "detach",
    "make_plan",
    "plan_for_budget",
    "plan_for_bytes",
]
