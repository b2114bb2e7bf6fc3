"""Which texts are known again, by what names."""

import warnings

import pytest

from lowrank_kv.calibration.known_text import KnownText


def warned_of(read: str, name: str, *, read_split: str | None = None, split: str | None = None) -> bool:
    record = {"text": [read], "split": read_split}
    known = KnownText(reader="it", record=record, make="calibrate", share_option="--heldout_share")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known.warn_of(name, share=0.0, split=split)
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


@pytest.mark.parametrize(
    ("read", "measured", "is_known"),
    [
        ("train", "train", True),
        ("train", "test", False),
        (None, "test", True),
        ("train", "train[:1%]", True),
        ("train[:1%]", "train", True),
        ("train[:1%]", "test[:1%]", False),
        ("train[5%:]", "train[:5%]", False),
        ("train[5%:]", "train[:6%]", True),
        ("train[:-5%]", "train[-5%:]", False),
        ("train[:-5%]", "train[95%:]", False),
        ("train[100:]", "train[:100]", False),
        ("train[100:]", "train[50:101]", True),
        ("train[:-100]", "train[-100:]", False),
        ("train[100:]", "train[:5%]", True),
        ("train[5%:](pct1_dropremainder)", "train[:5%]", True),
        ("train[:5%]+test", "train[5%:]+validation", False),
        ("train + test", "test", True),
        ("all", "test", True),
    ],
)
def test_splits_are_one_text_where_they_may_have_documents_in_common(read, measured, is_known):
    assert warned_of("org/texts", "org/texts", read_split=read, split=measured) is is_known
