"""Every key of a training run. `lowrank-kv train --help` lists them."""

import dataclasses

from dynakv.config import GRADIENT, LEARNED_BY_DEFAULT, PCA, STARTS, DynaKVConfig
from dynakv.dataset_config import DatasetConfig
from dynakv.rate_config import RateConfig
from lowrank_kv.hf.loading import AUTO, DTYPE_HELP
from lowrank_kv.utils.config import configuration, option, require, section, within
from lowrank_kv.utils.drawing import check_seed

PLANNED_RATE = 0.1
COMPRESSOR, LORA, FULL = TRAINABLE = ("compressor", "lora", "full")


@configuration
class CalibrationConfig:
    """What the compressor starts from."""

    start: str | None = option(
        None,
        help="`pca`: projections from the states' PCA (paper), gates nearly open. `gradient`: from their PCA weighted by "
        "the loss's gradients, gates at the target rate, spread over layers, keys and values by the loss it costs; null is "
        "`gradient` where there is a target and the compressor can start so (`decoder`, `rank_policy`), else `pca`",
        choices=STARTS,
    )
    tokens: int = option(16384, help="leading training text that is calibrated on", unit="tokens")
    bases: str | None = option(
        None,
        help="directory written by `lowrank-kv calibrate`, with `--read_gradients true` for a plan of bits and `--gradients "
        "true` for gates that start from gradients, whose moments are used instead; runs of a sweep share one",
    )

    def __post_init__(self):
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")


@configuration
class LossConfig:
    """What is minimized beside α R²."""

    cross_entropy: float | None = option(
        None, help="weight of the cross-entropy of the text; by default 0 with a plan of bits, else 1 (paper)"
    )
    distillation: float | None = option(
        None,
        help="weight of KL(uncompressed ‖ compressed), which costs a forward pass more; by default 1 with a plan of bits, "
        "else 0; MatryoshkaKV: 0.25 beside 0.75",
    )

    def __post_init__(self):
        for key in ("cross_entropy", "distillation"):
            require((getattr(self, key) or 0) >= 0, key, getattr(self, key), "zero or positive")

    def filled_in(self, *, faithful: bool) -> "LossConfig":
        """The same with the weights that are left out: a plan is learned to be faithful to the uncompressed model."""
        cross_entropy = float(not faithful) if self.cross_entropy is None else self.cross_entropy
        distillation = float(faithful) if self.distillation is None else self.distillation
        require(cross_entropy + distillation > 0, "cross_entropy", cross_entropy, "positive, or distil")
        return LossConfig(cross_entropy=cross_entropy, distillation=distillation)


@configuration
class ReportConfig:
    """What a run shows of itself."""

    inspect_every: int = option(
        100,
        help="steps between looks at single layers and tokens: conditioning of U, gate entropy, retain rates of a fixed "
        "sentence; 0 looks only at the end",
        unit="steps",
    )
    sentence: str | None = option(None, help="the fixed sentence; by default that of the paper's Figures 4 and 5")
    peak_flops: float | None = option(
        None,
        help="what one device can do in the model's dtype, for the model FLOP utilization; by default measured once, as the "
        "best of five square matrix products",
        unit="FLOP/s",
    )

    def __post_init__(self):
        require(self.inspect_every >= 0, "inspect_every", self.inspect_every, "zero or positive")
        require(self.peak_flops is None or self.peak_flops > 0, "peak_flops", self.peak_flops, "positive")


