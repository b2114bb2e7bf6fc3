"""What the figures say of H0 and of each claim that the paper lets one refute, each by a rule that stands beside it.

"The paper" is "Low-Rank KV Cache Subspaces in Decoding: A Testable Hypothesis". An increase of perplexity is *negligible*
where the whole 95 % interval lies at or below the threshold (1 %), and *real* where the whole interval lies above it.
Otherwise the windows do not suffice, and the verdict is "undecided".
"""

import dataclasses
import statistics
from collections.abc import Callable

from ..scores import rank_correlation
from .config import HypothesisConfig
from .evidence import Estimate, Evidence, HeadRow, Measured
from .ranks import KEYS, SIDES, VALUES
from .settings import ABLATION, BEYOND, ENERGY, GLOBAL, JOINT, OJA, ONLINE, QUANTIZED, RANK, SINKS, SKETCH

REFUTED, HOLDS, PARTLY, UNDECIDED, WEAK = "refuted", "holds", "holds in part", "undecided", "weak or unnecessary"
# A rank is near the head dim above this share of it; an increase of a rank is modest up to this factor.
NEAR, MODEST_FACTOR = 0.75, 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim, judged.

    Attributes:
        claim: the paper's, shortened.
        rule: how the verdict follows from the figures.
        verdict: one of the words above.
        because: the figures that decided.
    """

    claim: str
    rule: str
    verdict: str
    because: str


def verdicts(config: HypothesisConfig, evidence: Evidence) -> dict[str, Verdict]:
    """Every verdict, by a short name."""
    rules: dict[str, Callable[[HypothesisConfig, Evidence], Verdict]] = {
        "h0": _h0,
        "h1": _h1,
        "quarter": _quarter,
        "online": _online,
        "rope": _rope,
        "modest-rope": _modest_rope,
        "energy": _energy,
        "adaptive": _adaptive,
        "sides": _sides,
        "eight-bits": _eight_bits,
        "memory": _memory,
        "worst-heads": _worst_heads,
        "drift": _drift,
        "joint": _joint,
        "sinks": _sinks,
    }
    return {name: rule(config, evidence) for name, rule in rules.items()}


def is_negligible(estimate: Estimate, config: HypothesisConfig) -> bool:
    return estimate.high <= config.negligible


def is_real(estimate: Estimate, config: HypothesisConfig) -> bool:
    return estimate.low > config.negligible


def _judged(shown: list[bool], excluded: list[bool]) -> str:
    """A claim on several settings, from those for which the windows show it and those for which they exclude it."""
    if not shown:
        return UNDECIDED  # nothing was measured that could tell
    if all(shown):
        return HOLDS
    if any(shown):
        return PARTLY
    return REFUTED if all(excluded) else UNDECIDED


def _within(config: HypothesisConfig, evidence: Evidence) -> list[Measured]:
    """The paper's settings with mean ranks of at most the modest share."""
    return [each for each in _of_the_paper(evidence) if each.is_at_most(config.modest)]


def _of_the_paper(evidence: Evidence) -> list[Measured]:
    """Heads apart, the model's dtype, every token compressed at once, so that none is read at full rank."""
    return [
        each for each in evidence.settings if each.setting.group not in (*BEYOND, QUANTIZED) and not each.setting.moves
    ]


def _best(settings: list[Measured]) -> Measured:
    return min(settings, key=lambda each: each.increase().value)


def _quarter_says(config: HypothesisConfig, evidence: Evidence) -> tuple[bool, bool, str]:
    """(some setting is negligible, every setting is real, the best one in words)."""
    within = _within(config, evidence)
    best = _best(within)
    return (
        any(is_negligible(each.increase(), config) for each in within),
        all(is_real(each.increase(), config) for each in within),
        f"of {len(within)} settings the best is `{best.setting.label}`: {best.increase().words}",
    )


