"""Which texts are known again, by what names."""

import warnings

import pytest

from lowrank_kv.calibration.known_text import KnownText


def warned_of(read: str, name: str) -> bool:
    known = KnownText(reader="it", record={"text": [read]}, make="calibrate", share_option="--heldout_share")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known.warn_of(name, share=0.0)
    return bool(found)


@pytest.mark.parametrize(
    ("read", "measured", "is_known"),
    [
        ("a.jsonl", "a.jsonl", True),
        ("a.jsonl", "b.jsonl", False),
        ("*.jsonl", "a.jsonl", True),
        ("*.jsonl", "a.txt", False),
        ("a.jsonl", "*.jsonl", True),
        ("c.jsonl", "*.jsonl", False),
        ("[ab].jsonl", "*.jsonl", True),
        ("a[1].jsonl", "a[1].jsonl", True),
        ("a[1].jsonl", "a[2].jsonl", False),
        ("org/texts", "org/texts", True),
        ("org/texts", "org/other", False),
    ],
)
def test_patterns_are_compared_by_the_files_that_they_stand_for(tmp_path, monkeypatch, read, measured, is_known):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "a.txt"):
        (tmp_path / name).touch()
    assert warned_of(read, measured) is is_known
