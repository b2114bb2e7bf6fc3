"""Measuring every method on every window of every text, each cell once.

Shapes: N windows, T tokens of a window, S of them predicted, V vocabulary, M caches that read one window together.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.provenance import token_input

from .cells import Cell, Cells, Measurer
from .methods import Method
from .reading import Reading, read_uncompressed
from .scores import HeldBytes, WindowScore, held_share, score_predictions, score_window
from .shared_prompt import can_share, read_prompt_once
from .side_by_side import read_side_by_side

_CACHES_AT_ONCE = 8  # that read one window together


def measure_cells(
    model: PreTrainedModel,
    methods: list[Method],
    texts: Mapping[str, Tensor],
    cells: Cells,
    reading: Reading,
    *,
    setting: Mapping[str, Any],
    record: Mapping[str, Any],
) -> Iterator[dict[tuple[str, str], list[Cell]]]:
    """Yield, after each window, (text, method's label) → the cells found so far, in the order of windows.

    Args:
        model: uncompressed.
        texts: label → token ids of the windows, (N, T) int64.
        cells: those found before are not measured again; those measured now are added.
        setting: what all cells have in common beside the reading, and what distinguishes them from those of other runs, as
            JSON.
        record: of the run, which new cells name.
    """
    found: dict[tuple[str, str], list[Cell]] = collections.defaultdict(list)
    count = len(methods) * sum(map(len, texts.values()))
    with progress_bar(total=count, unit="cell", desc="comparing") as bar:
        for methods_now, (label, number, window_T) in itertools.product(rounds(methods), _by_turns(texts)):
            window = {"window": token_input("text", "window", window_T[None])["sha256"]}
            wanted = []
            for each in methods_now:
                share, of = at_budget(each, lambda other, text=label: [cell.score for cell in found[text, other]])
                wanted.append(_Wanted(each, share, {**setting, **reading._asdict(), **window, **of}))
            missing = [each for each in wanted if cells.get(each.of) is None]
            bar.update(len(wanted) - len(missing))
            if missing:
                for each, score in _scores(model, window_T.to(model.device), missing, reading, bar):
                    what = f"`{each.method.label}` on window {number} of `{label}`"
                    cells.add(each.of, Cell(score, Measurer.of_run(record)), what)
                    bar.update()  # for each, since a window of many methods takes minutes
            for each in wanted:
                found[label, each.method.label].append(cells.get(each.of))
            yield found


def _by_turns(texts: Mapping[str, Tensor]) -> list[tuple[str, int, Tensor]]:
    """(text, number of the window, window): the first window of each text, then the second, so that a run that is stopped
    has some of all."""
    turns = itertools.zip_longest(
        *([(label, *numbered) for numbered in enumerate(each_NT, 1)] for label, each_NT in texts.items())
    )
    return [each for turn in turns for each in turn if each is not None]


def rounds(methods: list[Method]) -> list[list[Method]]:
    """First the methods whose budgets are known, then those that take the bytes of one of them."""
    known = [method for method in methods if method.bytes_of is None]
    following = [method for method in methods if method.bytes_of is not None]
    return [each for each in (known, following) if each]


def at_budget(method: Method, scores_of: Callable[[str], Sequence[HeldBytes]]) -> tuple[float | None, dict[str, Any]]:
    """The share of the bytes that the method takes of another, None where it has its own; and what distinguishes its cells.

    Args:
        scores_of: the scores of the method with this label, so far.
    """
    if method.bytes_of is None:
        return None, method.of
    share = held_share(scores_of(method.bytes_of))
    return share, method.of | {"bytes": share}


class _Wanted(NamedTuple):
    """One cell of a comparison; `share` and `of` are those of :func:`at_budget`, with all that runs have in common."""

    method: Method
    share: float | None
    of: dict[str, Any]


def _scores(
    model: PreTrainedModel,
    window_T: Tensor,
    missing: list[_Wanted],
    reading: Reading,
    bar: tqdm,
) -> Iterator[tuple[_Wanted, WindowScore]]:
    """The score of each: methods that read a prompt exactly read the window together, the others alone."""
    full_SV = read_uncompressed(model, window_T, prefix=reading.prefix)
    shares = bool(reading.prefix) and can_share(model)
    exact = []
    for wanted in missing:
        if shares and wanted.method.reads_exactly:
            exact.append(wanted)
        else:
            bar.set_postfix_str(wanted.method.label)
            yield (
                wanted,
                score_window(model, window_T, full_SV, wanted.method.maker(wanted.share)(), **reading._asdict()),
            )
    for i in range(0, len(exact), _CACHES_AT_ONCE):
        those = exact[i : i + _CACHES_AT_ONCE]
        bar.set_postfix_str(those[0].method.label if len(those) == 1 else f"{len(those)} methods")
        caches = [wanted.method.maker(wanted.share)() for wanted in those]
        read_prompt_once(model, window_T[None, : reading.prefix], caches)
        logits_MSV = read_side_by_side(model, window_T, caches, **reading._asdict())
        for wanted, cache, logits_SV in zip(those, caches, logits_MSV, strict=True):
            log_SV = logits_SV.float().log_softmax(-1)
            yield wanted, score_predictions(model, window_T, full_SV, log_SV, cache)
