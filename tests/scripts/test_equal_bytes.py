"""What a record says of methods at equal bytes."""

import math
from pathlib import Path

import pytest

from lowrank_kv.utils import run_record
from lowrank_kv.utils.errors import UserError
from scripts.equal_bytes import check_whole, differences, main, told, windows_of


def window(held: int, kl: float) -> dict:
    return {"cache_bytes": held, "full_bytes": 100, "kl": kl}


WINDOWS = {
    ("small", "novels"): [window(10, 0.4), window(12, 0.8)],
    ("large", "novels"): [window(20, 0.1), window(20, 0.2)],
    ("other", "novels"): [window(15, 0.1), window(20, 0.1)],
}


def test_a_method_is_compared_with_the_line_between_its_neighbours():
    """In the middle of 0.4 and 0.1 the line is at 0.2; at its end it is the neighbour's own."""
    found = differences(WINDOWS, "novels", "other", ["large", "small"])
    assert found == pytest.approx([math.log(0.5), math.log(0.5)])
    assert told([found], [[0, 1]]).startswith("-50.0% (")
    assert told([found], [[0, 1]]).endswith("less in 2 of 2 windows")


def test_a_curve_through_four_is_what_lies_between_them():
    """Where log KL falls ever more slowly, a straight line flatters what lies between."""

    def kl(held):
        return math.exp(2 - 0.3 * held + 0.004 * held**2)

    held = (5, 10, 20, 35, 60)
    windows = {(str(each), "novels"): [window(each, kl(each))] for each in held}
    windows["between", "novels"] = [window(14, kl(14))]
    those = [str(each) for each in held]
    assert differences(windows, "novels", "between", those) == pytest.approx([0])
    [by_line] = differences(windows, "novels", "between", those, points=2)
    line = 0.6 * math.log(kl(10)) + 0.4 * math.log(kl(20))
    assert by_line == pytest.approx(math.log(kl(14)) - line)
    assert by_line < -0.05


def test_a_curve_through_two_of_nearly_equal_bytes_is_refused():
    """It would swing to a millionth of what lies between."""
    held = {"a": (1000, 0.1), "b": (1003, 0.12), "c": (2000, 0.03), "d": (3000, 0.012)}
    windows = {(name, "novels"): [window(*each) | {"full_bytes": 10_000}] for name, each in held.items()}
    windows["between", "novels"] = [window(1500, 0.05) | {"full_bytes": 10_000}]
    with pytest.raises(UserError, match=r"nearly the same bytes, 0\.1000 and 0\.1003 in window 1 of novels"):
        differences(windows, "novels", "between", list("abcd"))
    [by_line] = differences(windows, "novels", "between", list("abcd"), points=2)
    assert abs(by_line) < 0.2


def test_one_method_is_compared_as_it_is():
    assert differences(WINDOWS, "novels", "other", ["small"]) == pytest.approx([math.log(1 / 4), math.log(1 / 8)])


def test_bytes_that_the_line_does_not_reach_are_refused():
    with pytest.raises(UserError, match=r"it holds 0\.100, and they from 0\.150 to 0\.200"):
        differences(WINDOWS, "novels", "small", ["other", "large"])


def test_methods_of_equal_bytes_are_one_point_of_the_line():
    windows = WINDOWS | {("twin", "novels"): [window(10, 0.2), window(12, 0.9)]}
    found = differences(windows, "novels", "small", ["small", "twin", "large"])
    assert found == pytest.approx([math.log(2), 0])
    all_alike = windows | {(name, "novels"): windows["small", "novels"] for name in "abc"}
    assert differences(all_alike, "novels", "small", ["twin", *"abc"]) == pytest.approx([math.log(2), 0])


def test_a_window_alone_has_no_interval():
    assert told([[math.log(0.5)]], [[0]]) == "-50.0% in its one window, without an interval"


def test_a_kl_of_zero_is_refused():
    windows = WINDOWS | {("full", "novels"): [window(100, 0.0), window(100, -1e-9)]}
    with pytest.raises(UserError, match="`full` has a KL of 0.0e"):
        differences(windows, "novels", "other", ["small", "full"])