def _h0(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    negligible, real, best = _quarter_says(config, evidence)
    return Verdict(
        claim=f"H0: modest ranks (r ≤ {config.modest:g} d) cause significant degradation",
        rule="holds if the increase is real for every setting with mean ranks of keys and of values up to there; refuted if "
        "it is negligible for one",
        verdict=HOLDS if real else REFUTED if negligible else UNDECIDED,
        because=best,
    )


def _quarter(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    negligible, real, best = _quarter_says(config, evidence)
    return Verdict(
        claim=f"falsifier 1: if no setting with r and r_v ≤ {config.modest:g} d stays within {config.negligible:.0%}, the "
        "hypothesis is refuted",
        rule="refuted if the increase is real for every one of these settings; holds if it is negligible for one",
        verdict=REFUTED if real else HOLDS if negligible else UNDECIDED,
        because=best,
    )


def _h1(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    both = [each for each in _of_the_paper(evidence) if each.setting.sides == "both"]
    fine = [each for each in both if is_negligible(each.increase(), config)]
    least = min(fine, key=_mean_share, default=None)
    if least is None:
        because = f"no measured rank below d is; the best, `{_best(both).setting.label}`, costs "
        because += _best(both).increase().words
    else:
        because = f"`{least.setting.label}` with a mean r / d of {_mean_share(least):.2f}: {least.increase().words}"
    share = 1.0 if least is None else _mean_share(least)
    far_below = [each for each in both if _mean_share(each) <= 0.5]
    verdict = HOLDS if share <= config.modest else PARTLY if share <= 0.5 else UNDECIDED
    if verdict == UNDECIDED and far_below and all(is_real(each.increase(), config) for each in far_below):
        verdict = REFUTED
    return Verdict(
        claim=f"H1: there are ranks ≪ d at which perplexity rises by at most {config.negligible:.0%}",
        rule=f"holds if the least mean r / d with a negligible increase is at most {config.modest:g}, in part up to 0.5, "
        "refuted if the increase is real for all of these; accuracies of tasks are not part of it",
        verdict=verdict,
        because=because,
    )


def _mean_share(each: Measured) -> float:
    return sum(each.shares.values()) / len(each.shares)


def _online(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    told, better = [], {SKETCH: [], OJA: []}
    for start in evidence.find(group=ONLINE, tracker=GLOBAL):
        same = {"group": ONLINE, "ranks": start.setting.ranks, "level": start.setting.level}
        for tracker, found in better.items():
            [moving] = evidence.find(**same, tracker=tracker)
            against = moving.against(start)
            found.append(against)
            told.append(f"`{moving.setting.label}` against global: {against.words}")
    shown = [[against.high < 0 for against in found] for found in better.values()]
    gains = [against.low < -config.negligible for found in better.values() for against in found]
    verdict = PARTLY if any(map(any, shown)) else UNDECIDED if any(gains) else WEAK
    return Verdict(
        claim="falsifier 2: unless online bases outperform global ones at the same rank, adaptivity is weak or unnecessary",
        rule="holds if one kind of online basis is better at every rank compared, its whole interval below zero; in part if "
        f"at some; weak or unnecessary if all intervals exclude a gain of {config.negligible:.0%}. Both wait equally long "
        "at full rank",
        verdict=HOLDS if any(map(all, shown)) else verdict,
        because="; ".join(told),
    )


def _rope(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    keys = list(evidence.find(group=ABLATION, sides=KEYS, rope="post", ranks="uniform"))
    fine = [each for each in keys if is_negligible(each.increase(), config)]
    share = min((each.setting.level for each in fine), default=1.0)
    below = [each for each in keys if each.setting.level <= NEAR]
    needs_more = bool(below) and all(is_real(each.increase(), config) for each in below)
    heads = evidence.heads_of(KEYS, "post")
    threshold = config.middle_threshold
    near = sum(row.ranks[threshold] > NEAR * evidence.head_dim for row in heads) / len(heads)
    least = f"r = {share:g} d is the least" if fine else "no rank below d"
    return Verdict(
        claim="falsifier 3: if RoPE destroys low-rank structure (ranks near d), the hypothesis fails in practice",
        rule=f"refuted if rotated keys need r > {NEAR:g} d in all heads for a negligible increase, and over half of the "
        f"heads need it for {threshold:.0%} of their energy; in part if one of the two; undecided where no increase "
        "is shown to be negligible at such a rank, nor all of them to be more",
        verdict={0: HOLDS, 1: PARTLY, 2: REFUTED}[int(needs_more) + int(near > 0.5)]
        if needs_more or share <= NEAR
        else UNDECIDED,
        because=f"keys only: {least} with a negligible increase; {near:.0%} of the heads need more than {NEAR:g} d for "
        f"{threshold:.0%} of their energy",
    )


def _modest_rope(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    threshold = config.middle_threshold
    pre, post = (_mean([row.ranks[threshold] for row in evidence.heads_of(KEYS, rope)]) for rope in ("pre", "post"))
    uniform = {"group": ABLATION, "sides": KEYS, "ranks": "uniform", "level": config.modest}
    [before], [after] = (evidence.find(**uniform, rope=rope) for rope in ("pre", "post"))
    return Verdict(
        claim="RoPE spreads energy over paired dims, which modest increases in r accommodate",
        rule=f"holds if heads need at most {MODEST_FACTOR:g} times the rank for {threshold:.0%} of rotated keys' energy",
        verdict=HOLDS if post <= MODEST_FACTOR * pre else REFUTED,
        because=f"mean rank {post:.1f} of rotated keys, {pre:.1f} before rotation; at r = {config.modest:g} d rotated keys "
        f"against unrotated ones: {after.against(before).words}",
    )


def _energy(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    found = evidence.find(group=ENERGY, sides=VALUES)
    asked = [each.increase() for each in found if each.setting.level >= 0.95]
    told = (f"{e.setting.level:.0%}: r_v / d {e.shares[VALUES]:.2f}, {e.increase().words}" for e in found)
    return Verdict(
        claim="choosing r_v by energy (95 to 99 %) bounds the output error",
        rule="holds if values alone at every threshold from 95 % cost a negligible increase, in part if at one, refuted if "
        "the increase is real at all",
        verdict=_judged([is_negligible(each, config) for each in asked], [is_real(each, config) for each in asked]),
        because="; ".join(told),
    )


def _adaptive(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    told, better, worse = [], [], []
    for rope in ("post", "pre"):
        for sides in ("both", KEYS, VALUES):
            adaptive = evidence.find(group=ABLATION, ranks="adaptive", sides=sides, rope=rope)
            uniform = [
                each
                for each in evidence.find(ranks="uniform", level=config.modest, sides=sides, rope=rope)
                if each.setting.group in (RANK, ABLATION)
            ]
            for one, other in zip(adaptive, uniform, strict=True):
                against = one.against(other)
                better.append(against.high < 0)
                worse.append(against.low >= 0)
                told.append(f"{sides}, {rope}: {against.words}")
    return Verdict(
        claim="ranks of each head by its spectrum are better than one rank for all",
        rule="holds if they are better in every pair of equal mean rank, the whole interval below zero; in part if in some; "
        "refuted if better in none, the whole interval above",
        verdict=_judged(better, worse),
        because=f"better in {sum(better)}, worse in {sum(worse)} of {len(told)}: " + "; ".join(told),
    )


def _sides(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    uniform = {"group": ABLATION, "ranks": "uniform", "rope": "post", "level": config.modest}
    [keys], [values] = (evidence.find(**uniform, sides=side) for side in SIDES)
    against = keys.against(values)
    which = "keys" if against.low > 0 else "values" if against.high < 0 else "neither"
    return Verdict(
        claim="keys-only and values-only ablations tell what costs more",
        rule="the side whose compression costs more, the whole interval of the difference on one side of zero",
        verdict=f"{which} cost more" if which != "neither" else UNDECIDED,
        because=f"at r = {config.modest:g} d: keys {keys.increase().words}, values {values.increase().words}",
    )


def _eight_bits(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    told, increases = [], []
    for whole in evidence.find(group=RANK):
        for rounded in evidence.find(group=QUANTIZED, level=whole.setting.level):
            increases.append(rounded.against(whole))
            told.append(f"{whole.setting.level:g} d: {increases[-1].words}")
    return Verdict(
        claim="coefficients can be stored in 8 bits with minor impact, multiplying the gain",
        rule="holds if the increase over 16 or 32 bits is negligible at every rank, in part if at some, refuted if it is "
        "real at all",
        verdict=_judged(
            [is_negligible(each, config) for each in increases], [is_real(each, config) for each in increases]
        ),
        because="; ".join(told),
    )


def _memory(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    found = evidence.find(group=RANK)
    worst = max(each.byte_rate / _mean_share(each) for each in found)
    return Verdict(
        claim="memory falls by d / r",
        rule="holds if the bytes of the tensors held exceed r / d by at most a tenth at every uniform rank",
        verdict=HOLDS if worst <= 1.1 else REFUTED,
        because=f"bytes held are at most {worst:.3f} times r / d",
    )


def _worst_heads(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    threshold = config.middle_threshold
    told, spread = [], []
    for side, rope in ((KEYS, "post"), (VALUES, "-")):
        rows = evidence.heads_of(side, rope)
        ranks = [row.ranks[threshold] for row in rows]
        spread.append(max(ranks) / statistics.median(ranks))
        told.append(
            f"{side} need {min(ranks)} to {max(ranks)} of {evidence.head_dim}, the median {statistics.median(ranks):g}"
        )
        measured = [row for row in rows if row.kl is not None]
        if len(measured) > 1:
            told.append(_concentration(side, measured, threshold))
    return Verdict(
        claim="some heads need higher ranks than the others",
        rule=f"holds if a head needs at least {MODEST_FACTOR:g} times the median rank for {threshold:.0%} of its energy",
        verdict=HOLDS if max(spread) >= MODEST_FACTOR else REFUTED,
        because="; ".join(told),
    )


def _concentration(side: str, rows: list[HeadRow], threshold: float) -> str:
    kl = sorted((row.kl for row in rows), reverse=True)
    tenth = max(1, round(len(kl) / 10))
    correlation = rank_correlation([row.ranks[threshold] for row in rows], [row.kl for row in rows])
    return (
        f"compressed alone, the worst tenth of the heads' {side} causes {sum(kl[:tenth]) / max(sum(kl), 1e-30):.0%} of all "
        f"divergence (rank correlation with the rank needed {correlation:+.2f})"
    )


def _drift(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    texts = list(evidence.settings[0].scores)  # but optional ones that were missing
    familiar = [text for text in config.familiar if text in texts]
    foreign = [text for text in texts if text not in familiar]
    claim = "global bases may underperform on text unlike the calibration's"
    rule = "holds if at every uniform rank the increase on foreign texts exceeds that on familiar ones, the whole interval "
    rule += "of the difference above zero; in part if at some; refuted if it is below zero at all"
    if not foreign or not familiar:
        because = "`familiar` names none, or all, of the texts that were read"
        return Verdict(claim=claim, rule=rule, verdict=UNDECIDED, because=because)
    found, told = [], []
    for each in evidence.find(group=RANK):
        near, far = each.increase(familiar), each.increase(foreign)
        those = [(each.losses(texts), each.clusters(texts)) for texts in (foreign, familiar)]
        found.append(Estimate.of_groups(*those))
        told.append(f"{each.setting.level:g} d: familiar {near.words}, foreign {far.words}")
    return Verdict(
        claim=claim,
        rule=rule,
        verdict=_judged([each.low > 0 for each in found], [each.high <= 0 for each in found]),
        because="; ".join(told),
    )


def _joint(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    [joint] = evidence.find(group=JOINT)
    best = _best(_within(config, evidence))
    against = joint.against(best)
    return Verdict(
        claim="beyond the paper: one basis for all heads of a layer, before rotation, needs fewer coefficients",
        rule="holds if at the modest share it beats the best setting of single heads, the whole interval below zero",
        verdict=HOLDS if against.high < 0 else REFUTED if against.low > 0 else UNDECIDED,
        because=f"`{joint.setting.label}`: {joint.increase().words}; against `{best.setting.label}`: {against.words}",
    )


def _sinks(config: HypothesisConfig, evidence: Evidence) -> Verdict:
    told, found = [], []
    for exact in evidence.find(group=SINKS):
        [start] = evidence.find(group=RANK, level=exact.setting.level)
        found.append(exact.against(start))
        told.append(f"{exact.setting.level:g} d: {exact.increase().words} instead of {start.increase().words}")
    return Verdict(
        claim="beyond the paper: the first tokens, which every query reads, are not of the subspace of the others",
        rule="holds if leaving four of them whole is better at every uniform rank, the whole interval below zero; in part "
        "if at some; refuted if it is above at all",
        verdict=_judged([each.high < 0 for each in found], [each.low >= 0 for each in found]),
        because="; ".join(told),
    )


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
