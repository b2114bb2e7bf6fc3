"""What torch makes by default, of which dtype and where, changes nothing about a compressed cache."""

import contextlib
import dataclasses

import pytest
import torch
from even_levels import LEVELS
from methods import METHODS, calibration_of, planned_model, tiny_model
from safetensors import safe_open

import dynakv
import lowrank_kv
from lowrank_kv.bases.bit_allocation import allocate_bits, next_saving
from lowrank_kv.bases.codebooks import lloyd_max
from lowrank_kv.bases.rank_allocation import falling_means
from lowrank_kv.hf.cache import shared_marks
from lowrank_kv.ops.arena_append.tables import PlannedTables
from lowrank_kv.stores.bit_plan import BitPlan
from ojakv import OjaKVCache, OjaKVConfig

IDS = torch.randint(1, 97, (2, 80), generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


PARTS = IDS.split([60, 1, 1, 18], dim=1)
OTHERS = pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")], ids=str
)


@OTHERS
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@torch.no_grad()
def test_logits_are_the_same_under_other_defaults(method, dtype, device):
    """On the meta device nothing can be read: a tensor that forgot its place raises, or compiled code reads nowhere."""

    def logits(model, make_cache) -> list[torch.Tensor]:
        cache = make_cache()
        calls = [model(part, past_key_values=cache).logits for part in IDS.split([60, 10, 1, 1, 8], dim=1)]
        cache.crop(-5)
        cache.batch_repeat_interleave(2)
        return [*calls, model(IDS[:, :1].repeat_interleave(2, dim=0), past_key_values=cache).logits]

    models = [tiny_model(), tiny_model()]  # what is made at the first call, is made under the other defaults, too
    make_caches = [method.build(model, 0.4) for model in models]
    expected = logits(models[0], make_caches[0])
    with defaults(dtype, device):
        found = logits(models[1], make_caches[1])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@OTHERS
@torch.no_grad()
def test_a_sketch_that_has_seen_too_few_directions_is_filled_up_the_same(dtype, device):
    bases = calibration_of(tiny_model())
    settings = {"prior_tokens": 0.0, "update_period": 4, "num_sink_tokens": 0, "recent_window": 0}

    def logits(model):
        cache = OjaKVCache.from_model(model, OjaKVConfig.preset("subspace-a", **settings), bases=bases)
        found = [model(part, past_key_values=cache).logits for part in IDS[:1, :20].split([6, *[1] * 14], dim=1)]
        return torch.cat(found, dim=1)

    expected = logits(tiny_model())
    model = tiny_model()
    with defaults(dtype, device):
        found = logits(model)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@OTHERS
@pytest.mark.parametrize("preset", ["adaptive-mixed", "joint-mixed", "static-joint-pf", "ojakv-joint"])
@torch.no_grad()
def test_a_model_that_is_compressed_under_them_is_the_same(preset, dtype, device):
    bases = calibration_of(tiny_model(), read=True)

    def logits(model):
        lowrank_kv.compress(model, preset, rate=0.4, bases=bases)
        output = model(IDS, use_cache=True)
        return model(IDS[:, :1], past_key_values=output.past_key_values).logits

    models = [tiny_model(), tiny_model()]
    expected = logits(models[0])
    with defaults(dtype, device):
        found = logits(models[1])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@OTHERS
@pytest.mark.parametrize("preset", ["adaptive-mixed", "joint-mixed", "static-joint-pf", "ojakv-joint"])
@torch.no_grad()
def test_a_cache_is_saved_and_loaded_the_same(preset, dtype, device, tmp_path):
    """The marks of shared bases are found anew, as in a process whose first file is written under these defaults."""
    model = tiny_model()
    lowrank_kv.compress(model, preset, rate=0.4, bases=calibration_of(model, read=True))
    cache = model(IDS, use_cache=True).past_key_values
    shared_marks._sample.cache_clear()
    with defaults(dtype, device):
        lowrank_kv.save_cache(model, cache, tmp_path / "under")
        loaded = [lowrank_kv.load_cache(model, tmp_path / "under")]
    lowrank_kv.save_cache(model, cache, tmp_path / "plain")
    under, plain = (safe_open(tmp_path / name, framework="pt") for name in ("under", "plain"))
    assert under.metadata() == plain.metadata()
    cache_names = set(under.keys()) | set(plain.keys())
    assert all(torch.equal(under.get_tensor(name), plain.get_tensor(name)) for name in cache_names)
    loaded.append(lowrank_kv.load_cache(model, tmp_path / "under"))
    expected = model(IDS[:, :1], past_key_values=cache).logits
    for each in loaded:
        assert torch.equal(model(IDS[:, :1], past_key_values=each).logits, expected)


