"""Settings of a DynaKV compressor, saved with every checkpoint."""

from typing import Any

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.windowed.config import PREFILLS, WindowedConfig
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.stores.quantization import (
    CACHE_DTYPE_HELP,
    CACHE_DTYPES,
    GROUP_SIZE_HELP,
    REBUILD_COST_HELP,
    IntegerQuantization,
    quantization_of,
)
from lowrank_kv.stores.token_plans import MOST_CLASSES
from lowrank_kv.utils.config import build, configuration, option, require, section, to_dict
from lowrank_kv.utils.errors import UserError

METHOD = "dynakv"  # in checkpoints, and the `quant_method` of full ones
MASKS = ("hard", "soft_prefix", "straight_through")
DECODERS = ("exact", "orthogonal", "decoupled")
RANK_POLICIES = (GATE, NESTED, SOFT_THRESHOLD, PLAN) = ("gate", "nested", "soft_threshold", "plan")
LEARNED_BY_DEFAULT = PLAN  # by training that is not told what to learn

STARTS = (PCA, GRADIENT) = ("pca", "gradient")
# Settings with which training can start only from a PCA.
STARTS_FROM_PCA = {"decoder": ("orthogonal",), "rank_policy": (NESTED, SOFT_THRESHOLD)}
# What a compressor cannot be made to do after its training.
WEIGHTS_DEPEND_ON = ("decoder", "rank_policy", "token_classes", "joint_layers", "rebuild_cost")


