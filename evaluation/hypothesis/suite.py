"""Running the suite: every setting on every window, single layers and heads, and the verdicts.

Shapes: N windows, T tokens of a window, W width of a head.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv.bases.rank_allocation import energy_curve
from lowrank_kv.hf.loading import check_length, load_tokenizer
from lowrank_kv.utils.config import to_dict
from lowrank_kv.utils.paths import name_of

from ..cells import Cell, measured_by
from ..compare import new_comparison, read_so_far, row_of
from ..output import MakeRecord
from ..reading import Reading
from ..run_setup import calibration_of, cells_in, setting_of
from ..texts import Windows, documents_told, measured_texts, read_texts
from ..wide_products import load_measured
from ..window_cells import measure_cells
from .config import HypothesisConfig
from .evidence import Evidence, HeadRow, Measured
from .ranks import KEYS, SIDES, VALUES, Spectra, threshold_ranks
from .settings import Setting, method_of, sensitivity_methods, settings_of, shares_of
from .verdicts import verdicts

ALL_TEXTS = "all texts"
POINTS = 16  # of a head's curve of captured energy
Found = dict[tuple[str, str], list[Cell]]


def run_suite(config: HypothesisConfig, output: Path) -> Iterator[MakeRecord]:
    """Yield what makes the record of this run after each window; the last one has the verdicts.

    Args:
        config: what to measure.
        output: holds the cells of this and earlier runs; only missing ones are measured.
    """
    tokenizer, bases = load_tokenizer(config.model), config.load_bases()
    texts = read_texts(config.texts, tokenizer, config.length, config.share_of(config.windows), read=config.read)
    model = load_measured(config.model, dtype=config.dtype, device=config.device)
    check_length(model, config.length, "length")
    calibration, inputs = calibration_of(
        model, tokenizer, config, bases, read_gradients=False, measured=measured_texts(config.texts)
    )
    spectra, settings = Spectra.of(calibration), settings_of(config)
    ids = {label: each.ids_NT for label, each in texts.items()}
    record = new_comparison(to_dict(config) | {"model": name_of(config.model)}, inputs, model, ids, model.device)
    cells, common = cells_in(output, record), setting_of(record, config.dtype)

    head_dim = calibration.geometry.head_dim
    shares = {each.label: shares_of(each, spectra, head_dim) for each in settings}
    found: Found = {}
    alone_found: Found = {}

    def record_so_far() -> dict[str, Any]:
        measured = itertools.chain(*alone_found.values(), *found.values())
        told = {"measured_by": measured_by(measured), "documents": documents_told(texts)}
        return record | {"n": read_so_far(found, texts), "rows": _rows(settings, shares, found, texts), "summary": told}

    # What each token is stored as by itself does not depend on how a text is read, so it is read in two parts.
    for moves, step in ((False, config.length - config.prefix), (True, config.step)):
        reading = Reading(prefix=config.prefix, step=step)
        methods = [method_of(each, model, calibration, spectra) for each in settings if each.moves == moves]
        for now in measure_cells(model, methods, ids, cells, reading, setting=common, record=record):
            found |= now
            yield record_so_far

    alone = {} if config.sensitivity == "none" else sensitivity_methods(config, model, calibration, spectra)
    short = {
        label: each_NT[: config.sensitivity_windows, : config.sensitivity_length] for label, each_NT in ids.items()
    }
    reading = Reading(prefix=0, step=config.step)
    for now in measure_cells(model, list(alone.values()), short, cells, reading, setting=common, record=record):
        alone_found |= now
        yield record_so_far
    kl = {key: _mean_kl(alone_found, method.label) for key, method in alone.items()}

    evidence = Evidence(
        head_dim=head_dim,
        settings=[
            Measured(
                setting=each,
                shares=shares[each.label],
                scores=_scores(found, each.label),
                documents={label: text.documents for label, text in texts.items()},
            )
            for each in settings
        ],
        heads=_heads(config, spectra, kl),
        layer_kl={(layer, side): value for (layer, head, side), value in kl.items() if head is None},
    )
    judged = {name: dataclasses.asdict(each) for name, each in verdicts(config, evidence).items()}
    done = record_so_far()
    done["rows"] += _head_rows(evidence) + _layer_rows(evidence)
    done["summary"]["verdicts"] = judged
    yield lambda: done


def _scores(found: Found, label: str) -> dict[str, list]:
    return {text: [cell.score for cell in each] for (text, method), each in found.items() if method == label}


def _mean_kl(found: Found, label: str) -> float:
    scores = [score for each in _scores(found, label).values() for score in each]
    return sum(score.kl * score.scored for score in scores) / sum(score.scored for score in scores)


def _rows(
    settings: list[Setting], shares: dict[str, dict[str, float]], found: Found, texts: Mapping[str, Windows]
) -> list[dict[str, Any]]:
    """Perplexities: of every setting on every text, and on all texts together."""
    rows = []
    for setting in settings:
        scores = _scores(found, setting.label)
        together = {ALL_TEXTS: scores} if len(scores) > 1 else {}
        for text, each in ({label: {label: of_text} for label, of_text in scores.items()} | together).items():
            about = {
                "what": "perplexity",
                **setting.fields,
                **{f"{side[:-1]}_share": shares[setting.label][side] for side in SIDES},
            }
            rows.append(about | row_of(setting.label, text, each, texts))
    return rows


def _heads(
    config: HypothesisConfig, spectra: Spectra, kl: Mapping[tuple[int, int | None, str], float]
) -> list[HeadRow]:
    """Each head's ranks and spectrum."""
    found = []
    for side, rope in ((KEYS, "pre"), (KEYS, "post"), (VALUES, "-")):
        bases = spectra.of_side(side, rope)
        ranks = {threshold: threshold_ranks(bases, threshold) for threshold in config.thresholds}
        for layer, basis in bases.items():
            for head, energy_W in enumerate(basis.energy_PW):
                found.append(
                    HeadRow(
                        layer=layer,
                        head=head,
                        side=side,
                        rope=rope,
                        ranks={threshold: each[layer][head] for threshold, each in ranks.items()},
                        captured=[round(share, 5) for share in energy_curve(energy_W, POINTS)],
                        kl=kl.get((layer, head, side)) if rope != "pre" else None,
                    )
                )
    return found


def _head_rows(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {
            "what": "head",
            "layer": row.layer,
            "head": row.head,
            "side": row.side,
            "rope": row.rope,
            **{f"rank_{100 * threshold:g}": rank for threshold, rank in row.ranks.items()},
            "captured": row.captured,
            "kl_alone": row.kl,
        }
        for row in evidence.heads
    ]


def _layer_rows(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {"what": "layer", "layer": layer, "side": side, "kl_alone": value}
        for (layer, side), value in evidence.layer_kl.items()
    ]