@OTHERS
@torch.no_grad()
def test_sequences_are_picked_by_lists_and_tensors(dtype, device):
    model = tiny_model()
    make_cache = METHODS[0].build(model, 0.4)
    for index in ([1, 0, 1], [False, True], torch.tensor([-1]), slice(1, 2)):
        caches = make_cache(), make_cache()
        for cache in caches:
            model(IDS, past_key_values=cache)
        caches[0].batch_select_indices(index)
        with defaults(dtype, device):
            caches[1].batch_select_indices(index)
        ids = IDS[:1, :1].expand(caches[0].batch_size, -1)
        assert torch.equal(*(model(ids, past_key_values=cache).logits for cache in caches))


@OTHERS
@torch.no_grad()
def test_a_compressor_is_exported_and_attached_the_same(dtype, device, tmp_path):
    model = tiny_model()
    planned_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "trained")
    dynakv.export_compressor(tmp_path / "trained", tmp_path / "plain")
    with defaults(dtype, device):
        dynakv.export_compressor(tmp_path / "trained", tmp_path / "under")

    def logits(name, under):
        model = tiny_model()
        with under:
            dynakv.attach(model, tmp_path / name)
        output = model(IDS, use_cache=True)
        return model(IDS[:, :1], past_key_values=output.past_key_values).logits

    expected = logits("plain", contextlib.nullcontext())
    for name, under in (("plain", defaults(dtype, device)), ("under", contextlib.nullcontext())):
        torch.testing.assert_close(logits(name, under), expected, atol=1e-6, rtol=0)


@OTHERS
def test_tables_of_a_server_s_pages_are_made_the_same(dtype, device):
    plan = BitPlan((16, 8, 4, 4, 2), LEVELS)
    expected = PlannedTables.of(plan, torch.device("cpu"))
    with defaults(dtype, device):
        found = PlannedTables.of(plan, torch.device("cpu"))
    for field in dataclasses.fields(expected):
        one, other = (getattr(each, field.name) for each in (found, expected))
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@OTHERS
def test_bits_and_levels_are_allocated_the_same(dtype, device):
    importances = [torch.linspace(9, 1, 12), torch.linspace(4, 0.5, 7)]
    sample_N = torch.randn(500, generator=torch.Generator().manual_seed(0))
    distortions = {2: 0.12, 4: 0.01, 8: 1e-4}

    def found() -> list:
        widths = allocate_bits(importances, distortions, 6.5, overhead=8, shares=[0.75, 0.5], rebuild_costs=[1.0, 0.0])
        saving = next_saving(importances, distortions, widths)
        return [widths, saving, lloyd_max(sample_N, 3).tolist(), falling_means(importances[0].flip(0)).tolist()]

    expected = found()
    with defaults(dtype, device):
        assert found() == expected


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_prompt_in_inference_mode_goes_on_outside_it(method):
    """With gradients on, which are then of no use: the same cache, and a new one that shares what the first has made."""
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    first, alone, other = make_cache(), make_cache(), make_cache()
    with torch.no_grad():
        expected = [model(part, past_key_values=alone).logits for part in PARTS]
    with torch.inference_mode():
        found = [model(PARTS[0], past_key_values=first).logits]
    found += [model(part, past_key_values=first).logits for part in PARTS[1:]]
    again = [model(part, past_key_values=other).logits for part in PARTS]
    for logits in (found, again):
        for one, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(one.detach().clone(), wanted, atol=1e-4, rtol=0)
