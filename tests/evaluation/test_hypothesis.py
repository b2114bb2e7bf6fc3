"""`lowrank-kv hypothesis` on a tiny model: what it measures is what the ranks say, and its verdicts follow their rules."""

import dataclasses
import itertools

import pytest
import torch
import yaml

from evaluation.cells import CELLS
from evaluation.hypothesis.config import HypothesisConfig
from evaluation.hypothesis.evidence import Estimate, Evidence, HeadRow, Measured
from evaluation.hypothesis.ranks import KEYS, VALUES, Spectra, adaptive_ranks, head_plan, mean_share, threshold_ranks
from evaluation.hypothesis.settings import Setting, head_ranks, settings_of, shares_of
from evaluation.hypothesis.suite import run_suite
from evaluation.hypothesis.verdicts import HOLDS, PARTLY, REFUTED, UNDECIDED, WEAK, verdicts
from evaluation.page.build import page
from evaluation.scores import WindowScore, rank_correlation
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, make_plan


@pytest.fixture
def values(tiny_dir, text_file, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("another kind of text, read only to be measured on. " * 40)
    return {
        "model": str(tiny_dir),
        "texts": [{"label": "same", "name": str(text_file)}, {"label": "other", "name": str(text)}],
        "familiar": ["same"],
        "calibration": {"name": [str(text_file)], "tokens": 640, "length": 160},
        "prefix": 32,
        "length": 64,
        "windows": 2,
        "shares": [0.25, 0.5],
        "online": [0.5],
        "refresh": 8,
        "thresholds": [0.9, 0.99],
        "sensitivity_length": 24,
        "sensitivity_windows": 1,
    }


@pytest.fixture(scope="module")
def spectra(calibration):
    return Spectra.of(calibration)


def test_the_command_writes_a_record_with_verdicts_and_goes_on(run, values, tmp_path):
    path = tmp_path / "hypothesis.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run("hypothesis", "--config", path, "--output", tmp_path / "out")
    [written] = (tmp_path / "out/quality").iterdir()
    record = run_record.load(written)
    config = build(HypothesisConfig, values)
    labels = [setting.label for setting in settings_of(config)]
    assert len(set(labels)) == len(labels)
    perplexity = [row for row in record["rows"] if row["what"] == "perplexity"]
    assert {(row["method"], row["dataset"]) for row in perplexity} == set(
        itertools.product(labels, ["same", "other", "all texts"])
    )
    heads = [row for row in record["rows"] if row["what"] == "head"]
    assert len(heads) == 2 * 2 * 3  # layers, heads; keys on both sides of the rotation, and values
    for row in heads:
        assert 1 <= row["rank_90"] <= row["rank_99"] <= 16
        assert row["captured"] == sorted(row["captured"])
        assert row["captured"][-1] == 1
        assert (row["kl_alone"] is None) == (row["rope"] == "pre")
    assert {(row["layer"], row["side"]) for row in record["rows"] if row["what"] == "layer"} == set(
        itertools.product([0, 1], ["keys", "values"])
    )
    assert "rank for 99 % of the energy" in page([record])
    assert record["summary"]["verdicts"]
    assert record["n"] == {"windows": 4, "tokens": 4 * 64}
    [by] = record["summary"]["measured_by"]
    assert (by["run_id"], by["cells"]) == (record["run_id"], len(labels) * 4 + 2 * 3 * 2 * 2)
    for name, verdict in record["summary"]["verdicts"].items():
        assert f"- **{verdict['verdict']}**: {verdict['claim']}" in done.stdout, name
    lines = (tmp_path / "out" / CELLS).read_text().splitlines()
    assert len(lines) == len(labels) * 4 + 2 * 3 * 2 * 2
    *_, make_record = run_suite(config, tmp_path / "out")
    again = make_record()
    assert (tmp_path / "out" / CELLS).read_text().splitlines() == lines
    assert again["rows"] == record["rows"]
    assert again["summary"] == record["summary"]
    for row in heads:
        del row["rank_99"]
    assert "rank for 90 % of the energy" in page([record]), "one threshold is enough for the page"


def test_only_the_length_of_windows_must_fit_the_model_s_positions(values, tmp_path):
    """Windows of single layers are the beginnings of the same windows, so that they are never longer."""
    values |= {"windows": 1, "sensitivity": "layers", "sensitivity_length": 513}
    make_record = next(run_suite(build(HypothesisConfig, values), tmp_path))
    assert make_record()["rows"]
    with pytest.raises(UserError, match="`length` is 513 tokens, but this model has 512 positions"):
        next(run_suite(build(HypothesisConfig, values | {"length": 513}), tmp_path))


def test_bytes_of_uniform_ranks_are_their_share(values, tmp_path):
    *_, make_record = run_suite(build(HypothesisConfig, values | {"sensitivity": "none"}), tmp_path)
    rows = {
        row["method"]: row for row in make_record()["rows"] if row["what"] == "perplexity" and row["dataset"] == "same"
    }
    assert rows["uniform 0.25 d"]["rate"] == pytest.approx(0.25, rel=0.2)  # with the room it leaves
    assert rows["uniform 0.25 d, keys"]["rate"] == pytest.approx((0.25 + 1) / 2, rel=0.2)
    # Heads have 16 dims: of 4 coefficients, 16 bytes are left 4, and a scale and an offset of 2 bytes each.
    assert rows["uniform 0.25 d, int8"]["rate"] == pytest.approx(rows["uniform 0.25 d"]["rate"] / 2, rel=0.1)
    assert rows["uniform 0.5 d"]["kl"] < rows["uniform 0.25 d"]["kl"]
    assert rows["uniform 0.25 d, values"]["value_share"] == 0.25
    assert rows["uniform 0.25 d, values"]["key_share"] == 1


def test_a_share_that_is_no_whole_number_of_dims_is_met_in_the_mean_of_layers(calibration, spectra):
    """0.2 of 16 dims: layers have 3 and 4."""
    setting = Setting(group="rank", level=0.2)
    plan = make_plan(calibration, setting.config())
    ranks = [each.rank for kv in plan.layers.values() for each in kv]
    assert set(ranks) == {3, 4}
    for share in shares_of(setting, spectra, 16).values():
        assert share == pytest.approx(sum(ranks) / len(ranks) / 16, abs=1 / 16 / len(ranks))
    rounded = dict.fromkeys((KEYS, VALUES), 13 / 64)
    measured = Measured(setting=setting, shares=rounded, scores={}, documents={})
    assert measured.is_at_most(0.2), "its level is what was asked for"
    assert not dataclasses.replace(measured, setting=Setting(group="energy", ranks="energy", level=0.9)).is_at_most(0.2)


def test_a_cache_of_head_ranks_projects_each_head_on_its_own(model, calibration, spectra):
    ranks = {KEYS: {0: [3, 9], 1: [16, 5], 2: [1, 16]}, VALUES: {0: [16, 16], 1: [2, 7], 2: [4, 4]}}
    config = Setting(group="rank", level=0.5).config()
    plan = head_plan(calibration, spectra, config, ranks)
    cache, ids = OjaKVCache(model, plan), torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        exact = model(ids).past_key_values
    held = cache.layers[0].dense()[0][0], cache.layers[0].dense()[1][0]
    for head, rank in enumerate(ranks[KEYS][0]):  # the first layer sees what the uncompressed model's does
        basis_DR = spectra.keys["post"][0].vectors_PWW[head, :, :rank]
        wanted_TD = exact.layers[0].keys[0, head] @ basis_DR @ basis_DR.T
        torch.testing.assert_close(held[0][head], wanted_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held[1], exact.layers[0].values[0], rtol=1e-5, atol=1e-5)


def test_equal_ranks_of_heads_are_the_plan_of_the_method(model, calibration, spectra):
    setting = Setting(group="rank", level=0.25)
    ours = head_plan(calibration, spectra, setting.config(), head_ranks(setting, spectra))
    usual = make_plan(calibration, setting.config())
    for index, sides in usual.layers.items():
        for one, other in zip(ours.layers[index], sides, strict=True):
            projection = [u.vectors_PWR @ u.vectors_PWR.mT for u in (one, other)]
            torch.testing.assert_close(*projection, rtol=1e-4, atol=1e-5)


def test_ranks_meet_their_thresholds_and_their_mean(spectra):
    bases = spectra.of_side(KEYS, "post")
    for index, ranks in threshold_ranks(bases, 0.95).items():
        for rank, energy_D in zip(ranks, bases[index].energy_PW, strict=True):
            share_D = energy_D.cumsum(0) / energy_D.sum()
            assert share_D[rank - 1] >= 0.95 - 1e-6
            assert rank == 1 or share_D[rank - 2] < 0.95
    assert mean_share(adaptive_ranks(bases, 0.5), 16) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([1, 2, 3], [10, 20, 30], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 1, 1], [1, 2, 3], 0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9487),
    ],
)
def test_rank_correlation(first, second, wanted):
    assert rank_correlation(first, second) == pytest.approx(wanted, abs=1e-4)


