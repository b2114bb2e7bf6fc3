"""Divergence, agreement and perplexity of caches beside the full one, in memory and by the command."""

import pytest
import torch
import yaml
from methods import calibration_of, tiny_model

from evaluation.fidelity import WindowScore, fidelity, summary, windows_of
from evaluation.fidelity_command import FidelityConfig, measure
from evaluation.peers.rotated import rotated_maker
from evaluation.perplexity import full_cache
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan


def mixed_maker(model, rate):
    config = OjaKVConfig.preset("static-mixed", rate=rate, recent_window=3, update_period=4)
    plan = make_plan(calibration_of(model, read=True), config)
    return lambda: OjaKVCache(model, plan)


def scores_of(model, makers, windows=2):
    ids = torch.randint(1, 97, (400,), generator=torch.Generator().manual_seed(0))
    found = {name: [] for name in makers}
    for name, score in fidelity(model, windows_of(ids, 120, windows), makers, prefix=80, step=7):
        found[name].append(score)
    return found


def test_windows_are_spread_evenly_and_do_not_overlap():
    ids = torch.arange(100)
    assert windows_of(ids, 10, 4)[:, 0].tolist() == [0, 30, 60, 90]
    assert windows_of(ids, 30, 9)[:, 0].tolist() == [0, 35, 70]
    assert windows_of(ids, 100, 9).shape == (1, 100)


def test_the_full_cache_is_faithful_and_fewer_bytes_are_less_so():
    model = tiny_model()
    makers = {"full": lambda: full_cache(model), "0.5": mixed_maker(model, 0.5), "0.1": mixed_maker(model, 0.1)}
    found = scores_of(model, makers)
    rows = {name: summary(scores) for name, scores in found.items()}
    assert all(score.scored == 39 for scores in found.values() for score in scores)
    assert rows["full"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["full"]["top1"] == 1
    assert rows["full"]["rate"] == 1
    assert 0 < rows["0.5"]["kl"] < rows["0.1"]["kl"] / 4
    assert rows["0.1"]["rate"] < rows["0.5"]["rate"] < 1


def test_more_bits_of_rotated_numbers_are_more_faithful():
    model = tiny_model()
    found = scores_of(model, {name: rotated_maker(model, f"rotated-int{name}") for name in "432"})
    kls = [summary(found[name])["kl"] for name in "432"]
    assert 0 < kls[0] < kls[1] < kls[2]


def test_an_interval_holds_the_mean_and_narrows_with_more_windows():
    generator = torch.Generator().manual_seed(0)

    def rows(count):
        values = torch.rand(count, generator=generator).tolist()
        return summary(
            [
                WindowScore(loss=3 + kl, full_loss=3, kl=kl, top1=1 - kl, scored=10, cache_bytes=1, full_bytes=4)
                for kl in values
            ]
        )

    few, many = rows(8), rows(200)
    for row in (few, many):
        for name in ("perplexity_ratio", "kl", "top1"):
            assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]
        assert row["rate"] == 0.25
    assert many["kl_high"] - many["kl_low"] < (few["kl_high"] - few["kl_low"]) / 2


@pytest.fixture(scope="module")
def bases(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibrated") / "bases"
    ids = torch.randint(1, 257, (3, 160), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.from_text(load_model(str(tiny_dir)), ids, read=True, progress=False)
    calibration.save(directory, model="tiny", text=["random"])
    return directory


def test_the_command_measures_every_method_on_every_text(run, tiny_dir, bases, text_file, tmp_path):
    values = {
        "model": str(tiny_dir),
        "bases": str(bases),
        "texts": [{"label": "same", "name": str(text_file)}],
        "rates": [0.3],
        "peers": ["rotated-int4"],
        "prefix": 96,
        "length": 160,
        "windows": 2,
        "read": 320,
    }
    (tmp_path / "fidelity.yaml").write_text(yaml.safe_dump(values))
    done = run("scripts/measure_fidelity.py", "--config", tmp_path / "fidelity.yaml", "--results", tmp_path / "results")
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines() if line.startswith("| same")] == [
        "full",
        "static-mixed 0.3",
        "rotated-int4",
    ]
    [path] = (tmp_path / "results/quality").glob("*.json")
    assert str(path) in done.stdout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peers": ["int5"]}, "`peers` must be among"),
        ({"presets": ["static-pca"]}, "`presets` must be with exact prompts"),
        ({"prefix": 159}, "`prefix` must be below `length` by two at least"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_work(changed, message):
    values = {
        "model": "nowhere",
        "bases": "nowhere",
        "texts": [{"label": "a", "name": "b"}],
        "length": 160,
        "prefix": 96,
    }
    from lowrank_kv.utils.config import build

    with pytest.raises(UserError, match=message):
        next(measure(build(FidelityConfig, values | changed, source="the test")))
