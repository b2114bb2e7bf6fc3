"""Settings of an OjaKV cache, and the named presets of it (OjaKV, Algorithm 1; SubSpace-G and SubSpace-A)."""

import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lowrank_kv.bases.pca import LAYOUTS, ROPE_SIDES
from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.stores.quantization import (
    CACHE_DTYPE_HELP,
    CACHE_DTYPES,
    GROUP_SIZE_HELP,
    MIXED,
    REBUILD_COST_HELP,
    IntegerQuantization,
    quantization_of,
)
from lowrank_kv.stores.token_plans import MOST_CLASSES
from lowrank_kv.utils.config import build, configuration, option, read_yaml, require
from lowrank_kv.utils.errors import UserError, nearest

TRACKERS = ("fixed", "oja", "frequent_directions")
UPDATES = ("periodic", "triggered")
RANKS = ("fraction", "energy", "budget")
COMPRESSED = ("both", "keys", "values")
ENERGY, LOSS = "energy", "loss"

_PRESETS = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


# Keys, others, and at which values of these they have an effect.
_EFFECTS: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[..., bool]], ...] = (
    (
        (
            *("learning_rate", "decode_learning_rate", "prompt_steps", "prior_tokens"),
            *("pool", "update", "trigger", "max_loss", "max_drift"),
        ),
        ("tracker",),
        lambda tracker: tracker != "fixed",
    ),
    (("preconditioned", "update_window"), ("tracker",), lambda tracker: tracker == "oja"),
    (("prior_tokens", "update_window"), ("preconditioned",), bool),
    (("trigger",), ("update",), lambda update: update == "triggered"),
    (("energy",), ("ranks",), lambda ranks: ranks == "energy"),
    (("rate",), ("ranks",), lambda ranks: ranks != "energy"),
    (("key_weight",), ("ranks",), lambda ranks: ranks == "budget"),
    (("key_weight",), ("weigh_by",), lambda weigh_by: weigh_by == ENERGY),
    (
        ("observation_window", "score_pool"),
        ("full_rank_ratio", "eviction.keep_ratio"),
        lambda full_rank, kept: full_rank > 0 or kept < 1,
    ),
    (("own_directions_from",), ("own_directions",), bool),
    (("staggered",), ("update_period",), lambda period: period > 1),
)