def test_a_record_of_a_comparison_that_still_runs_is_refused():
    check_whole(WINDOWS, {"novels": [0, 1]}, "record.json")
    with pytest.raises(
        UserError, match="record.json has 2 of 3 windows of novels with `small`; let the comparison come"
    ):
        check_whole(WINDOWS, {"novels": [0, 1, 1]}, "record.json")


def written(
    directory: Path,
    methods: dict[str, list[dict]],
    *,
    text: str = "a" * 64,
    weights: str = "b" * 64,
    prefix: int = 1024,
) -> Path:
    """A record of a comparison on one text."""
    inputs = [
        {"role": "weights", "name": "model", "sha256": weights, "run_id": None},
        {"role": "text", "name": "novels", "sha256": text, "run_id": None},
    ]
    record = run_record.new_record(
        "quality", config={"of": sorted(methods), "prefix": prefix}, inputs=inputs, n={"windows": 2}, device="cpu"
    )
    record["rows"] = [{"method": method, "dataset": "novels"} for method in methods]
    told_of = [{"method": method, "dataset": "novels", "windows": each} for method, each in methods.items()]
    record["summary"] = {"windows": told_of, "documents": {"novels": {"of": [0, 1]}}}
    return run_record.write(record, directory)


SMALL, LARGE, OTHER = (WINDOWS[name, "novels"] for name in ("small", "large", "other"))


def test_methods_of_two_records_are_compared(tmp_path, capsys):
    first = written(tmp_path, {"small": SMALL, "large": LARGE, "full": LARGE})
    second = written(tmp_path, {"other": OTHER, "full": LARGE})
    main([str(first), str(second), "--method", "other", "--against", "small", "large"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("all: -50.0% (")


@pytest.mark.parametrize(
    ("changed", "message"), [("text", "different text of `novels`"), ("weights", "different weights")]
)
def test_records_of_different_windows_or_models_are_refused(tmp_path, changed, message):
    paths = written(tmp_path, {"small": SMALL}), written(tmp_path, {"other": OTHER}, **{changed: "c" * 64})
    with pytest.raises(UserError, match=message):
        windows_of(paths, ["small", "other"])


def test_records_that_were_read_otherwise_are_refused(tmp_path):
    paths = written(tmp_path, {"small": SMALL}), written(tmp_path, {"other": OTHER}, prefix=0)
    with pytest.raises(
        UserError, match=r"the records differ in `prefix` \(1024 in .*, 0 in .*\), so they cannot be compared"
    ):
        windows_of(paths, ["small", "other"])


def test_a_method_of_two_records_is_refused(tmp_path):
    paths = written(tmp_path, {"small": SMALL}), written(tmp_path, {"small": SMALL, "other": OTHER})
    with pytest.raises(UserError, match="has `small` on novels, as a record before it has"):
        windows_of(paths, ["small", "other"])


def test_windows_that_all_have_are_compared_where_a_comparison_was_ended(tmp_path, capsys):
    """The first ones, of which the others' are not looked at."""
    first = written(tmp_path, {"small": SMALL, "large": LARGE})
    second = written(tmp_path, {"other": OTHER[:1]})
    words = [str(first), str(second), "--method", "other", "--against", "small"]
    with pytest.raises(UserError, match="has 1 of 2 windows of novels with `other`.*or take `--common` windows"):
        main(words)
    main([*words, "--common"])
    assert capsys.readouterr().out.splitlines()[-1] == "all: -75.0% in its one window, without an interval"


def test_a_record_without_windows_is_refused(tmp_path):
    record = run_record.new_record("speed", config={}, inputs=[], n={"repeats": 1}, device="cpu")
    path = run_record.write(record | {"rows": [{"ms": 1.0}]}, tmp_path)
    with pytest.raises(UserError, match="holds no windows of a comparison"):
        windows_of([path], ["small"])


def test_a_method_of_no_record_is_refused(tmp_path):
    with pytest.raises(UserError, match="`tiny` is no method of"):
        windows_of([written(tmp_path, {"small": SMALL})], ["small", "tiny"])
