"""Long decoding on a tiny model: nothing grows but the cache, with tokens where they belong. LONG_TOKENS: how many."""

import os
from pathlib import Path

import pytest
import torch
from methods import METHODS, tiny_model
from transformers import DynamicCache

TOKENS = int(os.environ.get("LONG_TOKENS", "1500"))
PICKED = [method for method in METHODS if method.name in ("dynakv", "ojakv-joint", "static-pca-joint")]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(900 + TOKENS // 5)
@pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
@torch.no_grad()
def test_bytes_are_linear_and_the_last_token_is_right(method):
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=TOKENS + 8)
    ids = torch.randint(1, 97, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    stock = DynamicCache(config=model.config)
    dense = [model(part, past_key_values=stock, use_cache=True).logits[0, -1] for part in ids.split(512, dim=1)]
    make_cache = method.build(model, 1.0)
    cache, sizes = make_cache(), []
    half = TOKENS // 2
    for t in range(TOKENS):
        logits = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        if t + 1 in (half, TOKENS):
            sizes.append((cache.nbytes, resident()))
    (first, taken), (second, taken_at_end) = sizes
    assert cache.get_seq_length() == TOKENS
    # Tensors have room to grow: of a doubled length less than three times as much.
    assert 1.2 < second / first < 3
    assert taken_at_end - taken < 3 * (second - first) + (64 << 20), "what is not the cache's is a leak"
    assert float((logits[0, -1] - dense[-1]).abs().max()) < 1e-3
    for layer in cache.compressed_layers():
        for sequence in layer.sequences:
            for store in (sequence.key, sequence.value):
                basis_PWR = getattr(store, "basis_PWR", None)
                if basis_PWR is not None:
                    unit = torch.eye(basis_PWR.shape[2])
                    assert float((basis_PWR.mT @ basis_PWR - unit).abs().max()) < 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_many_caches_made_and_dropped_leave_nothing():
    model = tiny_model()
    make_cache = next(method for method in METHODS if method.name == "dynakv").build(model, 0.5)
    ids = torch.randint(1, 97, (1, 20))
    count = max(100, TOKENS // 10)
    for number in range(count):
        model(ids, past_key_values=make_cache(), use_cache=True)
        if number == count // 10:
            before = resident()
    assert resident() - before < 48 << 20
