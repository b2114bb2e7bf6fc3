"""Decoding compiled by `torch.compile`, for every cache alike."""

from torch import Tensor

from benchmarks.caches import CHECKED_TOKENS, Candidate, Candidates, decoded
from benchmarks.harness import check_close
from benchmarks.random_models import random_ids
from lowrank_kv.hf.compile_decoding import compile_decoding


def compile_all(candidates: Candidates) -> None:
    """Compile every model's decoding and check that each candidate's decoded step is still the one it was."""
    expected = {name: _checked(candidate) for name, candidate in candidates.items()}
    for model in {id(model): model for model, _ in candidates.values()}.values():
        compile_decoding(model)
    for name, candidate in candidates.items():
        check_close(name, _checked(candidate), expected[name])


def _checked(candidate: Candidate) -> Tensor:
    model, make_cache = candidate
    return decoded(model, random_ids(model, CHECKED_TOKENS), make_cache())
