"""The package computes what it did when `baseline-*.json` and `demo-*.json` were recorded (`record.py` says how): every
method on every family and on left-padded texts, and trainings. Nothing is left out of the tiny part.

Each kind of processor, by its maker and the width of its vectors, has a recording: its sums give a calibration other bases,
and a plan other bits. Where torch, transformers, the processor and the compiler are those of the recording, all is compared
to the bit. On others of the kind tokens and errors must be equal and a few numbers of the rest close; on a kind without a
recording so must those labels on which all recordings are. A warning and a property of the test say what was compared. A
recording may lack labels whose results were meant to change where no such processor was at hand; another has them.
"""

import warnings
from pathlib import Path

import pytest
from cells import DEMO, TINY, record
from old_transformers import skip_what_it_gets_wrong
from recording import Entries, Recording, differences, kind, machine, read

HERE = Path(__file__).parent
RECORDINGS = {
    part: {kind(each.machine): each for each in map(read, sorted(HERE.glob(f"{part}-*.json")))}
    for part in ("baseline", "demo")
}
MOST = "AMD AVX512"  # the kind that is compared with where there is none of this machine's


def check(part: str, group: str, record_property) -> None:
    """Record a group, and compare it with the recording of this kind of processor."""
    of_part, here = RECORDINGS[part], machine()
    recorded = of_part.get(kind(here), of_part[MOST])
    changed = {key: here[key] for key, value in recorded.machine.items() if here[key] != value}
    record_property("golden", "to the bit" if not changed else f"within tolerances, for {changed}")
    if changed:
        warnings.warn(f"compared within tolerances, not to the bit: here {changed}", stacklevel=2)
    left_out = set().union(*(each.entries for each in of_part.values())) - recorded.entries.keys()
    if kind(here) not in of_part:
        left_out |= recorded.entries.keys() - agreed(of_part)
    if lacking := [label for label in left_out if label.split("/")[0] == group]:
        warnings.warn(f"{len(lacking)} labels of {group} have no recording for such a processor", stacklevel=2)
    expected = {label: entry for label, entry in recorded.entries.items() if label.split("/")[0] == group}
    kept, found = (
        {label: entry for label, entry in each.items() if label not in left_out} for each in (expected, record(group))
    )
    lines = differences(kept, found, exact=not changed)
    assert not lines, "\n".join([f"{len(lines)} differ from commit {recorded.commit}:", *lines])


def agreed(recordings: dict[str, Recording]) -> set[str]:
    """Labels whose results are close on all kinds of processors: nothing of them is rounded to codes, or trained on."""
    entries = [each.entries for each in recordings.values()]
    return {label for label in set.intersection(*map(set, entries)) if _close([each[label] for each in entries])}


def _close(entries: list[dict]) -> bool:
    first, *others = entries
    return not any(differences({"": first}, {"": other}, exact=False) for other in others)


@pytest.mark.parametrize("group", TINY)
def test_tiny_models_compute_what_they_did(group, record_property):
    if group == "family-gemma2":
        skip_what_it_gets_wrong("what a later one says of Gemma 2")
    check("baseline", group, record_property)


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.usefixtures("demo_dir")
@pytest.mark.parametrize("group", DEMO)
def test_the_demo_model_computes_what_it_did(group, record_property):
    check("demo", group, record_property)


@pytest.mark.parametrize(("part", "groups"), [("baseline", TINY), ("demo", DEMO)])
def test_all_that_was_recorded_is_compared(part, groups):
    for recorded in RECORDINGS[part].values():
        assert {label.split("/")[0] for label in recorded.entries} == groups.keys()


def test_one_kind_of_processors_has_all_labels_and_the_others_agree():
    recordings = RECORDINGS["baseline"]
    assert set(recordings) == {"AMD AVX2", MOST, "Intel AVX512"}
    everything = set().union(*(each.entries for each in recordings.values()))
    assert any(each.entries.keys() == everything for each in recordings.values())
    both = set.intersection(*(set(each.entries) for each in recordings.values()))
    assert len(both) > 0.6 * len(everything)
    assert len(agreed(recordings)) > 0.6 * len(both)


def test_a_changed_bit_is_found_and_named():
    entries: Entries = RECORDINGS["baseline"][MOST].entries
    label, entry = next(iter(entries.items()))
    near = {**entry, "logits": {**entry["logits"], "sha256": "0" * 64}}
    assert differences({label: entry}, {label: near}, exact=True) == [f"{label}: logits not equal to the bit"]
    assert differences({label: entry}, {label: near}, exact=False) == []
    far = {**entry, "logits": {**entry["logits"], "sample": [(1e9).hex()] * 8}}
    assert "sampled logits differ" in differences({label: entry}, {label: far}, exact=False)[0]
    other = {**entry, "tokens": []}
    assert "tokens [] instead of" in differences({label: entry}, {label: other}, exact=False)[0]
    assert differences({label: entry}, {}, exact=False) == [f"{label}: is no longer recorded"]
