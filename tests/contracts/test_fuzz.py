"""Random models, caches, prompts and masks: what is accepted equals the uncompressed model, and all else is a UserError
when the cache is made.

`make fuzz` tries 5,000 cases and tells how many were refused; continuous integration tries a slice of them.
"""

import os
import warnings
from collections import Counter

import pytest
import torch
from families import BY_NAME
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from methods import calibration_of
from tensors_held import found_tensors, reachable_tensors

import dynakv
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.utils.errors import UserError
from ojakv import PRESETS, OjaKVCache, OjaKVConfig

CASES = int(os.environ.get("FUZZ_CASES", "60"))
FUZZ = settings(
    settings.get_profile("default"),  # whose database of failures belongs to random cases
    max_examples=CASES,
    deadline=None,
    derandomize=CASES <= 60,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
# Relative to the root mean square of the logits. Tiny random models amplify a rounding a little.
ALLOWED = {torch.float32: 2e-3, torch.bfloat16: 0.6, torch.float16: 0.1}
_calibrations: dict = {}


@st.composite
def cases(draw):
    """One model with one cache, and the calls it gets."""
    batch = draw(st.integers(1, 3))
    calls = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 16, 17, 24]), min_size=1, max_size=7))
    return {
        "family": draw(st.sampled_from(sorted(BY_NAME))),
        "seed": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        "method": draw(st.sampled_from(["dynakv", *sorted(PRESETS)])),
        "rate": draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-9, 1e-3, 0.02, 0.3, 0.999, 1.5, -1.0, float("nan")])),
        "settings": draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "update_period": st.sampled_from([0, 1, 2, 7, 64]),
                    "num_sink_tokens": st.sampled_from([-1, 0, 1, 9, 300]),
                    "recent_window": st.sampled_from([0, 1, 5, 300]),
                    "min_length": st.sampled_from([0, 1, 40]),
                    "full_rank_ratio": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
                    "prefill": st.sampled_from(["exact", "reconstructed"]),
                    "attention": st.sampled_from(["low_rank", "reconstructed"]),
                },
            )
        ),
        "calls": calls,
        "ids": draw(st.lists(st.integers(0, 96), min_size=batch, max_size=batch)),
        "padding": draw(st.lists(st.integers(0, 30), min_size=batch, max_size=batch)),
        "outlier": draw(st.sampled_from([None, None, 30.0, 0.0])),
    }


def model_of(case):
    model = BY_NAME[case["family"]].model(case["seed"])
    if case["outlier"] is not None:  # one channel of the values far larger than the others, or of no variance
        for module in model.modules():
            if type(module).__name__.endswith("Attention") and hasattr(module, "v_proj"):
                module.v_proj.weight.data[0] *= case["outlier"]
    return model


def cache_of(case, model):
    if case["method"] == "dynakv":
        dynakv.add_compressors(model, dynakv.DynaKVConfig())
        for compressor in dynakv.token_compressors(model):
            torch.nn.init.orthogonal_(compressor.projection.weight)
        if case["rate"] == 1.0:
            dynakv.open_gates(model)
        else:
            for compressor in dynakv.token_compressors(model):
                compressor.gate.bias.data.fill_(case["rate"])
        dynakv.use_dynakv_cache(model)
        return dynakv.DynaKVCache.from_model(model)
    key = case["family"], case["seed"], case["outlier"]
    if key not in _calibrations:
        _calibrations[key] = calibration_of(model_of(case), 8, read=True)
    config = OjaKVConfig.preset(case["method"], rate=case["rate"], **case["settings"])
    return OjaKVCache.from_model(model, config, bases=_calibrations[key])


def calls_of(case):
    """(token ids, mask so far) of each call; the padding of a sequence is never all of its first call."""
    total = sum(case["calls"])
    generator = torch.Generator().manual_seed(case["ids"][0])
    ids = torch.randint(1, 97, (len(case["ids"]), total), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(case["padding"]):
        mask[row, : min(padding, case["calls"][0] - 1)] = 0
    ids = ids * mask
    return ids, mask


@torch.no_grad()
def read(model, case, cache=None):
    ids, mask = calls_of(case)
    logits, seen = [], 0
    for part in ids.split(case["calls"], dim=1):
        seen += part.shape[1]
        output = model(part, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1).float(), mask.bool()


def is_exact(case) -> bool:
    """Whether nothing is dropped or rounded: such a cache must say what the uncompressed model says."""
    if case["rate"] != 1.0:
        return False
    if case["method"] == "dynakv":
        return True
    config = OjaKVConfig.preset(case["method"], rate=1.0, **case["settings"])
    return config.cache_dtype == "model" and not config.eviction.is_on and config.ranks != "energy"


@pytest.fixture
def outcomes():
    """How many cases ended in which way. Were all of them refused, or none exact, the test would say little."""
    found = Counter()
    yield found
    assert all(found[outcome] >= CASES // 30 for outcome in ("refused", "exact", "compressed")), found


@FUZZ
@given(case=cases())
def test_random_cases(outcomes, case):
    def ended(outcome):
        event(outcome)
        outcomes[outcome] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(case).to(case["dtype"])
        stock, shown = read(model, case)
        try:
            cache = cache_of(case, model)
        except UserError:  # settings are refused here; no text is, once there is a cache
            ended("refused")
            return
        found, _ = read(model, case, cache)
    assert bool(found[shown].isfinite().all()), "finite where the model is"
    assert cache.get_seq_length() == sum(case["calls"])
    if is_exact(case):
        scale = stock[shown].square().mean().sqrt()
        assert float((found - stock)[shown].abs().max() / scale) < ALLOWED[case["dtype"]]
    storages = [tensor.untyped_storage() for _, tensor in cache.tensors_by_kind()]
    others = [layer for layer in cache.layers if not isinstance(layer, CompressedLayer)]
    others += [getattr(layer, "_encoder", None) for layer in cache.layers]  # a compressor's weights
    counted = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert found_tensors(cache) - reachable_tensors(others) <= counted.keys(), "every tensor is counted"
    assert cache.nbytes == sum(counted.values())
    cache.reset()
    assert cache.get_seq_length() == 0
    ended("exact" if is_exact(case) else "compressed")
