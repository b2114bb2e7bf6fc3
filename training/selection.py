"""Selection by divergence: a run with `heldout_every` ends with the step whose compressor was nearest on held-out text.

Nearest has the least KL to the uncompressed model, a mean over the held-out texts (:mod:`training.best_step` measures it).
States of that step stay on the disk until a better one is found.

Where training learns how much is kept, a step that keeps more is nearer for more bytes. There only steps count whose rate is
as near to `rate.target_retain_rate` as the calibration of τ asks, within 0.01, or within a tenth of a target that is below
0.1. The rate is that of the training text that says τ or counts classes, else the mean of the held-out texts.
"""

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import to_dict

from .data import Batch
from .finalization import RATE_ENTRIES
from .resumable_state import changed_settings
from .threshold_calibration import FAR_OFF

# Entries of the summary, the first of progress, too: what was measured, and the step that the run ends with.
MEASURED, SELECTED = "heldout_by_step", "selected_step"

_SHARE_OFF = 0.1  # of a target, where that is nearer than FAR_OFF
# Settings that decide what is measured: what was measured with others cannot be compared.
_MEASURED_BY = (
    "rate.target_retain_rate",
    "rate.layer_floor",
    "rate.calibrate_threshold",  # and its tokens
    "dataset.heldout",  # and all that selects of them
    "heldout_blocks",
    "average_checkpoints",
)


def digest_of(heldout: Mapping[str, Sequence[Batch]]) -> str:
    """SHA-256 of the held-out tokens: a file may change while its name stays."""
    digest = hashlib.sha256()
    for name, batches in heldout.items():
        digest.update(name.encode())
        for batch in batches:
            digest.update(batch.ids_BT.numpy().tobytes())
    return digest.hexdigest()


class Selection:
    """What was measured in a run so far, and which step is the best.

    Args:
        config: of the run.
        text: digest of what is held out (:func:`digest_of`).
        measured: so far, ready for JSON: ``step``, ``kl``, ``rate``, ``is_accepted``, ``states`` (the steps of the states
            that it was made of), ``texts`` (name → what :func:`training.validation.measure` found) and ``text`` (the digest)
            of each measured step.
    """

    def __init__(self, config: TrainConfig, text: str, measured: Sequence[dict[str, Any]] = ()):
        self.config, self.text, self.measured = config, text, list(measured)

    @classmethod
    def resumed(cls, config: TrainConfig, text: str, progress: dict[str, Any], *, main: bool) -> "Selection":
        """That of a state, without what was measured on other text or at another rate, of which the main process warns."""
        measured = progress.get(MEASURED, []) if config.heldout_every else []
        changed = [key for key in changed_settings(progress["config"], to_dict(config)) if key.startswith(_MEASURED_BY)]
        what = f"`{changed[0]}`" if changed else "the held-out text"
        is_other = bool(changed) or any(entry["text"] != text for entry in measured)
        if measured and is_other and main:
            warnings.warn(
                f"{what} is another than before: what was measured up to step {progress['step']} cannot be compared "
                f"with what will be, and the run selects among later steps; set it back to select among all",
                stacklevel=2,
            )
        return cls(config, text, [] if is_other else measured)

    def is_due(self, step: int) -> bool:
        """Whether to measure now, after `step` steps."""
        config = self.config
        if not config.heldout_every or any(entry["step"] == step for entry in self.measured):
            return False
        averaged_from = config.average_checkpoints * config.checkpoint_every
        return step == config.optimizer.steps or (
            step > 0 and step % config.heldout_every == 0 and step >= averaged_from
        )

    def add(self, step: int, found: dict[str, Any]) -> dict[str, Any]:
        """Add what :func:`training.finalization.finalize_and_measure` found after `step`; returns its entry."""
        texts = found["heldout"]
        on_training_text = [found[key]["hard_rate"] for key in RATE_ENTRIES if key in found]
        rates = on_training_text or [each["hard_rate"] for each in texts.values()]
        kl, rate = sum(each["kl"] for each in texts.values()) / len(texts), sum(rates) / len(rates)
        entry = {
            "step": step,
            "kl": kl,
            "rate": rate,
            "is_accepted": math.isfinite(kl) and self._accepts(rate),
            "states": found.get("averaged_steps", [step]),
            "texts": {
                name: {key: each[key] for key in ("kl", "perplexity", "hard_rate")} for name, each in texts.items()
            },
            "text": self.text,
        }
        self.measured.append(entry)
        return entry

    def _accepts(self, rate: float) -> bool:
        target = self.config.rate.target_retain_rate
        return not self.config.compressor.has_price or abs(rate - target) <= min(FAR_OFF, _SHARE_OFF * target)

    @property
    def best(self) -> dict[str, Any] | None:
        """The entry of the best step, the first of equal ones; None where none is accepted."""
        accepted = [entry for entry in self.measured if entry["is_accepted"]]
        return min(accepted, key=lambda entry: entry["kl"], default=None)

    @property
    def states_kept(self) -> list[int]:
        """The steps whose states the best one is made of."""
        return [] if self.best is None else self.best["states"]

    def progress(self) -> dict[str, Any]:
        """The entries that :meth:`resumed` reads; none where nothing is selected."""
        return {MEASURED: self.measured} if self.config.heldout_every else {}
