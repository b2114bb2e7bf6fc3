"""Methods that forget tokens of a prompt: how to make caches of a model with each, and which tokens a cache still has."""

import torch
from methods import calibration_of, dynakv_model, planned_model, unpacked
from remembered import remembered

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.windowed.sequence import WindowedSequence
from ojakv import OjaKVCache, OjaKVConfig, make_plan


def eviction(keep: float) -> Eviction:
    return Eviction(keep_ratio=keep, window_size=4, kernel_size=1)


def make_dynakv(model, rate, keep):
    return dynakv_model(model, rate, eviction=eviction(keep))


def make_learned_plan(model, rate, keep):
    return planned_model(model, rate, token_classes=4, eviction=eviction(keep))


def make_preset(preset, **settings):
    def make(model, rate, keep):
        short = {"num_sink_tokens": 2, "recent_window": 3, "update_period": 4}
        config = OjaKVConfig.preset(preset, rate=rate, eviction=vars(eviction(keep)), **short, **settings)

        def make_one(twin):
            # Of few words where texts are to have directions of their own.
            words = 6 if config.own_directions and rate < 1 else None
            return make_plan(calibration_of(twin, read=config.has_plan, joint_layers=1, words=words), config)

        plan = remembered(model, (preset, *settings.values(), rate, keep), make_one)
        plan = unpacked(plan) if config.has_plan and rate == 1 else plan
        return lambda: OjaKVCache(model, plan)

    return make


MAKERS = {
    "dynakv": make_dynakv,
    "dynakv-tokenwise-plan": make_learned_plan,
    "ojakv-joint": make_preset("ojakv-joint"),
    "ojakv-joint-rebuilt": make_preset("ojakv-joint", attention="reconstructed"),
    "ojakv-joint-values-alone": make_preset("ojakv-joint", compress="values"),
    "ojakv-pf": make_preset("ojakv-pf"),
    "per-head-before-rotation": make_preset("ojakv-joint", layout="per_head"),
    "per-head-before-rotation-rebuilt": make_preset("ojakv-joint", layout="per_head", attention="reconstructed"),
    "adaptive-mixed": make_preset("adaptive-mixed", own_directions_from=8),
    # Layers that share rows cannot forget.
    "joint-mixed": make_preset("joint-mixed", joint_layers=1, own_directions_from=8),
}


def places_of(sequence) -> torch.Tensor:
    """Places of the tokens a sequence still has, (1 or P, N)."""
    position = sequence.positions.stored() if isinstance(sequence, WindowedSequence) else sequence.positions()
    return torch.atleast_2d(position).sort().values
