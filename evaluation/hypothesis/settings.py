"""What the suite measures: one setting for each protocol and ablation of the paper's plan."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Cache, PreTrainedModel

from lowrank_kv.utils.config import to_dict
from ojakv import Calibration, OjaKVCache, OjaKVConfig, Plan, make_plan

from ..methods import Method
from .config import HypothesisConfig
from .ranks import KEYS, SIDES, VALUES, HeadRanks, Spectra, adaptive_ranks, head_plan, mean_share, threshold_ranks
from .ranks import uniform_ranks as ranks_at

# Groups of settings: of the paper's protocols, and beyond them.
RANK, ENERGY, ABLATION, ONLINE, QUANTIZED = "rank", "energy", "ablation", "online", "8 bits"
JOINT, SINKS = "joint", "first tokens"
BEYOND = (JOINT, SINKS)
GLOBAL, SKETCH, OJA = "global", "frequent directions", "oja"
TRACKERS = {GLOBAL: "fixed", SKETCH: "frequent_directions", OJA: "oja"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to compress every head.

    Attributes:
        group: the protocol it belongs to.
        sides: what is compressed.
        rope: whether keys are compressed ``pre`` or ``post`` rotation.
        ranks: ``uniform``, ``adaptive`` or ``energy``.
        level: r / d, the mean of it for adaptive ranks, or the share of energy.
        tracker: ``global``, ``frequent directions`` or ``oja``.
        waits: tokens that wait at full rank to be compressed; 1 compresses each at once.
        bits: of a coefficient; None for the model's dtype.
        layout: ``per_head``, or ``joint`` for all heads of a layer together.
        sinks: first tokens that stay at full rank.
    """

    group: str
    sides: str = "both"
    rope: str = "post"
    ranks: str = "uniform"
    level: float
    tracker: str = GLOBAL
    waits: int = 1
    bits: int | None = None
    layout: str = "per_head"
    sinks: int = 0

    @property
    def label(self) -> str:
        """Its name in the results."""
        rank = f"{100 * self.level:g} % energy" if self.ranks == "energy" else f"{self.ranks} {self.level:g} d"
        parts = [rank, self.sides if self.sides != "both" else "", self.rope if self.rope == "pre" else ""]
        parts += [self.tracker if self.group == ONLINE else "", "int8" if self.bits == 8 else ""]
        parts += ["joint" if self.layout == "joint" else "", f"first {self.sinks} exact" if self.sinks else ""]
        return ", ".join(part for part in parts if part)

    @property
    def moves(self) -> bool:
        """Whether what a token is stored as depends on how the text is read."""
        return self.waits > 1

    @property
    def fields(self) -> dict[str, Any]:
        """What distinguishes it, as JSON."""
        return dataclasses.asdict(self)

    def config(self) -> OjaKVConfig:
        """The cache's settings: rebuilt states are attended everywhere, the prompt included."""
        return OjaKVConfig(
            layout=self.layout,
            rope=self.rope,
            compress=self.sides,
            ranks="energy" if self.ranks == "energy" else "fraction",
            **({"energy": self.level} if self.ranks == "energy" else {"rate": self.level}),
            tracker=TRACKERS[self.tracker],
            update_period=self.waits,
            num_sink_tokens=self.sinks,
            recent_window=0,
            prefill="reconstructed",
            cache_dtype="model" if self.bits is None else f"int{self.bits}",
        )


def settings_of(config: HypothesisConfig) -> list[Setting]:
    """Every setting of the suite, each once."""
    return list(dict.fromkeys(_settings(config)))