@configuration
class OptimizerConfig:
    """AdamW, its schedule and the size of a step."""

    steps: int = option(1000, help="optimizer steps", unit="steps")
    batch_size: int = option(1, help="sequences of one process in one forward pass", unit="sequences")
    gradient_accumulation_steps: int = option(1, help="forward passes of one optimizer step", unit="passes")
    lr_projection: float | None = option(
        None,
        help="peak learning rate of the projections U; null is 5e-4 with a plan, 3e-5 where it codes layers together, of "
        "gates 1e-3 of a run that starts from gradients, else 3e-4, and as it was when a run goes on",
    )
    lr_gate: float | None = option(
        None, help="peak learning rate of the gates' W, by default 3e-3; of learned classes 1e-3, of joint rows 1.5e-4"
    )
    lr_gate_bias: float = option(
        5e-2,
        help="peak learning rate of the gates' b, one number where W has C: it moves the rate of all tokens at once; and of "
        "soft thresholds",
    )
    lr_backbone: float = option(1e-5, help="peak learning rate of the backbone, or of its LoRA adapters")
    warmup_ratio: float = option(0.05, help="share of the run over which the learning rates rise")
    min_lr_ratio: float = option(0.1, help="share of the peak rate that the cosine ends at")
    weight_decay: float = option(0.0, help="AdamW's, of the matrices of a backbone or of its adapters")
    max_grad_norm: float = option(1.0, help="largest gradient norm; 0 does not clip")

    def __post_init__(self):
        for key in ("steps", "batch_size", "gradient_accumulation_steps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        for key in ("lr_projection", "lr_gate", "lr_gate_bias", "lr_backbone", "weight_decay", "max_grad_norm"):
            require((getattr(self, key) or 0) >= 0, key, getattr(self, key), "zero or positive")
        for key in ("warmup_ratio", "min_lr_ratio"):
            require(0 <= getattr(self, key) <= 1, key, getattr(self, key), "between 0 and 1")


@configuration
class LoraConfig:
    """Adapters of `trainable: lora`, on every projection of every attention module."""

    rank: int = option(16, help="of an adapter")
    alpha: float = option(32.0, help="an adapter's output is scaled by alpha / rank")

    def __post_init__(self):
        require(self.rank >= 1, "rank", self.rank, "at least 1")
        require(self.alpha > 0, "alpha", self.alpha, "positive")


@configuration
class TrainConfig:
    """One training run."""

    model: str = option(help="hub id or directory of the model to compress")
    output: str = option("runs/dynakv", help="directory of the run: checkpoints, TensorBoard files, final checkpoint")
    dtype: str = option(
        AUTO,
        help=f"{DTYPE_HELP}; whatever is trained is held and updated in float32",
        choices=(
            "float32",
            "bfloat16",
            AUTO,
        ),  # gradients through a backbone in fp16 vanish: no engine scales its losses
    )
    initial_checkpoint: str | None = option(
        None, help="compressor checkpoint of an earlier run to train on, in place of calibrating"
    )
    self_check: bool = option(
        True,
        help="first compare the model with a full-rank compressed cache to the model by itself; not under DeepSpeed",
    )
    trainable: str = option(
        "compressor",
        help="beside the compressor: nothing, LoRA adapters on the attention's projections, or the whole backbone (the "
        "paper's continued pre-training)",
        choices=TRAINABLE,
    )
    seed: int = option(0, help="of data order, mixture, LoRA's start, dropout and drawn ranks")
    threads: int | None = option(
        None,
        help="of a process on a CPU; by default what OMP_NUM_THREADS says above 1, else its share of the machine's cores",
    )
    straight_through_from: float = option(
        0.5, help="with `compressor.mask: straight_through`, share of the run after which the hard mask is trained on"
    )
    gradient_checkpointing: bool = option(False, help="recompute activations in the backward pass to save memory")
    checkpoint_every: int = option(200, help="steps between resumable checkpoints; 0 writes none", unit="steps")
    keep_checkpoints: int = option(2, help="resumable checkpoints kept", unit="checkpoints")
    average_checkpoints: int = option(
        0,
        help="end with the mean of what is trained in the last so many resumable checkpoints instead of what the last step "
        "left, which a few sequences shook; steps after the last checkpoint do not count; 0 does not",
        unit="checkpoints",
    )
    max_loss_increase: float = option(
        3.0,
        help="stop when the cross-entropy, averaged over about 20 steps, is this far above its lowest; 0 never does",
        unit="nats",
    )
    log_every: int = option(1, help="steps between TensorBoard rows", unit="steps")
    heldout_blocks: int = option(4, help="held-out sequences measured at the end", unit="sequences")
    heldout_every: int = option(
        0,
        help="steps between measurements of the held-out texts, of which the one of least mean KL says what the run ends "
        "with; 0 measures at the end only, and ends with the last step",
        unit="steps",
    )
    full_checkpoint: bool = option(False, help="also write backbone and compressor together, for from_pretrained")
    dataset: DatasetConfig = section(DatasetConfig)
    calibration: CalibrationConfig = section(CalibrationConfig)
    compressor: DynaKVConfig = section(DynaKVConfig, rank_policy=LEARNED_BY_DEFAULT)
    rate: RateConfig = section(RateConfig)
    loss: LossConfig = section(LossConfig)
    report: ReportConfig = section(ReportConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    lora: LoraConfig = section(LoraConfig)

    def __post_init__(self):
        self._fill_in()
        require(self.keep_checkpoints >= 1, "keep_checkpoints", self.keep_checkpoints, "at least 1")
        self._check_average()
        self._check_selection()
        check_seed(self.seed, "seed")
        require(self.log_every >= 1, "log_every", self.log_every, "at least 1")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1, or null")
        for key in ("checkpoint_every", "heldout_blocks"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "zero or positive")
        require(
            self.initial_checkpoint is None or self.calibration.bases is None,
            "initial_checkpoint",
            self.initial_checkpoint,
            "null where `calibration.bases` is given: a run starts from one of them",
        )
        require(0 <= self.straight_through_from <= 1, "straight_through_from", self.straight_through_from, "0 to 1")
        require(self.max_loss_increase >= 0, "max_loss_increase", self.max_loss_increase, "zero or positive")
        if self.calibration.start == GRADIENT and self.initial_checkpoint is None:
            require(
                self.rate.target_retain_rate is not None,
                "rate.target_retain_rate",
                None,
                "given where `calibration.start` is gradient: gates start at it",
            )
            with within("compressor."):
                self.compressor.check_gradient_start()
        policy = self.compressor.rank_policy
        if not self.compressor.has_gates:
            require(
                self.rate.target_retain_rate is not None,
                "rate.target_retain_rate",
                None,
                f"given where `compressor.rank_policy` is {policy}: it says what is allocated",
            )
        if not self.compressor.has_price:
            for key, unused in (("alpha", None), ("key_cost", 1.0), ("layer_floor", 0.0)):
                value, wanted = getattr(self.rate, key), "left out" if unused is None else f"{unused:g}"
                require(value == unused, f"rate.{key}", value, f"{wanted} where `compressor.rank_policy` is {policy}")
        if self.compressor.joint_layers:
            cost = self.rate.key_cost
            require(
                cost == 1, "rate.key_cost", cost, "1 with `compressor.joint_layers`: keys and values share their rows"
            )
        if self.compressor.has_plan:
            start = self.calibration.start
            require(start != PCA, "calibration.start", start, "`gradient`, or left out, with a plan of bits")
        if self.trainable == FULL:
            require(
                not self.loss.distillation,
                "loss.distillation",
                self.loss.distillation,
                "0 with `trainable: full`, which leaves no uncompressed model to learn from; `loss.cross_entropy: 1` learns "
                "from text",
            )

    def _fill_in(self) -> None:
        """Set what is left out and depends on other sections."""
        has_plan = self.compressor.has_plan
        if self.compressor.learned_classes is None:
            learned = has_plan and self.compressor.token_classes > 1
            object.__setattr__(self, "compressor", dataclasses.replace(self.compressor, learned_classes=learned))
        with within("loss."):
            object.__setattr__(self, "loss", self.loss.filled_in(faithful=has_plan))
        if has_plan and self.rate.target_retain_rate is None:
            object.__setattr__(self, "rate", dataclasses.replace(self.rate, target_retain_rate=PLANNED_RATE))

    @property
    def starts_from_gradients(self) -> bool:
        """What `calibration.start` comes to."""
        start, compressor = self.calibration.start, self.compressor
        if start is None and self.rate.target_retain_rate is not None and compressor.can_start_from_gradients:
            start = GRADIENT
        return start == GRADIENT and self.initial_checkpoint is None

    @property
    def calibrates_threshold(self) -> bool:
        """Whether τ is moved after training, so that the hard rate is the target."""
        rate = self.rate
        return self.compressor.has_gates and rate.target_retain_rate is not None and rate.calibrate_threshold

    @property
    def calibrates_bounds(self) -> bool:
        """Whether the bounds between classes are moved after training, so that tokens take the target."""
        return self.compressor.has_plan and self.compressor.has_price and self.rate.calibrate_threshold

    @property
    def gain(self) -> float:
        """What `rate.gain` comes to."""
        if self.rate.gain is not None:
            return self.rate.gain
        if not self.compressor.has_plan:
            return 20.0
        # The rate of joint rows goes with the text of a step, by a tenth of the target; the price is to go with the gates.
        return (1.2 if self.compressor.joint_layers else 6) / self.rate.target_retain_rate

    @property
    def lr_gate(self) -> float:
        """What `optimizer.lr_gate` comes to."""
        given, compressor = self.optimizer.lr_gate, self.compressor
        if given is not None:
            return given
        if compressor.has_plan:
            # A token's score sums over all coefficients, of which joint rows have six times as many: equal steps of each
            # move it as much further, and the rate with it.
            return 1.5e-4 if compressor.joint_layers else 1e-3
        return 3e-3

    @property
    def lr_projection(self) -> float:
        """What `optimizer.lr_projection` comes to."""
        given, compressor = self.optimizer.lr_projection, self.compressor
        if given is not None:
            return given
        if compressor.has_plan:
            # Rows of several layers have many times as many directions, which noise moves further, and less to gain.
            return 3e-5 if compressor.joint_layers else 5e-4
        return 1e-3 if self.starts_from_gradients else 3e-4

    def _check_average(self) -> None:
        key, count = "average_checkpoints", self.average_checkpoints
        require(count >= 0, key, count, "zero or positive")
        require(count <= self.keep_checkpoints, key, count, f"at most `keep_checkpoints`, {self.keep_checkpoints}")
        if count:
            written = self.optimizer.steps // self.checkpoint_every if self.checkpoint_every else 0
            require(count <= written, key, count, f"at most the {written} that `checkpoint_every` writes in a run")

    def _check_selection(self) -> None:
        every, saved, steps = self.heldout_every, self.checkpoint_every, self.optimizer.steps
        require(0 <= every <= steps, "heldout_every", every, f"from 0 to `optimizer.steps`, {steps}")
        is_measured = bool(self.heldout_blocks and (self.dataset.heldout or self.dataset.heldout_share))
        is_held = not self.compressor.has_price or self.rate.target_retain_rate is not None
        for holds, remedy in (
            (is_measured, "0 without text to measure: give `dataset.heldout` or `dataset.heldout_share`"),
            (saved, "0 without `checkpoint_every`, whose states hold what is best: give that, too"),
            (every % (saved or 1) == 0, f"a multiple of `checkpoint_every`, {saved}, whose states hold what is best"),
            (is_held, "0 at a fixed price, where what keeps most is nearest: give `rate.target_retain_rate`"),
            (self.trainable != FULL, "0 with `trainable: full`, which leaves no uncompressed model to be near to"),
        ):
            require(not every or holds, "heldout_every", every, remedy)
