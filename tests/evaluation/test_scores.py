"""Divergence, agreement and perplexity of caches beside the uncompressed model, and their intervals."""

import dataclasses

import pytest
import torch
from methods import calibration_of, tiny_model

from evaluation.peers.rotated import rotated_maker
from evaluation.reading import full_cache, read_through, read_uncompressed
from evaluation.scores import WindowScore, rows_of, score_window, summary
from evaluation.texts import windows_of
from ojakv import OjaKVCache, OjaKVConfig, make_plan


def mixed_maker(model, rate):
    config = OjaKVConfig.preset("static-mixed", rate=rate, recent_window=3, update_period=4)
    plan = make_plan(calibration_of(model, read=True), config)
    return lambda: OjaKVCache(model, plan)


def scores_of(model, makers, windows=2):
    ids = torch.randint(1, 97, (400,), generator=torch.Generator().manual_seed(0))
    found = {name: [] for name in makers}
    for window_T in windows_of(ids, 120, windows):
        full_SV = read_uncompressed(model, window_T, prefix=80)
        for name, make_cache in makers.items():
            found[name].append(score_window(model, window_T, full_SV, make_cache(), prefix=80, step=7))
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


@pytest.mark.parametrize(("prefix", "scored"), [(0, 119), (80, 39), (118, 1)])
def test_each_token_is_predicted_from_all_before_it(prefix, scored):
    model = tiny_model()
    ids_T = torch.randint(1, 97, (120,), generator=torch.Generator().manual_seed(0))
    expected_SV = model(ids_T[None]).logits[0].log_softmax(-1)[119 - scored : 119]
    assert read_uncompressed(model, ids_T, prefix=prefix).shape == (scored, expected_SV.shape[1])
    torch.testing.assert_close(read_uncompressed(model, ids_T, prefix=prefix), expected_SV)
    for step in (1, 5, 200):
        found_SV = read_through(model, ids_T, full_cache(model), prefix=prefix, step=step)
        torch.testing.assert_close(found_SV, expected_SV, rtol=1e-4, atol=1e-4)


def test_one_window_has_no_interval():
    score = WindowScore(loss=3, full_loss=3, kl=0.1, top1=0.9, scored=10, cache_bytes=1, full_bytes=4)
    row = summary([score])
    assert row["kl"] == 0.1
    assert not [key for key in row if key.endswith(("_low", "_high"))]


def test_an_interval_stays_within_what_is_possible():
    """Of two windows it is so wide that it would reach below a divergence of zero and above an agreement of all."""
    same = {"full_loss": 3, "scored": 10, "cache_bytes": 1, "full_bytes": 4}
    row = summary([WindowScore(loss=3.1, kl=0.1, top1=0.9, **same), WindowScore(loss=3.9, kl=0.01, top1=1.0, **same)])
    assert row["kl_low"] == 0 < row["kl"] < row["kl_high"]
    assert row["top1_low"] < row["top1"] < row["top1_high"] == 1
    assert row["perplexity_ratio_low"] > 0


def test_rows_of_a_record_have_the_intervals_of_its_windows():
    scores = [
        WindowScore(loss=2 + 0.1 * i, full_loss=2, kl=0.1 * i, top1=0.9, scored=9, cache_bytes=1, full_bytes=4)
        for i in range(4)
    ]
    row = {"method": "m", "dataset": "t", **summary(scores), "kl_low": 0.149, "kl_high": 0.151}
    record = {"rows": [row, {"method": "other", "dataset": "t", "kl_low": 1.0}], "summary": {}}
    assert rows_of(record) == record["rows"]
    record["summary"]["windows"] = [{"method": "m", "dataset": "t", "windows": list(map(dataclasses.asdict, scores))}]
    found, other = rows_of(record)
    assert found == {"method": "m", "dataset": "t", **summary(scores)}
    assert other == record["rows"][1]
    # A run that was ended by hand has fewer windows than it planned, whose documents it says.
    record["summary"]["documents"] = {"t": {"of": [0, 0, 1, 1, 2, 3], "touched": [1] * 6}}
    assert rows_of(record)[0] == found


def test_a_row_of_an_earlier_record_without_a_width_gets_one():
    row = {"method": "m", "dataset": "t", "items": 92, "score": 0.0, "score_low": 0.0, "score_high": 0.0}
    row |= {"difference": 0.0, "difference_low": 0.0, "difference_high": 0.0}
    full = row | {"method": "full"}
    found, itself = rows_of({"rows": [row, full], "summary": None})
    assert found["score_low"] == 0 < 3.9 < found["score_high"] < 4.1
    assert found["difference_low"] == -found["difference_high"] == -found["score_high"]
    assert (itself["difference_low"], itself["difference_high"]) == (0, 0)
    fewer, _ = rows_of({"rows": [row | {"clusters": 23}, full], "summary": None})
    assert fewer["score_high"] > 3 * found["score_high"]