def _settings(config: HypothesisConfig) -> Iterator[Setting]:
    for share in config.shares:
        yield Setting(group=RANK, level=share)
    for threshold in config.thresholds:
        yield Setting(group=ENERGY, ranks="energy", level=threshold)
        yield Setting(group=ENERGY, ranks="energy", level=threshold, sides=VALUES)
    for ranks in ("uniform", "adaptive"):
        yield Setting(group=ABLATION, ranks=ranks, level=config.modest, sides=VALUES)
        for rope in ("post", "pre"):
            yield Setting(group=ABLATION, ranks=ranks, level=config.modest, sides=KEYS, rope=rope)
            if (ranks, rope) != ("uniform", "post"):
                yield Setting(group=ABLATION, ranks=ranks, level=config.modest, rope=rope)
    for share in (each for each in config.shares if each > config.modest):
        for rope in ("post", "pre"):
            yield Setting(group=ABLATION, level=share, sides=KEYS, rope=rope)
        yield Setting(group=ABLATION, level=share, sides=VALUES)
    for share in config.online:
        for tracker in TRACKERS:
            yield Setting(group=ONLINE, level=share, tracker=tracker, waits=config.refresh)
    for tracker in TRACKERS:  # ranks that match the middle threshold
        level = config.middle_threshold
        yield Setting(group=ONLINE, ranks="energy", level=level, tracker=tracker, waits=config.refresh)
    for share in (each for each in config.shares if each >= config.modest):
        yield Setting(group=QUANTIZED, level=share, bits=8)
    yield Setting(group=JOINT, level=config.modest, rope="pre", layout="joint")
    for share in (each for each in config.shares if each >= config.modest):
        yield Setting(group=SINKS, level=share, sinks=4)


def head_ranks(setting: Setting, spectra: Spectra) -> dict[str, HeadRanks]:
    """``keys``, ``values`` → the ranks of its heads; a side that is not compressed is missing."""
    sides = SIDES if setting.sides == "both" else (setting.sides,)
    rule: dict[str, Callable] = {"energy": threshold_ranks, "adaptive": adaptive_ranks}
    found = {}
    for side in sides:
        bases = spectra.of_side(side, setting.rope)
        if setting.ranks == "uniform":
            found[side] = ranks_at(bases, setting.level, at=[(index, None) for index in bases])
        else:
            found[side] = rule[setting.ranks](bases, setting.level)
        if setting.group == ONLINE:  # a moving basis has one rank for all heads of a layer
            found[side] = {index: [max(each)] * len(each) for index, each in found[side].items()}
    return found


def shares_of(setting: Setting, spectra: Spectra, head_dim: int) -> dict[str, float]:
    """Mean r / d of keys and of values; 1 where they are not compressed. Uniform ranks of a plan are so many in the mean of
    all layers, also where the share of a head is no whole number."""
    ranks = head_ranks(setting, spectra)

    def mean(ranks_of_side: HeadRanks) -> float:
        return setting.level if setting.ranks == "uniform" else mean_share(ranks_of_side, head_dim)

    return {side: mean(ranks[side]) if side in ranks else 1.0 for side in SIDES}


def method_of(setting: Setting, model: PreTrainedModel, calibration: Calibration, spectra: Spectra) -> Method:
    """The setting as a method of a comparison."""
    config = setting.config()
    has_own_ranks = setting.group != ONLINE and setting.ranks != "uniform"
    if has_own_ranks:
        plan = head_plan(calibration, spectra, config, head_ranks(setting, spectra))
    else:
        plan = make_plan(calibration, config)
    return _method(setting.label, {"setting": setting.fields}, model, plan)


def sensitivity_methods(
    config: HypothesisConfig, model: PreTrainedModel, calibration: Calibration, spectra: Spectra
) -> dict[tuple[int, int | None, str], Method]:
    """(layer, head or None for all of its heads, side) → only that compressed, at the modest rank, after rotation."""
    base = Setting(group=ABLATION, level=config.modest).config()
    geometry, found = calibration.geometry, {}
    heads = range(geometry.num_kv_heads) if config.sensitivity == "heads" else ()
    for layer in geometry.layers:
        for head in (None, *heads):
            for side in SIDES:
                ranks = ranks_at(spectra.of_side(side, "post"), config.modest, at=[(layer, head)])
                plan = head_plan(calibration, spectra, base, {side: ranks})
                name = f"{side} of layer {layer}" + ("" if head is None else f", head {head}")
                of = {"alone": [layer, head, side], "level": config.modest}
                found[layer, head, side] = _method(name, of, model, plan)
    return found


def _method(label: str, of: dict, model: PreTrainedModel, plan: Plan) -> Method:
    # With every setting, so that a cell which was measured with another default is not taken for this one.
    of = {**of, "settings": to_dict(plan.config)}

    def make(_: float | None) -> Callable[[], Cache]:
        return lambda: OjaKVCache(model, plan)

    return Method(label=label, of=of, bytes_of=None, reads_exactly=plan.config.reads_prompts_exactly, make=make)