@configuration
class DynaKVConfig:
    """How tokens are projected, gated and truncated (DynaKV, section 3)."""

    threshold: float = option(0.1, help="τ of equation 8: a coefficient is kept where its mask exceeds it")
    mask: str = option(
        "hard",
        help="what stands between the soft mask of training and the hard one of inference: `hard` keeps coefficients "
        "unattenuated (paper), `soft_prefix` stores them times the mask, `straight_through` trains on the hard mask",
        choices=MASKS,
    )
    granularity: int = option(8, help="ranks are rounded to the nearest multiple; 1 is the paper", unit="coefficients")
    decoder: str = option(
        "exact",
        help="how keys and values are rebuilt: `exact` learns any U and inverts it (paper), `orthogonal` keeps U "
        "orthogonal and transposes it, `decoupled` learns the decoder for itself, started from the inverse",
        choices=DECODERS,
    )
    rank_policy: str = option(
        "gate",
        help="what decides how many coefficients are kept: `gate`, learned for every token (paper), or `nested`, one rank "
        "for all tokens of a layer, drawn at random in training and allocated to `rate.target_retain_rate` at its end "
        "(MatryoshkaKV), or `soft_threshold`, for all tokens of a layer the coefficients above a threshold, learned at a "
        "price that holds `rate.target_retain_rate`, and then fixed (STAR-KV), or `plan`, for all tokens a number of bits "
        "for each coefficient, given before training by what the loss asks, so that a token takes "
        "`rate.target_retain_rate` of its bytes in 16 bits",
        choices=RANK_POLICIES,
    )
    token_classes: int = option(
        4,
        help="with `rank_policy: plan`: tokens are told apart by how finely the loss asks to code them, and each class has "
        "bits of its own; 1 codes all alike, 4 is most",
    )
    joint_layers: int = option(
        0,
        help="with `rank_policy: plan`: keys and values of so many consecutive layers are coded as one row of what they "
        "have in common: less loss for the same bytes, more arithmetic and larger projections; 0 codes a layer's keys, and "
        "its values, by themselves",
        unit="layers",
    )
    rebuild_cost: float = option(0.0, help=f"with `rank_policy: plan`: {REBUILD_COST_HELP}", unit="bits")
    learned_classes: bool | None = option(
        None,
        help="with `rank_policy: plan`: training also learns which class each token is in, at a price that holds "
        "`rate.target_retain_rate`; else the calibration says it. By default a training run of several classes does",
    )
    gate_decay: float = option(
        4.0, help="steepness of the gate's initial mask: its mass falls as exp(−decay · i / C) from the widest cutoff"
    )

    prefill: str | None = option(
        None,
        help="what a prompt's own attention sees when it is served: exact keys and values, or reconstructed ones; by "
        "default exact ones with `rank_policy: plan`, else reconstructed ones (paper). In training each token reads what a "
        "decoded one would",
        choices=PREFILLS,
    )
    cache_dtype: str = option("model", help=CACHE_DTYPE_HELP, choices=tuple(CACHE_DTYPES))
    group_size: int | None = option(None, help=GROUP_SIZE_HELP)
    own_directions: int = option(
        0,
        help="with `rank_policy: plan`: how many directions each sequence may have beside the learned basis for what the "
        "plan drops of its text, found when its prompt is compressed. In training, and in other passes without a cache, the "
        "first half of each document stands for its prompt",
        unit="directions",
    )
    own_directions_from: int = option(
        128,
        help="fewest tokens, compressed together as a sequence's first, in which own directions are found",
        unit="tokens",
    )
    staggered: bool = option(
        True,
        help="with `rank_policy: plan`: layers of a cache compress the tokens that wait one after the other, not all in the "
        "call of the same token. In a pass without a cache all do so together, and a token is exact as long on average",
    )
    eviction: Eviction = section(Eviction)
    exact_tokens: ExactTokens = section(ExactTokens)

    def __post_init__(self):
        if self.prefill is None:
            object.__setattr__(self, "prefill", "exact" if self.has_plan else "reconstructed")
        require(0 < self.threshold < 1, "threshold", self.threshold, "between 0 and 1; the paper uses 0.1")
        require(self.granularity >= 1, "granularity", self.granularity, "at least 1")
        require(self.gate_decay > 0, "gate_decay", self.gate_decay, "positive")
        require(
            self.has_gates or self.mask == "hard",
            "mask",
            self.mask,
            f"`hard` where `rank_policy` is {self.rank_policy}: there is no soft mask",
        )
        require(
            1 <= self.token_classes <= MOST_CLASSES, "token_classes", self.token_classes, f"from 1 to {MOST_CLASSES}"
        )
        require(
            not self.learned_classes or (self.has_plan and self.token_classes > 1),
            "learned_classes",
            self.learned_classes,
            "false, or with `rank_policy: plan` and two or more `token_classes`",
        )
        require(self.rebuild_cost >= 0, "rebuild_cost", self.rebuild_cost, "zero or positive")
        require(
            self.has_plan or not self.rebuild_cost,
            "rebuild_cost",
            self.rebuild_cost,
            "0 where `rank_policy` is not plan; `rate.key_cost` makes keys of ranks dearer",
        )
        require(self.joint_layers >= 0, "joint_layers", self.joint_layers, "zero or positive")
        require(
            self.has_plan or not self.joint_layers,
            "joint_layers",
            self.joint_layers,
            f"0 where `rank_policy` is {self.rank_policy}: only a plan of bits codes layers together",
        )
        require(
            not self.joint_layers or self.reads_prompts_exactly,
            "prefill",
            self.prefill,
            f"exact with `joint_layers: {self.joint_layers}`: training codes rows of the uncompressed model's states",
        )
        planned = {"decoder": "exact", "cache_dtype": "model", "group_size": None}
        for key, value in planned.items():
            given = getattr(self, key)
            require(
                not self.has_plan or given == value,
                key,
                given,
                f"{value} where `rank_policy` is plan (`gate` takes others)",
            )
        require(
            self.has_plan or self.exact_tokens == ExactTokens(),
            "exact_tokens",
            to_dict(self.exact_tokens),
            "left out where `rank_policy` is not plan: a ragged cache keeps no token at full rank",
        )
        require(
            self.has_plan or self.staggered,
            "staggered",
            self.staggered,
            f"left out where `rank_policy` is {self.rank_policy}: no token waits",
        )
        require(self.own_directions_from >= 1, "own_directions_from", self.own_directions_from, "at least 1")
        require(self.own_directions >= 0, "own_directions", self.own_directions, "zero or positive")
        require(
            self.has_plan or not self.own_directions,
            "own_directions",
            self.own_directions,
            f"0 where `rank_policy` is {self.rank_policy}: they find a place in a plan of bits",
        )
        self.quantization  # noqa: B018 - says what is wrong with it
        if self.has_plan:
            self.windowed  # noqa: B018 - as this does of settings that do not go together

    @property
    def has_gates(self) -> bool:
        """Whether gates choose how many coefficients of a token are kept."""
        return self.rank_policy == GATE

    @property
    def has_price(self) -> bool:
        """Whether training learns how much of a token is kept, so that keeping has a price."""
        return self.rank_policy in (GATE, SOFT_THRESHOLD) or bool(self.learned_classes)

    @property
    def has_plan(self) -> bool:
        """Whether a plan of bits says what is kept of every token."""
        return self.rank_policy == PLAN

    @property
    def reads_prompts_exactly(self) -> bool:
        """Whether the tokens of a prompt that is served attend to one another's exact keys and values."""
        return self.prefill == "exact"

    @property
    def seen_exactly(self) -> ExactTokens | None:
        """What a decoded token sees past the compressor, and so what each token sees in a pass that trains or measures; None
        where a cache compresses every token at once."""
        return self.exact_tokens if self.has_plan else None

    @property
    def windowed(self) -> WindowedConfig:
        """How a plan of bits is served."""
        return WindowedConfig(
            **to_dict(self.exact_tokens),
            staggered=self.staggered,
            own_directions=self.own_directions,
            own_directions_from=self.own_directions_from,
            joint_layers=self.joint_layers,
            eviction=self.eviction,
            prefill=self.prefill,
        )

    def overridden(self, **overrides: Any) -> "DynaKVConfig":
        """These settings with some replaced, as a user may at inference; a present value may be repeated.

        Raises:
            UserError: an unknown key, a value out of range, what the weights were trained for, or what would change nothing.
        """
        fixed = self._fixed_by_training()
        for key, value in overrides.items():
            if key in fixed and value != getattr(self, key):
                raise UserError(f"`{key}` cannot be overridden with {value!r}: {fixed[key]}")
        if overrides.get("mask") == "straight_through" != self.mask:
            raise UserError(
                "`mask` cannot be overridden with 'straight_through': that is of training; it serves as 'hard' does"
            )
        for key in ("eviction", "exact_tokens"):
            given = overrides.get(key)
            if isinstance(given, dict):  # its other keys stay as they are
                overrides[key] = {**to_dict(getattr(self, key)), **given}
        found = build(DynaKVConfig, {**to_dict(self), **overrides}, source="the overrides")
        if found.own_directions_from != self.own_directions_from and not found.own_directions:
            raise UserError(
                f"`own_directions_from` cannot be overridden with {found.own_directions_from}: `own_directions` is 0, so "
                f"that none are found; leave it out"
                + (", or give `own_directions`, too" if self.has_plan else f", as with any `rank_policy` but {PLAN}")
            )
        return found

    def _fixed_by_training(self) -> dict[str, str]:
        """Key → why nothing but training could change what it says."""
        fixed = {key: f"the weights were trained with {getattr(self, key)!r}" for key in WEIGHTS_DEPEND_ON}
        fixed["gate_decay"] = "it is how the gate starts training, and changes nothing after it; leave it out"
        fixed["learned_classes"] = "it is what training learned, and changes nothing after it; leave it out"
        if not self.has_gates:
            why = f"with `rank_policy: {self.rank_policy}` what is kept was settled by training; leave it out"
            fixed |= dict.fromkeys(("threshold", "granularity", "mask"), why)
        if self.has_plan:
            why = "its plan says how many bits each coefficient has"
            fixed |= dict.fromkeys(("cache_dtype", "group_size"), why)
        return fixed

    @property
    def can_start_from_gradients(self) -> bool:
        """Whether training can start otherwise than from a PCA with gates nearly open."""
        return not any(getattr(self, key) in refused for key, refused in STARTS_FROM_PCA.items())

    def check_gradient_start(self) -> None:
        """Raise :class:`UserError` where training can start only from a PCA with gates nearly open."""
        for key, refused in STARTS_FROM_PCA.items():
            value = getattr(self, key)
            require(value not in refused, key, value, "another, or `calibration.start: pca`")

    @property
    def quantization(self) -> IntegerQuantization | None:
        return quantization_of(self.cache_dtype, self.group_size)
