"""What decoding allocates, as the allocator sees it, and what the cache says it holds."""

from unittest.mock import Mock

import pytest
import torch
from methods import calibration_of, dynakv_model, tiny_model

import dynakv
from benchmarks.peak_memory import allocations
from lowrank_kv.stores import memory_report
from lowrank_kv.stores.growable_tensor import GROWTH
from lowrank_kv.stores.memory_report import BASES, BUFFERS, COEFFICIENTS, FULL_RANK, KINDS, SCALES
from ojakv import OjaKVCache, OjaKVConfig, make_plan

PROMPT, DECODED = 8192, 64
GROUPS, HEAD_DIM = 4, 64


def long_model():
    return tiny_model(
        hidden_size=GROUPS * HEAD_DIM, num_key_value_heads=GROUPS, max_position_embeddings=PROMPT + DECODED + 8
    )


def make_dynakv(model, cache_dtype):
    return dynakv_model(model, 0.4, cache_dtype=cache_dtype, granularity=32)


def make_online(preset):
    def make(model, cache_dtype):
        config = OjaKVConfig.preset(preset, rate=0.4, cache_dtype=cache_dtype)
        plan = make_plan(calibration_of(model, blocks=16), config)
        return lambda: OjaKVCache(model, plan)

    return make


MAKERS = {"dynakv": make_dynakv, "ojakv-joint": make_online("ojakv-joint"), "ojakv-pf": make_online("ojakv-pf")}


def peak_bytes(prepare, run) -> int:
    return allocations(prepare, run, torch.device("cpu"))[1]


def test_the_record_sees_allocations_and_what_is_freed():
    def replace(held):
        for _ in range(5):
            held[0] = held[0].clone()

    peak = peak_bytes(lambda: [torch.zeros(1_000_000)], replace)
    assert 4_000_000 <= peak < 4_100_000


@torch.no_grad()
@pytest.mark.parametrize("cache_dtype", ["model", "int4"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_full_width_copy_exists_while_decoding(make, cache_dtype):
    ids = torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    sizes = []

    def prepare():
        model = long_model()
        cache = make(model, cache_dtype)()
        model(ids, past_key_values=cache, logits_to_keep=1)
        sizes.append(cache.nbytes)
        return model, cache

    def decode(prepared):
        model, cache = prepared
        for step in range(DECODED):
            model(ids[:, step : step + 1], past_key_values=cache, logits_to_keep=1)
        assert cache.get_seq_length() == PROMPT + DECODED
        sizes.append(cache.nbytes)

    peak = peak_bytes(prepare, decode)
    before, after = sizes
    # What the cache itself gained stays alive; the rest is what a step needs for a moment.
    passing = peak - max(0, after - before)
    one_layer = 2 * PROMPT * GROUPS * HEAD_DIM * 4
    assert passing < one_layer, f"{passing:,} bytes for a moment; one layer at full width takes {one_layer:,}"


@torch.no_grad()
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_memory_adds_up_and_slack_is_bounded(make):
    model = long_model()
    cache = make(model, "model")()
    ids = torch.randint(1, 97, (2, 700), generator=torch.Generator().manual_seed(5))
    model(ids[:, :500], past_key_values=cache, logits_to_keep=1)
    for part in ids[:, 500:].split(1, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    memory = cache.memory()
    assert tuple(memory.kinds) == KINDS
    assert memory.total == sum(memory.kinds.values()) == cache.nbytes
    assert memory.full == 2 * 700 * 3 * 2 * GROUPS * HEAD_DIM * 4
    assert memory.rate == memory.total / memory.full
    assert memory.kinds[SCALES] == 0
    shown = {line[:18].strip(): line[18:].strip() for line in str(memory).splitlines()}
    assert shown["total"] == f"{memory.total:,}"
    assert shown["process, at peak"] == f"{memory.process_peak:,}"
    assert memory.process_peak > 50e6  # torch
    used = {COEFFICIENTS: 0}
    for layer in cache.compressed_layers():
        for sequence in layer.sequences:
            for side in (sequence.key, sequence.value):
                if hasattr(side, "buckets"):
                    used[COEFFICIENTS] += sum(coef.length * coef.rank * 4 for coef in side.buckets())
                else:
                    used[COEFFICIENTS] += side.coef.rows().numel() * 4
    assert used[COEFFICIENTS] <= memory.kinds[COEFFICIENTS] <= used[COEFFICIENTS] * (1 + GROWTH) + 4096
    if make is make_dynakv:
        assert memory.kinds[FULL_RANK] == memory.kinds[BUFFERS] == memory.kinds[BASES] == 0
    else:
        assert memory.kinds[BASES] > 0
        assert memory.kinds[BUFFERS] > 0


@torch.no_grad()
def test_memory_says_what_all_caches_share():
    """Bases, and their copies in the dtype of the rows, once however many layers, sequences and caches have them."""
    model = tiny_model()
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    plan = make_plan(calibration_of(model, read=True), OjaKVConfig.preset("joint-mixed", rate=0.3))
    one, other = OjaKVCache(model, plan), OjaKVCache(model, plan)
    assert one.memory().shared > 0
    for cache in (one, other):
        model(ids, past_key_values=cache)
    shared = one.memory().shared
    assert shared == other.memory().shared
    bases = [initial for kv in plan.layers.values() for initial in kv]
    matrices = sum(each.vectors_PWR.nbytes + each.decoder_PWR.nbytes for each in bases)
    directions = {id(each.shared.decoder_CW): each.shared.decoder_CW.nbytes for each in bases}
    assert matrices + sum(directions.values()) <= shared
    model(ids[:, :1], past_key_values=one)  # attention makes layouts of its own
    assert shared <= one.memory().shared <= 3 * shared
    shown = {line[:18].strip(): line[18:].strip() for line in str(one.memory()).splitlines()}
    assert shown["shared by caches"] == f"{one.memory().shared:,}"


@torch.no_grad()
def test_memory_says_what_a_compressor_holds():
    model = tiny_model()
    cache = dynakv_model(model, 0.4)()
    model(torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(5)), past_key_values=cache)
    weights = sum(each.nbytes for layer in dynakv.compressors(model).values() for each in layer.parameters())
    assert weights <= cache.memory().shared <= 4 * weights


def test_the_peak_is_that_of_all_gpus_with_parts_of_a_cache(monkeypatch):
    peaks = {torch.device("cuda", 0): 5, torch.device("cuda", 1): 7, torch.device("cpu"): 1000}
    monkeypatch.setattr(memory_report, "peak_memory", peaks.get)

    def peak_of(*devices):
        tensors = [(COEFFICIENTS, Mock(nbytes=1, device=torch.device(device))) for device in devices]
        return memory_report.MemoryReport.from_tensors(tensors, 9).process_peak

    assert peak_of("cuda:0", "cuda:1", "cuda:0", "cpu") == 12
    assert peak_of("cpu") == peak_of() == 1000