def invented(config, increases, *, heads=None):
    """Evidence in which a setting's perplexity is up by what `increases` says of it, on ten windows of two texts."""
    full = WindowScore(loss=0, full_loss=2, kl=0, top1=1, scored=10, cache_bytes=25, full_bytes=100)

    def score(setting, n):
        noise = 0.0005 * (-1) ** n
        return dataclasses.replace(full, loss=2 + increases(setting) + noise, cache_bytes=int(100 * setting.level))

    def shares(setting):
        level = 0.25 if setting.ranks == "energy" else setting.level
        return {side: level if setting.sides in ("both", side) else 1.0 for side in (KEYS, VALUES)}

    settings = [
        Measured(
            setting=each,
            shares=shares(each),
            scores={text: [score(each, n) for n in range(10)] for text in ("same", "other")},
            documents={text: [0] * 10 for text in ("same", "other")},
        )
        for each in settings_of(config)
    ]
    return Evidence(head_dim=16, settings=settings, heads=heads or _heads(config, 4, 6), layer_kl={})


def _heads(config, before, after):

    return [
        HeadRow(
            layer=0,
            head=head,
            side=side,
            rope=rope,
            ranks=dict.fromkeys(config.thresholds, rank),
            captured=[1.0],
            kl=None,
        )
        for head in range(4)
        for side, rope, rank in ((KEYS, "pre", before), (KEYS, "post", after), (VALUES, "-", before))
    ]


