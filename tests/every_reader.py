"""Makers of caches of every peer and preset."""

from evaluation.methods import MethodConfig
from evaluation.peers import PEERS
from evaluation.reading import full_cache
from ojakv import PRESETS, OjaKVCache, make_plan


def makers_of(model, calibration):
    """Maker, and whether it is said to read prompts exactly, of each peer and preset."""
    yield "full", lambda: full_cache(model), True
    for name, peer in PEERS.items():
        yield name, peer.maker(model, calibration, None if peer.is_fixed else 0.7), peer.reads_exactly
    for name in PRESETS:
        config = MethodConfig(preset=name, rates=[1.0])
        plan = make_plan(calibration, config.ojakv_config(rate=1.0))
        yield name, lambda plan=plan: OjaKVCache(model, plan), config.reads_exactly
