"""Which texts a calibration or a training has read: what is measured on one of them says nothing of unseen text."""

import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Mapping
from typing import Any

from lowrank_kv.utils.paths import files_of, name_of
from lowrank_kv.utils.text_data import is_hub_id

# One of the splits that `datasets` takes, joined by `+`: `train`, `train[:5%]`, `train[-100:]`.
_SPLIT = re.compile(r"[\w.]+(?:\[(?:(-?\d+)(%?))?:(?:(-?\d+)(%?))?\])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownText:
    """The texts of one calibration or training. They are compared with others by their names, a pattern by those of the
    files that it stands for.

    Attributes:
        reader: what was made of them, for warnings.
        record: what its files say of them, as :meth:`lowrank_kv.utils.text_data.CalibrationText.record` does: `text`, their
            names; `split`; `heldout_share`, the share of the documents that was left out, none unless it says so.
        make: what makes the reader anew, such as "calibrate".
        share_option: says there which share is left out.
    """

    reader: str
    record: Mapping[str, Any]
    make: str
    share_option: str

    def warn_of(self, name: str, *, share: float, split: str | None = None, use: str = "measures") -> None:
        """Warn where documents of a text can be among those that were read.

        Args:
            name: hub id or file of the text.
            share: of its documents that are used, as `heldout_share` counts them; 0 for all.
            split: of a data set of the hub; None where all splits count.
            use: what this run does with the text, for the warning.
        """
        left_out = self.record.get("heldout_share") or 0.0
        # Only data sets of the hub have splits.
        is_another = split is not None and is_hub_id(name) and not may_overlap(self.record.get("split") or split, split)
        read = self.record.get("text") or []
        if is_another or not any(is_named(each, known) for each in _names_of(name) for known in read):
            return
        if not share:
            warnings.warn(
                f"{self.reader} read `{name_of(name)}`, which this run {use}; {self.make} on other text", stacklevel=3
            )
        elif left_out < share:
            warnings.warn(
                f"{self.reader} read `{name_of(name)}` with `heldout_share: {left_out:g}`, and this run {use} {share:g} of "
                f"it, so that some of these documents were read; {self.make} with `{self.share_option} {share:g}`",
                stacklevel=3,
            )


def _names_of(name: str) -> list[str]:
    """A text's name, as records have it, and those of the files of a pattern."""
    return [name_of(each) for each in (name, *files_of(name))]


def is_named(name: str, known: str) -> bool:
    """Whether a name is the known one, or one of a known pattern; a file's own name may have brackets, as a pattern has."""
    return name == known or fnmatch.fnmatchcase(name, known)


def may_overlap(split: str, other: str) -> bool:
    """Whether two splits of one data set can have documents in common: ``train[:5%]`` has them with ``train``, and with
    ``train[5%:]`` it has none."""
    return any(_slices_may_overlap(one, two) for one in split.split("+") for two in other.split("+"))


def _slices_may_overlap(split: str, other: str) -> bool:
    names = {re.split(r"[\[(]", each)[0].strip() for each in (split, other)}
    if len(names) > 1 and "all" not in names:
        return False
    (start, end), (other_start, other_end) = _ends(split), _ends(other)
    return not (_is_before(end, other_start) or _is_before(other_end, start))


def _ends(split: str) -> list[tuple[str, int] | None]:
    """Start and end of a slice, each as what it counts and its number; None where that is the split's own."""
    found = _SPLIT.fullmatch(split.strip())
    if found is None:  # such as a slice with another rounding
        return [None, None]
    start, start_unit, end, end_unit = found.groups()
    return [_position(start, start_unit), _position(end, end_unit)]


def _position(number: str | None, unit: str | None) -> tuple[str, int] | None:
    if number is None:
        return None
    value = int(number)
    if unit:
        return "percent", value if value >= 0 else 100 + value
    return "from the start" if value >= 0 else "from the end", value


def _is_before(end: tuple[str, int] | None, start: tuple[str, int] | None) -> bool:
    """Whether a slice surely ends where another starts, or earlier."""
    return end is not None and start is not None and end[0] == start[0] and end[1] <= start[1]
