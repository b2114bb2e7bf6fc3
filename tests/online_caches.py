"""Caches filled for tests of OjaKV, and what is in them."""

import torch

from ojakv import OjaKVCache, OjaKVConfig

PER_HEAD = {"layout": "per_head", "rope": "post", "ranks": "fraction"}


@torch.no_grad()
def filled(model, calibration, ids, prompt: int, step: int = 1, **settings) -> OjaKVCache:
    cache = OjaKVCache.from_model(model, OjaKVConfig(**{"rate": 0.5, **settings}), bases=calibration)
    for part in (ids[:, :prompt], *ids[:, prompt:].split(step, dim=1)):
        if part.shape[1]:
            model(part, past_key_values=cache)
    return cache


def full_rank_positions(cache, layer: int = 1, sequence: int = 0) -> list[int]:
    return cache.layers[layer].sequences[sequence].positions.full_rank.rows.tolist()
