"""A control of gates: the same compressor with nothing dropped, alone and as a row of a comparison."""

import pytest
import torch
from methods import dynakv_model, planned_model, tiny_model

import dynakv
from evaluation.compare import CompareConfig, compare
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mask": "soft_prefix"},
        {"decoder": "orthogonal"},
        {"rank_policy": "nested"},
        {"rank_policy": "soft_threshold"},
    ],
    ids=str,
)
def test_open_gates_of_a_checkpoint_are_those_of_the_function(ids, tmp_path, settings):
    trained = tiny_model()
    dynakv_model(trained, 0.4 if "rank_policy" not in settings else 1, granularity=4, **settings)
    for compressor in dynakv.token_compressors(trained):
        if settings.get("rank_policy") == "nested":
            compressor.gate.rank.fill_(4)
        elif "rank_policy" in settings:
            compressor.gate.fix(4)
    dynakv.save_compressor(trained, tmp_path / "c")
    model, expected = tiny_model(), dynakv.attach(tiny_model(), tmp_path / "c")
    stock = model(ids).logits
    assert float((expected(ids).logits - stock).abs().max()) > 1e-3, "something is dropped"
    dynakv.open_gates(expected)
    dynakv.attach(model, tmp_path / "c", open_gates=True)
    cache = dynakv.DynaKVCache.from_model(model)
    logits = model(ids, past_key_values=cache).logits
    assert torch.equal(logits, expected(ids).logits)
    torch.testing.assert_close(logits, stock, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_low_threshold_opens_no_gates(ids, tmp_path):
    """A mask that falls below the least number there is keeps its coefficient out at any threshold."""
    trained = tiny_model()
    dynakv_model(trained, 0.4)
    for compressor in dynakv.token_compressors(trained):
        compressor.gate.bias[-1] += 400.0
    dynakv.save_compressor(trained, tmp_path / "c")
    with pytest.raises(UserError, match="`threshold` must be between 0 and 1"):
        dynakv.attach(tiny_model(), tmp_path / "c", threshold=0)
    for settings, is_full in (({"threshold": 1e-30}, False), ({"open_gates": True}, True)):
        model = dynakv.attach(tiny_model(), tmp_path / "c", **settings)
        compressor = dynakv.token_compressors(model)[0]
        coef = torch.randn(1, 3, compressor.width)
        rank = compressor.gate.keep(coef, compressor.config.threshold, compressor.config.granularity)
        assert bool((rank == compressor.width).all()) == is_full


def test_a_plan_has_no_gates_to_open(tmp_path):
    trained = tiny_model()
    planned_model(trained, 0.3)
    dynakv.save_compressor(trained, tmp_path / "c")
    model = tiny_model()
    with pytest.raises(UserError, match="`open_gates` must be left out of a plan of bits"):
        dynakv.attach(model, tmp_path / "c", open_gates=True)
    assert not dynakv.is_attached(model)
    with pytest.raises(UserError, match="`open_gates` .*true or false"):
        dynakv.attach(model, tmp_path / "c", open_gates="yes")


def test_settings_that_open_gates_leave_without_an_effect_are_refused(tmp_path):
    trained = tiny_model()
    dynakv_model(trained, 0.4)
    dynakv.save_compressor(trained, tmp_path / "c")
    for key, value in {"threshold": 0.3, "granularity": 16, "mask": "hard"}.items():
        with pytest.raises(UserError, match=f"`{key}` must be left out with `open_gates`, which keeps everything"):
            dynakv.attach(tiny_model(), tmp_path / "c", open_gates=True, **{key: value})


def test_a_row_with_open_gates_is_the_full_cache(tiny_dir, checkpoint, text_file, tmp_path):
    values = {
        "model": str(tiny_dir),
        "dtype": "float32",
        "texts": [{"label": "same", "name": str(text_file)}],
        "methods": [
            {"checkpoint": str(checkpoint), "label": "learned"},
            {"checkpoint": str(checkpoint), "label": "open", "settings": {"open_gates": True}},
        ],
        "prefix": 64,
        "length": 100,
        "windows": 2,
    }
    (tmp_path / "run").mkdir()
    *_, make_record = compare(build(CompareConfig, values), tmp_path / "run")
    rows = {row["method"]: row for row in make_record()["rows"]}
    assert rows["open"]["perplexity_ratio"] == pytest.approx(1, abs=1e-5)
    assert rows["open"]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows["learned"]["kl"] > 1e-3
    assert rows["learned"]["rate"] < 1 <= rows["open"]["rate"]
