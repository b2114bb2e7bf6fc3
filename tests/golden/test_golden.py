"""The package computes what it did when `baseline-*.json` and `demo.json` were recorded (`record.py` says how): every method
on every family and on left-padded texts, and trainings. Nothing is left out of the tiny part.

Processors with wide and with narrow vectors have a recording each: their sums give a calibration other bases, and a plan
other bits. Where torch, transformers, the processor and the compiler are those of the recording, all is compared to the bit.
Elsewhere tokens and errors must be equal and a few numbers of the rest close, and a warning and a property of the test say
so. One kind's recording may lack labels whose results were meant to change where no such processor was at hand; another's
has them, and a warning says how many were not compared.
"""

import warnings
from pathlib import Path

import pytest
from cells import DEMO, TINY, record
from old_transformers import skip_what_it_gets_wrong
from recording import Recording, differences, machine, read

HERE = Path(__file__).parent
BASELINES = {each.machine["cpu_capability"]: each for each in map(read, sorted(HERE.glob("baseline-*.json")))}
BASELINE = BASELINES.get(machine()["cpu_capability"], BASELINES["AVX512"])
OF_DEMO = read(HERE / "demo.json")


def check(recorded: Recording, group: str, record_property) -> None:
    here = machine()
    changed = {key: here[key] for key, value in recorded.machine.items() if here[key] != value}
    record_property("golden", "to the bit" if not changed else f"within tolerances, for {changed}")
    if changed:
        warnings.warn(f"compared within tolerances, not to the bit: here {changed}", stacklevel=2)
    expected = {label: entry for label, entry in recorded.entries.items() if label.split("/")[0] == group}
    elsewhere = set().union(*(each.entries for each in BASELINES.values())) - recorded.entries.keys()
    found = {label: entry for label, entry in record(group).items() if label not in elsewhere}
    if lacking := [label for label in elsewhere if label.split("/")[0] == group]:
        warnings.warn(f"{len(lacking)} labels of {group} have no recording of such a processor", stacklevel=2)
    lines = differences(expected, found, exact=not changed)
    assert not lines, "\n".join([f"{len(lines)} differ from commit {recorded.commit}:", *lines])


@pytest.mark.parametrize("group", TINY)
def test_tiny_models_compute_what_they_did(group, record_property):
    if group == "family-gemma2":
        skip_what_it_gets_wrong("what a later one says of Gemma 2")
    check(BASELINE, group, record_property)


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.usefixtures("demo_dir")
@pytest.mark.parametrize("group", DEMO)
def test_the_demo_model_computes_what_it_did(group, record_property):
    check(OF_DEMO, group, record_property)


@pytest.mark.parametrize(("recorded", "groups"), [(BASELINE, TINY), (OF_DEMO, DEMO)], ids=["tiny", "demo"])
def test_all_that_was_recorded_is_compared(recorded, groups):
    assert {label.split("/")[0] for label in recorded.entries} == groups.keys()


def test_one_kind_of_processors_has_all_labels_and_the_other_agrees():
    assert set(BASELINES) == {"AVX2", "AVX512"}
    narrow, wide = (BASELINES[each].entries for each in ("AVX2", "AVX512"))
    assert narrow.keys() >= wide.keys() or wide.keys() >= narrow.keys()
    both = narrow.keys() & wide.keys()
    assert len(both) > 0.6 * len(narrow)
    # Where no numbers are rounded to codes, processors agree.
    agree = [label for label in both if not differences({label: wide[label]}, {label: narrow[label]}, exact=False)]
    assert len(agree) > 0.6 * len(both)


def test_a_changed_bit_is_found_and_named():
    label, entry = next(iter(BASELINE.entries.items()))
    near = {**entry, "logits": {**entry["logits"], "sha256": "0" * 64}}
    assert differences({label: entry}, {label: near}, exact=True) == [f"{label}: logits not equal to the bit"]
    assert differences({label: entry}, {label: near}, exact=False) == []
    far = {**entry, "logits": {**entry["logits"], "sample": [(1e9).hex()] * 8}}
    assert "sampled logits differ" in differences({label: entry}, {label: far}, exact=False)[0]
    other = {**entry, "tokens": []}
    assert "tokens [] instead of" in differences({label: entry}, {label: other}, exact=False)[0]
    assert differences({label: entry}, {}, exact=False) == [f"{label}: is no longer recorded"]
