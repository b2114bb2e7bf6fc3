"""OjaKV: online low-rank bases for the key–value cache, and every fixed or sketched basis it is compared with."""

from lowrank.hf.calibration_store import Calibration
from lowrank.hf.compile_decoding import compile_decoding
from ojakv.budget import plan_for_bytes
from ojakv.cache import OjaKVCache
from ojakv.config import PRESETS, OjaKVConfig
from ojakv.plan import Plan, make_plan

__all__ = [
    "PRESETS",
    "Calibration",
    "OjaKVCache",
    "OjaKVConfig",
    "Plan",
    "compile_decoding",
    "make_plan",
    "plan_for_bytes",
]
