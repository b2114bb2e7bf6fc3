"""Scores of windows, one after another, beside the uncompressed model."""

from evaluation.reading import read_uncompressed
from evaluation.scores import WindowScore, score_window
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES


def score_windows(model, windows_NT, make_cache, *, prefix) -> list[WindowScore]:
    """Each window's score; `make_cache` is called for each."""
    return [
        score_window(
            model,
            window_T,
            read_uncompressed(model, window_T, prefix=prefix),
            make_cache(),
            prefix=prefix,
            step=MAX_DECODE_QUERIES,
        )
        for window_T in windows_NT
    ]