def test_verdicts_follow_from_the_figures(values):
    config = build(HypothesisConfig, values)
    nothing = verdicts(config, invented(config, lambda setting: 0.0))
    assert nothing["h0"].verdict == REFUTED
    assert nothing["quarter"].verdict == nothing["h1"].verdict == nothing["rope"].verdict == HOLDS
    assert nothing["online"].verdict == WEAK
    assert nothing["adaptive"].verdict == REFUTED
    assert nothing["eight-bits"].verdict == nothing["modest-rope"].verdict == nothing["energy"].verdict == HOLDS
    assert nothing["sides"].verdict == UNDECIDED

    much = verdicts(config, invented(config, lambda setting: 0.5))
    assert much["h0"].verdict == HOLDS
    assert much["quarter"].verdict == much["h1"].verdict == much["energy"].verdict == REFUTED
    assert much["rope"].verdict == PARTLY  # no rank below d will do, but the spectra are short

    near = verdicts(config, invented(config, lambda setting: 0.01))
    assert near["h0"].verdict == near["quarter"].verdict == near["rope"].verdict == UNDECIDED


def test_what_was_not_measured_is_not_judged(values):
    config = build(HypothesisConfig, values | {"thresholds": [0.8, 0.9], "shares": [0.6, 0.7], "modest": 0.6})
    for increase in (0.0, 0.5):
        assert verdicts(config, invented(config, lambda _, up=increase: up))["energy"].verdict == UNDECIDED


def test_a_familiar_text_that_was_missing_is_left_out(values, tmp_path):
    missing = {"label": "gone", "name": str(tmp_path / "gone.txt"), "optional": True}
    values |= {"texts": [*values["texts"], missing], "familiar": ["gone"]}
    config = build(HypothesisConfig, values)
    alone = verdicts(config, invented(config, lambda setting: 0.5))["drift"]
    assert alone.verdict == UNDECIDED
    config = build(HypothesisConfig, values | {"familiar": ["gone", "same"]})
    assert verdicts(config, invented(config, lambda setting: 0.5))["drift"].because.count("familiar") == 2


