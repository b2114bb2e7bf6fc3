"""What an OjaKV cache is refused for, and how the message says so; and states it must not trip over."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from methods import tiny_model

import dynakv
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan, plan_for_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1.5}, r"`rate` must be in \(0, 1\]"),
        ({"layout": "joint", "query_key": True}, "`query_key` must be false with layout joint"),
        ({"full_rank_ratio": -0.1}, r"`full_rank_ratio` must be in \[0, 1\]"),
        ({"full_rank_ratio": 0.1, "compress": "values"}, "`full_rank_ratio` must be 0 with `compress: values`"),
        ({"update_period": 0}, "`update_period` must be at least 1"),
        ({"score_pool": 4}, "`score_pool` must be odd"),
        ({"lerning_rate": 0.1}, "did you mean `learning_rate`"),
        ({"tracker": "kalman"}, "`tracker` must be one of fixed, oja, frequent_directions"),
        ({"update_window": 0}, "`update_window` must be at least 1, or null for all"),
        ({"max_loss": 1.5}, r"`max_loss` must be in \[0, 1\]; .*; got 1.5"),
        ({"max_loss": -0.1}, r"`max_loss` must be in \[0, 1\]"),
        ({"token_classes": 4}, "`cache_dtype` must be mixed with `token_classes: 4`.* leave it out.*; got 'model'"),
        ({"rebuild_cost": 2}, "`rebuild_cost` must be 0 with `cache_dtype: model`.*; got 2"),
        ({"rebuild_cost": -1}, "`rebuild_cost` must be zero or positive; got -1"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        OjaKVConfig.preset("ojakv-joint", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill": "exakt"}, "`prefill` must be one of exact, reconstructed; got 'exakt' in OjaKVConfig"),
        ({"compress": "key"}, "`compress` must be one of both, keys, values"),
        ({"cache_dtype": "int3"}, "`cache_dtype` must be one of model, int8, int4"),
        ({"rate": "half"}, "`rate` must be a number, got 'half'"),
        ({"update_period": 2.5}, "`update_period` must be of type int, got 2.5"),
        ({"eviction": 0.3}, "`eviction` must be a section with keys, got 0.3"),
        ({"eviction": {"share": 0.3}}, "unknown key `eviction.share`"),
    ],
)
def test_settings_made_by_hand_are_checked_like_those_of_a_file(settings, message):
    with pytest.raises(UserError, match=message):
        OjaKVConfig(**settings)


def test_settings_made_by_hand_take_what_a_file_would():
    with pytest.raises(UserError, match=r"`eviction.keep_ratio` \(in Python `eviction=\{'keep_ratio': …\}`\)"):
        OjaKVConfig.preset("adaptive-mixed", keep_ratio=0.3)
    config = OjaKVConfig(rate=1, eviction={"keep_ratio": 0.3})
    assert (type(config.rate), config.eviction.keep_ratio) == (float, 0.3)


def test_an_unknown_preset_is_named():
    with pytest.raises(UserError, match="unknown preset `ojakv_pf`; did you mean `ojakv-pf`"):
        OjaKVConfig.preset("ojakv_pf")


def test_a_cache_is_made_of_a_plan():
    with pytest.raises(UserError, match=r"`plan` must be a plan.*or call OjaKVCache.from_model.*; got 'OjaKVConfig'"):
        OjaKVCache(tiny_model(), OjaKVConfig.preset("ojakv-joint"))


def test_bases_of_another_model_are_refused(calibration):
    other = tiny_model(num_key_value_heads=4)
    with pytest.raises(
        UserError, match="3 compressed layers of 2 KV heads × 16 dims, but this model has .* 4 KV heads"
    ):
        OjaKVCache.from_model(other, OjaKVConfig(), bases=calibration)


@torch.no_grad()
def test_a_saved_calibration_gives_the_same_cache(model, calibration, ids, tmp_path):
    digest = calibration.save(tmp_path / "bases", model="tiny", text=["random"])
    assert json.loads((tmp_path / "bases/config.json").read_text())["sha256"] == digest
    logits = []
    for bases in (calibration, tmp_path / "bases"):
        cache = OjaKVCache.from_model(model, OjaKVConfig(rate=0.4), bases=bases)
        model(ids[:, :100], past_key_values=cache)
        logits.append(model(ids[:, 100:101], past_key_values=cache).logits)
    assert torch.equal(*logits)


def rewrite_as(path: Path, encoding: str) -> None:
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "is no calibration: it has no `config.json`; make one with"),
        (shutil.rmtree, "is no calibration: there is no such directory; make one with"),
        (lambda path: (path / "config.json").write_text("{}"), "names no `format: lowrank-kv calibration`"),
        (lambda path: (path / "moments.safetensors").unlink(), "it has no `moments.safetensors`; make one with"),
        (lambda path: rewrite_as(path / "config.json", "utf-16"), "is no calibration .* make one with"),
        (
            lambda path: (path / "moments.safetensors").write_bytes((path / "moments.safetensors").read_bytes()[:-9]),
            "is damaged: its SHA-256 is not the recorded one",
        ),
        (
            lambda path: (path / "config.json").write_text('{"format": "lowrank-kv calibration", "model": "tiny"}'),
            "is damaged: it has no `geometry`",
        ),
    ],
    ids=["missing", "gone", "foreign", "a model's", "of another encoding", "truncated", "incomplete"],
)
def test_damaged_calibrations_are_refused(model, calibration, tmp_path, damage, message):
    calibration.save(tmp_path / "bases", model="tiny", text=["random"])
    damage(tmp_path / "bases")
    with pytest.raises(UserError, match=message):
        OjaKVCache.from_model(model, OjaKVConfig(), bases=tmp_path / "bases")


def test_bases_of_another_model_of_the_same_shape_are_noticed(calibration, tmp_path, recwarn):
    """By their names where their weights cannot be compared, as of a model in other numbers."""
    model = tiny_model().double()
    calibration.save(tmp_path / "bases", model="some/tiny-llama", text=["random"])
    for name in ("", "/elsewhere/tiny-llama"):
        model.config._name_or_path = name
        OjaKVCache.from_model(model, OjaKVConfig(), bases=tmp_path / "bases")
    model.config._name_or_path = "some/other-llama"
    OjaKVCache.from_model(model.float(), OjaKVConfig(), bases=tmp_path / "bases")  # a copy under another name
    assert not recwarn.list
    with pytest.warns(UserWarning, match="was made on `tiny-llama`, and this model is `other-llama`"):
        OjaKVCache.from_model(model.double(), OjaKVConfig(), bases=tmp_path / "bases")


def test_bases_of_other_weights_are_noticed_whatever_their_models_name(calibration, tmp_path, recwarn):
    calibration.save(tmp_path / "bases", model="some/tiny-llama", text=["random"])
    loaded = Calibration.load(tmp_path / "bases")
    halves = tiny_model().bfloat16()
    assert loaded.for_model(halves).weights == Calibration.load(tmp_path / "bases").weights == calibration.weights
    loaded.for_model(dynakv.add_compressors(tiny_model(), dynakv.DynaKVConfig()))
    loaded.for_model(tiny_model(seed=1).half())  # rounded otherwise: nothing can be said
    quanto = pytest.importorskip("optimum.quanto")
    rounded = tiny_model()
    quanto.quantize(rounded, weights=quanto.qint8)
    quanto.freeze(rounded)
    loaded.for_model(rounded)
    path = tmp_path / "bases/config.json"
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "weights"}
    assert not recwarn.list
    tuned = tiny_model()
    tuned.config._name_or_path = "tiny-llama"
    tuned.model.layers[2].self_attn.v_proj.weight.data[3, 5] += 1
    with pytest.warns(
        UserWarning, match="was made on `tiny-llama`, whose weights are others than this model's; unless"
    ):
        loaded.for_model(tuned)
    with pytest.warns(UserWarning, match="the calibration was made on other weights than this model's"):
        calibration.for_model(tuned)
    path.write_text(json.dumps(older))
    recwarn.clear()
    Calibration.load(tmp_path / "bases").for_model(tuned)
    assert not recwarn.list


@torch.no_grad()
@pytest.mark.parametrize("side", ["key", "value"])
def test_states_that_are_not_finite_name_their_layer(calibration, ids, side):
    model = tiny_model()
    model.model.layers[1].self_attn.get_submodule(f"{side[0]}_proj").weight[0, 0] = torch.nan
    for self_check in (True, False):  # the check of the model finds them, too
        with pytest.raises(UserError, match=f"layer 1 {side}s hold NaN or infinite entries"):
            model(
                ids,
                past_key_values=OjaKVCache.from_model(model, OjaKVConfig(), bases=calibration, self_check=self_check),
            )


@torch.no_grad()
def test_a_learning_rate_that_breaks_the_basis_names_layer_and_rate(model, calibration, ids):
    config = OjaKVConfig(preconditioned=False, learning_rate=1e38)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    with pytest.raises(
        UserError, match=r"layer 0 keys: an Oja step of rate 1e\+38 left no orthonormal basis; use a smaller"
    ):
        model(ids, past_key_values=cache)


def test_integers_need_a_calibration_that_knows_every_direction(model):
    bases = Calibration.from_text(model, torch.randint(1, 97, (2, 31)), progress=False)
    make_plan(bases, OjaKVConfig())
    make_plan(bases, OjaKVConfig(cache_dtype="int4", layout="per_head"))
    with pytest.raises(UserError, match="62 tokens, too few to know how 32 directions spread.*at least 64"):
        make_plan(bases, OjaKVConfig(cache_dtype="int4"))


def test_no_rate_meets_impossible_bytes(calibration):
    settings = {"prompt": 50, "tokens": 50, "itemsize": 4}
    with pytest.raises(UserError, match="no rate brings this cache to 0.100 .* at 50 tokens"):
        plan_for_bytes(calibration, dataclasses.replace(OjaKVConfig(), recent_window=30), 0.1, **settings)


@pytest.mark.parametrize(
    ("share", "settings", "message"),
    [
        (float("nan"), {}, "`share` must be positive"),
        (0.5, {"tokens": 0, "prompt": 0}, "`tokens` must be at least 1"),
        (0.5, {"prompt": 60}, r"`prompt` must be between 0 and `tokens` \(50\)"),
    ],
)
def test_a_plan_for_impossible_numbers_is_refused(calibration, share, settings, message):
    with pytest.raises(UserError, match=message):
        plan_for_bytes(calibration, OjaKVConfig(), share, **{"prompt": 50, "tokens": 50, "itemsize": 4, **settings})


@torch.no_grad()
def test_a_crop_of_more_than_is_held_is_refused(model, calibration, ids):
    cache = OjaKVCache.from_model(model, OjaKVConfig(), bases=calibration)
    model(ids, past_key_values=cache)
    with pytest.raises(UserError, match="is -151, but the cache holds 150 tokens"):
        cache.crop(-151)


@torch.no_grad()
@pytest.mark.parametrize("ranks", ["fraction", "budget", "energy"])
@pytest.mark.parametrize("preset", ["ojakv-joint", "ojakv-pf", "subspace-a"])
def test_heads_whose_states_are_all_zero_cost_nothing_and_break_nothing(ids, preset, ranks):
    model = tiny_model()
    for projection in ("k_proj", "v_proj"):
        getattr(model.model.layers[1].self_attn, projection).weight.zero_()
    model.model.layers[2].self_attn.v_proj.weight[:16].zero_()  # one KV head of two
    bases = Calibration.from_text(model, torch.randint(1, 97, (4, 32)), progress=False)
    rate = 1.0 if ranks == "fraction" else 0.5
    amount = {"energy": 0.99} if ranks == "energy" else {"rate": rate}
    config = OjaKVConfig.preset(preset, ranks=ranks, **amount, update_period=8, full_rank_ratio=0.0)
    cache = OjaKVCache.from_model(model, config, bases=bases)
    dense = model(ids, use_cache=False).logits
    logits = [model(part, past_key_values=cache).logits for part in ids.split([100, *[1] * 50], dim=1)]
    assert torch.isfinite(torch.cat(logits, dim=1)).all()
    if rate == 1:
        torch.testing.assert_close(torch.cat(logits, dim=1), dense, atol=2e-4, rtol=0)
    if ranks != "fraction" and preset == "ojakv-joint":
        dead, alive = cache.layers[1].sequences[0], cache.layers[0].sequences[0]
        assert dead.value.coef.rank < alive.value.coef.rank


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("static-joint-pf", {"update": "triggered"}, "`update` must be left out with `tracker: fixed`"),
        ("tokenwise-mixed", {"max_drift": 0.1}, "`max_drift` must be left out with `tracker: fixed`"),
        ("static-joint-pf", {"learning_rate": 0.5}, "`learning_rate` must be left out with `tracker: fixed`"),
        ("ojakv-joint", {"trigger": 0.5}, "`trigger` must be left out with `update: periodic`"),
        ("static-joint-pf", {"energy": 0.5}, "`energy` must be left out with `ranks: "),
        ("subspace-a", {"learning_rate": 0.5}, "`learning_rate` must be 0 or 1 with `tracker: frequent_directions`"),
        (
            "subspace-a",
            {"preconditioned": False},
            "`preconditioned` must be left out with `tracker: frequent_directions`",
        ),
        ("ojakv-paper", {"prior_tokens": 8.0}, "`prior_tokens` must be left out with `preconditioned: False`"),
        ("ojakv-paper", {"update_window": 8}, "`update_window` must be left out with `preconditioned: False`"),
        (
            "ojakv-pf",
            {"observation_window": 8, "full_rank_ratio": 0.0},
            "`observation_window` must be left out with `full_rank_ratio: 0.0` and `eviction.keep_ratio: 1.0`",
        ),
        ("static-mixed", {"own_directions_from": 8}, "`own_directions_from` must be left out with `own_directions: 0`"),
        ("static-pca", {"staggered": False}, "`staggered` must be left out with `update_period: 1`"),
        ("static-joint-pf", {"ranks": "energy", "rate": 0.1}, "`rate` must be left out with `ranks: energy`"),
        ("ojakv-pf", {"key_weight": 50.0}, "`key_weight` must be left out with `ranks: fraction`"),
    ],
)
def test_settings_that_change_nothing_are_refused(preset, settings, message):
    with pytest.raises(UserError, match=message):
        OjaKVConfig.preset(preset, **settings)
    OjaKVConfig.preset(preset, **{key: getattr(OjaKVConfig.preset(preset), key) for key in settings})


def test_a_name_or_a_model_in_the_place_of_settings_and_bases_is_named(model):
    bases = Calibration.from_text(model, torch.randint(1, 97, (4, 32)), progress=False)
    with pytest.raises(UserError, match=r"`config` must be settings, such as OjaKVConfig.preset.*; got 'ojakv-joint'"):
        OjaKVCache.from_model(model, "ojakv-joint", bases=bases)
    config = OjaKVConfig.preset("ojakv-joint")
    for given, told in ((None, "None"), (model, "'LlamaForCausalLM'")):
        with pytest.raises(UserError, match=f"`bases` must be a calibration, or the directory .*; got {told}"):
            OjaKVCache.from_model(model, config, bases=given)
    for ids in (torch.ones(8, dtype=torch.int64), [[1, 2]], torch.ones(2, 8), torch.ones(0, 8, dtype=torch.int64)):
        with pytest.raises(UserError, match="`blocks_NT` must be token ids, an integer tensor"):
            Calibration.from_text(model, ids)
    with pytest.raises(UserError, match="`joint_layers` must be zero or positive; got -1"):
        Calibration.from_text(model, torch.ones(1, 8, dtype=torch.int64), joint_layers=-1)