@configuration
class OjaKVConfig(WindowedConfig):
    """Which states the bases represent, how large they are, how they follow the text, and which tokens stay at full rank."""

    # which states the bases represent
    layout: str = option("joint", help="one basis for each KV head, or one for all of a layer", choices=LAYOUTS)
    rope: str = option("pre", help="compress keys before or after rotation", choices=ROPE_SIDES)
    query_key: bool = option(
        False,
        help="find the keys' basis from queries and keys together (appendix A.3); layout per_head, rope post only",
    )
    compress: str = option("both", help="what is compressed; the others are stored as they are", choices=COMPRESSED)
    weigh_by: str = option(
        ENERGY,
        help="what bases that stay lose least of: the energy of the states, or the model's loss, by a calibration with "
        "`read_gradients`",
        choices=(ENERGY, LOSS),
    )

    # how large they are
    ranks: str = option(
        "budget",
        help="`rate` of every width; or as many as hold `energy`, the most over a layer's heads; or `rate` of all widths, "
        "spread over layers, keys and values by water-filling",
        choices=RANKS,
    )
    rate: float = option(
        0.6,
        help="share kept of each compressed token: of its coefficients, or where `cache_dtype` is mixed of its bytes in 16 "
        "bits",
    )
    energy: float = option(0.95, help="share of the calibration energy kept, where `ranks` is energy")
    rank_multiple: int = option(
        1,
        help="ranks are multiples of it, or the whole width: 16 fills the registers of a CPU and the wide loads of a GPU, "
        "32 those of int4",
        unit="coefficients",
    )
    key_weight: float = option(
        4.0,
        help="how much more a lost share of the keys' energy counts than one of the values', where `ranks` is budget",
    )

    # how they follow the text
    tracker: str = option("oja", help="how the bases move", choices=TRACKERS)
    learning_rate: float = option(1.0, help="η of the prompt's steps")
    decode_learning_rate: float = option(1.0, help="η of the steps while decoding")
    prompt_steps: int = option(2, help="steps repeated on the prompt's states", unit="steps")
    preconditioned: bool = option(
        True, help="divide each direction's Oja step by its energy; η = 1 is then one orthogonal iteration"
    )
    prior_tokens: float = option(
        32.0,
        help="how much the calibration counts for in sketches, and in a sequence's first preconditioned steps",
        unit="tokens",
    )
    update_window: int | None = option(
        None,
        help="preconditioned steps weigh new tokens against so many of the latest stored ones, null against all; fewer let "
        "the bases leave an old subspace sooner, as far as `max_loss` allows",
        unit="tokens",
    )
    pool: int = option(1, help="states averaged together before a step", unit="tokens")
    update: str = option("periodic", help="step at every T tokens, or only when needed", choices=UPDATES)
    trigger: float = option(
        0.2,
        help="a triggered update waits until the residuals since the last one exceed, by this much in sum, what updates "
        "would have left of them",
        unit="times",
    )
    max_loss: float = option(
        0.01,
        help="most energy of stored coefficients one update may lose, of all and with outliers held down; the step is "
        "halved until it does not",
    )
    max_drift: float | None = option(
        None,
        help="most that all updates together may move what is stored, as a bound on ‖now − when stored‖ / ‖now‖ of all rows "
        "of a layer's keys or values; steps that would exceed it are halved or left out; null has no bound",
    )

    # how coefficients are held
    cache_dtype: str = option(
        "model",
        help=f"{CACHE_DTYPE_HELP}; or `{MIXED}`, each coefficient in as many bits as the loss asks of it, at `rate` of the "
        f"bytes of a token in 16 bits; needs a calibration with `read_gradients` or `read_energy`",
        choices=(*CACHE_DTYPES, MIXED),
    )
    group_size: int | None = option(None, help=GROUP_SIZE_HELP)
    token_classes: int = option(
        1,
        help=f"with `{MIXED}`: tokens are told apart by how finely the loss asks to code them, and each class has bits of "
        "its own; 1 codes all alike, 4 is most",
    )
    rebuild_cost: float = option(0.0, help=f"with `{MIXED}`: {REBUILD_COST_HELP}", unit="bits")

    def __post_init__(self):
        super().__post_init__()
        share = "in (0, 1]"
        require(0 < self.rate <= 1, "rate", self.rate, f"{share}; 0.1 keeps a tenth")
        require(0 < self.energy <= 1, "energy", self.energy, f"{share}; 0.95 keeps 95 % of the energy")
        require(self.key_weight > 0, "key_weight", self.key_weight, "positive")
        for key in ("learning_rate", "decode_learning_rate", "prior_tokens", "trigger"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "zero or positive")
        for key in ("learning_rate", "decode_learning_rate"):
            require(
                self.tracker != "frequent_directions" or getattr(self, key) in (0, 1),
                key,
                getattr(self, key),
                "0 or 1 with `tracker: frequent_directions`: a sketch has no step size, and 0 leaves bases as they are",
            )
        require(0 <= self.max_loss <= 1, "max_loss", self.max_loss, "in [0, 1]; 0.01 loses 1 % of the energy at most")
        require(self.max_drift is None or self.max_drift >= 0, "max_drift", self.max_drift, "zero or positive, or null")
        require(
            self.update_window is None or self.update_window >= 1,
            "update_window",
            self.update_window,
            "at least 1, or null for all",
        )
        for key in ("rank_multiple", "prompt_steps", "pool"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(
            not self.full_rank_ratio or self.compress != "values",
            "full_rank_ratio",
            self.full_rank_ratio,
            "0 with `compress: values`: tokens are chosen by what compression takes from their keys",
        )
        require(
            not self.query_key or (self.layout, self.rope) == ("per_head", "post"),
            "query_key",
            self.query_key,
            f"false with layout {self.layout} and rope {self.rope}: queries and keys share a head and a rotation only in "
            f"layout per_head with rope post",
        )

        if self.weigh_by == LOSS:
            self._check_weighed_by_loss()
        require(
            1 <= self.token_classes <= MOST_CLASSES, "token_classes", self.token_classes, f"from 1 to {MOST_CLASSES}"
        )
        require(
            self.token_classes == 1 or self.has_plan,
            "cache_dtype",
            self.cache_dtype,
            f"{MIXED} with `token_classes: {self.token_classes}`: classes differ in their bits; leave it out, or take a "
            f"preset without classes, such as `static-joint-pf`",
        )
        require(self.rebuild_cost >= 0, "rebuild_cost", self.rebuild_cost, "zero or positive")
        require(
            not self.rebuild_cost or self.has_plan,
            "rebuild_cost",
            self.rebuild_cost,
            f"0 with `cache_dtype: {self.cache_dtype}`: only `{MIXED}` chooses between coefficients and bits",
        )
        require(
            not self.joint_layers or self.has_plan,
            "joint_layers",
            self.joint_layers,
            f"0 with `cache_dtype: {self.cache_dtype}`; only `{MIXED}` has a basis of keys and values together",
        )
        require(
            not self.own_directions or self.has_plan,
            "own_directions",
            self.own_directions,
            f"0 with `cache_dtype: {self.cache_dtype}`; only `{MIXED}` has a plan that they find a place in",
        )
        if self.has_plan:
            self._check_plan()
        self.integers  # noqa: B018 - raises where the two do not fit

    def _check_weighed_by_loss(self) -> None:
        """Raise :class:`UserError` where bases cannot be weighed by the loss, or are in any case."""
        require(
            not self.has_plan,
            "weigh_by",
            self.weigh_by,
            f"left out with `cache_dtype: {MIXED}`, whose plan is weighed by what the calibration took",
        )
        require(
            not self.follows_text,
            "weigh_by",
            self.weigh_by,
            f"{ENERGY} with `tracker: {self.tracker}`, which follows the energy of the text; `adaptive-mixed` has "
            "directions of the text's own by the loss",
        )
        for key, value in (("rope", "pre"), ("query_key", False)):
            given = getattr(self, key)
            require(
                given == value, key, given, f"{value} with `weigh_by: {LOSS}`: gradients are of keys before rotation"
            )

    def _check_plan(self) -> None:
        """Raise :class:`UserError` where a plan of bits would not be what is asked for."""
        served = {
            "tracker": "fixed",
            "layout": "joint",
            "rope": "pre",
            "compress": "both",
            "query_key": False,
            "ranks": "budget",
            "group_size": None,
            **{key: type(self).__dataclass_fields__[key].default for key in ("energy", "rank_multiple", "key_weight")},
        }
        for key, value in served.items():
            given = getattr(self, key)
            require(
                given == value,
                key,
                given,
                f"{value} with `cache_dtype: {MIXED}`, whose plan says what is kept of a token",
            )

    @property
    def has_plan(self) -> bool:
        """Whether coefficients are held by a plan of bits."""
        return self.cache_dtype == MIXED

    @property
    def needs_read(self) -> bool:
        """Whether it is made from what a calibration says of what is read of a compressed cache."""
        return self.has_plan or self.weigh_by == LOSS

    @property
    def integers(self) -> IntegerQuantization | None:
        """How coefficients are held as integers of one width; None where they are not."""
        return None if self.has_plan else quantization_of(self.cache_dtype, self.group_size)

    @property
    def rotates(self) -> bool:
        return self.rope == "pre" and self.compress != "values"

    @property
    def follows_text(self) -> bool:
        return self.tracker != "fixed"

    @classmethod
    def preset(cls, name: str, *, rate: float | None = None, **overrides: Any) -> "OjaKVConfig":
        """A named preset (see :data:`PRESETS`) with some of its keys replaced; its own rate where none is given.

        Raises:
            UserError: unknown preset or key, a value out of range, or one that changes nothing.
        """
        if name not in PRESETS:
            raise UserError(f"unknown preset `{name}`; {nearest(str(name), PRESETS, 'presets')}")
        overrides |= {} if rate is None else {"rate": rate}
        values, source = read_yaml(_PRESETS / f"{name}.yaml"), f"preset {name}"
        config, own = (build(cls, {**values, **changed}, source=source) for changed in (overrides, {}))
        config._check_effects([key for key in overrides if getattr(config, key) != getattr(own, key)])
        return config

    def _check_effects(self, changed: Iterable[str]) -> None:
        """Raise :class:`UserError` where a setting was changed that another one leaves without an effect."""
        for key in changed:
            for keys, others, has_effect in _EFFECTS:
                if key not in keys:
                    continue
                values = [operator.attrgetter(other)(self) for other in others]
                told = " and ".join(f"`{other}: {value}`" for other, value in zip(others, values, strict=True))
                require(has_effect(*values), key, getattr(self, key), f"left out with {told}, where it changes nothing")