def test_verdicts_on_adaptivity_and_the_rotation(values):
    config = build(HypothesisConfig, values)

    def increases(setting):
        up = 0.02 if setting.ranks == "energy" or setting.level < 0.5 else 0.0
        up -= 0.01 if setting.tracker == "oja" else 0
        up -= 0.01 if setting.ranks == "adaptive" and setting.sides == VALUES else 0
        return up + (0.2 if setting.sides == KEYS and setting.level < 0.5 else 0)

    found = verdicts(config, invented(config, increases, heads=_heads(config, 4, 15)))
    assert found["online"].verdict == HOLDS
    assert found["adaptive"].verdict == PARTLY
    assert found["sides"].verdict == "keys cost more"
    assert found["rope"].verdict == PARTLY  # half of the dims will do, though spectra are long
    assert found["modest-rope"].verdict == REFUTED
    assert found["h1"].verdict == PARTLY
    assert "mean rank 15.0 of rotated keys, 4.0 before" in found["modest-rope"].because


def test_an_estimate_says_itself_in_per_cent():
    assert Estimate(0.0123, -0.001, 0.02).words == "+1.2 % (−0.1 % to +2.0 %)"
    assert Estimate(99.0, 49.0, 199.0).words == "100-fold (50-fold to 200-fold)"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"familiar": ["elsewhere"]}, r"`familiar` must be labels of texts \(same, other\)"),
        ({"calibration": None}, "`bases` must be given, or `calibration`"),
        ({"shares": [1.0]}, r"`shares` must be numbers in \(0, 1\)"),
        ({"thresholds": []}, r"`thresholds` must be numbers in \(0, 1\)"),
        ({"online": [0.5, 0.5]}, "`online` must be different numbers"),
        ({"modest": 0.3}, "`modest` must be one of `shares`"),
        ({"prefix": 63}, "`prefix` must be positive and below `length` by two"),
        ({"sensitivity": "all"}, "`sensitivity` must be one of"),
    ],
)
def test_what_cannot_be_tested_is_refused(values, changed, message):
    with pytest.raises(UserError, match=message):
        build(HypothesisConfig, values | changed)


@pytest.mark.parametrize("windows", [1, 2, 4])
def test_noise_decides_nothing(values, windows):
    """Every setting costs one per cent, give or take five in each window."""
    config = build(HypothesisConfig, values | {"familiar": ["same"]})
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        evidence = invented(config, lambda _, g=generator: 0.01 + 0.05 * float(torch.randn((), generator=g)))
        settings = [
            dataclasses.replace(each, scores={text: found[:windows] for text, found in each.scores.items()})
            for each in evidence.settings
        ]
        found = verdicts(config, dataclasses.replace(evidence, settings=settings))
        for name in ("h0", "quarter", "h1", "energy", "drift"):
            assert found[name].verdict == UNDECIDED, (name, found[name].because)
        for name in ("adaptive", "eight-bits", "online", "sinks"):  # many pairs, of which one may be a chance
            assert found[name].verdict in (UNDECIDED, PARTLY), (name, found[name].because)


@pytest.mark.parametrize(("windows", "verdict"), [(10, HOLDS), (1, UNDECIDED)])
def test_one_window_says_nothing_of_the_rotation(values, windows, verdict):
    """Though no setting costs anything."""
    config = build(HypothesisConfig, values | {"familiar": []})
    evidence = invented(config, lambda setting: 0.0)
    settings = [
        dataclasses.replace(each, scores={"other": each.scores["other"][:windows]}) for each in evidence.settings
    ]
    assert verdicts(config, dataclasses.replace(evidence, settings=settings))["rope"].verdict == verdict


def test_one_window_has_no_bounds():
    one = Estimate.of_differences(torch.tensor([0.0099], dtype=torch.float64), torch.tensor([0]))
    assert (one.low, one.high) == (-1, float("inf"))
    assert one.words == "+1.0 % (too few windows for an interval)"
