"""Keys of a training run that say how much is kept, and at what price."""

from lowrank_kv.utils.config import configuration, option, require


@configuration
class RateConfig:
    """How the retain rate is priced."""

    alpha: float | None = option(
        None,
        help="α of L = CE + α R²; with a target, where α starts: by default where the run of `initial_checkpoint` ended, at "
        "an estimate from the calibration where that has gradients, as that of a plan, and at 4 otherwise, but "
        "that learned classes then need it",
    )
    target_retain_rate: float | None = option(
        None,
        help="with a plan the share of a token's bytes in 16 bits, by default a tenth; with gates the hard rate to end at, "
        "held by a dual update of α, and by default α is fixed (paper)",
    )
    gain: float | None = option(
        None,
        help="of the dual update: how far log α answers the rate's distance from its goal; by default 20, and 6 over the "
        "target with `learned_classes`, 1.2 over it with `joint_layers`",
    )
    layer_floor: float = option(
        0.0,
        help="hard rate below which neither α nor the calibration of τ pushes any layer's keys or values; 0 has none",
    )
    key_cost: float = option(
        1.0,
        help="how much dearer a coefficient of keys is than one of values; at the same target a higher one keeps less of "
        "keys, which decoding has to rebuild, and more of values, which it has not (1 in the paper)",
    )
    ramp: float = option(0.4, help="share of the run over which the goal falls from the first hard rate to the target")
    fix_ranks_from: float = option(
        0.5,
        help="with `compressor.rank_policy: soft_threshold`, share of the run after which the ranks that thresholds left "
        "are fixed, at the target, and only the bases learn",
    )
    calibrate_threshold: bool = option(
        True,
        help="after training, move the threshold τ, or the bounds between learned classes, so that the training text that "
        "comes next has just the target rate",
    )
    calibrate_threshold_tokens: int = option(
        16384,
        help="training text after the last step on which τ or bounds are calibrated, or ranks are allocated, or classes of "
        "tokens counted",
        unit="tokens",
    )

    def __post_init__(self):
        require(self.alpha is None or self.alpha >= 0, "alpha", self.alpha, "zero or positive")
        require(self.gain is None or 0 <= self.gain <= 1000, "gain", self.gain, "between 0 and 1000")
        if self.target_retain_rate is not None:
            require(0 < self.target_retain_rate <= 1, "target_retain_rate", self.target_retain_rate, "in (0, 1]")
            require(self.alpha != 0, "alpha", self.alpha, "positive when there is a target")
            require(
                self.layer_floor < self.target_retain_rate,
                "layer_floor",
                self.layer_floor,
                f"below `target_retain_rate`, {self.target_retain_rate}",
            )
        require(0 <= self.layer_floor < 1, "layer_floor", self.layer_floor, "in [0, 1)")
        require(self.key_cost > 0, "key_cost", self.key_cost, "positive")
        require(
            self.calibrate_threshold_tokens >= 1,
            "calibrate_threshold_tokens",
            self.calibrate_threshold_tokens,
            "at least 1",
        )
        for key in ("ramp", "fix_ranks_from"):
            require(0 <= getattr(self, key) <= 1, key, getattr(self, key), "between 0 and 1")
