"""What the falsification suite reads."""

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DTYPES
from lowrank_kv.utils.config import configuration, option, require

from ..run_setup import MeasurementConfig
from ..texts import TextConfig, check_texts

SENSITIVITIES = ("none", "layers", "heads")


@configuration
class HypothesisConfig(MeasurementConfig):
    """One run of the suite. The defaults are the paper's."""

    model: str = option(help="hub id or directory")
    dtype: str = option("float32", help="of the model", choices=DTYPES)
    texts: list[TextConfig] = option(help="texts to measure on")
    familiar: list[str] = option(
        [], help="labels of texts of a kind that the bases were calibrated on; the others are foreign to them"
    )
    prefix: int = option(512, help="length of the prompt, after which a window is scored", unit="tokens")
    length: int = option(1536, help="of a window, the prompt included", unit="tokens")
    windows: int = option(16, help="of each text", unit="windows")
    read: int | None = option(
        None,
        help="spread the windows evenly over this many of a text's first tokens; by default over all of its documents",
        unit="tokens",
    )
    step: int = option(
        MAX_DECODE_QUERIES, help="tokens read at a time after the prompt where bases move", unit="tokens"
    )
    shares: list[float] = option([0.125, 0.25, 0.5, 0.75, 0.875], help="ranks r over the head dim d")
    modest: float = option(0.25, help="the largest r / d that the paper calls modest; one of `shares`")
    thresholds: list[float] = option([0.9, 0.95, 0.98, 0.99], help="shares of energy that ranks are chosen by")
    online: list[float] = option([0.25, 0.5], help="r / d at which online bases are compared with global ones")
    refresh: int = option(64, help="m, tokens between refreshes of an online basis", unit="tokens")
    negligible: float = option(0.01, help="the largest relative increase of perplexity that counts as none")
    sensitivity: str = option(
        "heads", help="compress one layer at a time, or also one head, and see what that costs", choices=SENSITIVITIES
    )
    sensitivity_length: int = option(512, help="of a window for that at most, read in one pass", unit="tokens")
    sensitivity_windows: int = option(2, help="of each text for that at most", unit="windows")

    def __post_init__(self):
        super().__post_init__()
        check_texts(self.texts)
        labels = [text.label for text in self.texts]
        unknown = [label for label in self.familiar if label not in labels]
        require(not unknown, "familiar", self.familiar, f"labels of texts ({', '.join(labels)})")
        require(self.bases is not None or self.calibration is not None, "bases", self.bases, "given, or `calibration`")
        require(0 < self.prefix < self.length - 1, "prefix", self.prefix, "positive and below `length` by two at least")
        require(self.read is None or self.read >= self.length, "read", self.read, "at least `length`")
        for key in ("shares", "thresholds", "online"):
            values = getattr(self, key)
            require(bool(values) and all(0 < each < 1 for each in values), key, values, "numbers in (0, 1)")
            require(len(set(values)) == len(values), key, values, "different numbers")
        require(self.modest in self.shares, "modest", self.modest, "one of `shares`")
        require(0 < self.negligible < 1, "negligible", self.negligible, "in (0, 1); 0.01 is 1 %")
        require(self.sensitivity_length >= 2, "sensitivity_length", self.sensitivity_length, "at least 2")
        for key in ("windows", "refresh", "sensitivity_windows"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")

    @property
    def middle_threshold(self) -> float:
        """The threshold in the middle of their order; the lower one of two."""
        return sorted(self.thresholds)[(len(self.thresholds) - 1) // 2]
