"""Whether a calibration can have read the text that something is measured on: bases that knew it would flatter."""

import warnings

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.text_data import is_hub_id


def warn_of_known_text(
    calibration: Calibration, name: str, *, share: float, split: str | None = None, verb: str = "measures"
) -> None:
    """Warn where a calibration can have read documents of a text that are measured.

    Texts are compared by their names. A calibration that does not say which share it left out has left out none.

    Args:
        name: hub id or file of the text.
        share: of its documents that are measured, as `heldout_share` counts them; 0 for all.
        split: of a data set of the hub; None where all splits count.
        verb: what this run does with the text, for the warning.
    """
    record = calibration.record
    left_out = record.get("heldout_share") or 0.0
    # Only data sets of the hub have splits.
    is_another = split is not None and is_hub_id(name) and record.get("split", split) != split
    if name_of(name) not in (record.get("text") or []) or is_another:
        return
    if not share:
        warnings.warn(
            f"{calibration.origin} read `{name_of(name)}`, which this run {verb}; calibrate on other text", stacklevel=3
        )
    elif left_out < share:
        warnings.warn(
            f"{calibration.origin} read `{name_of(name)}` with `heldout_share: {left_out:g}`, and this run {verb} {share:g} "
            f"of it, so that some of these documents were read; calibrate with `--heldout_share {share:g}`",
            stacklevel=3,
        )
