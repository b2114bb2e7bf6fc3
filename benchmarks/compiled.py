"""Decoding compiled by `torch.compile`, for every cache alike."""

from collections.abc import Callable

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor
from transformers import Cache, PreTrainedModel

from benchmarks.candidates import CHECKED_TOKENS, Candidates, decoded
from benchmarks.harness import check_close
from benchmarks.made_up import random_ids

# The first steps touch packed weights and larger caches for the first time.
WARMUP = 4


def compile_decoding(candidates: Candidates) -> None:
    """Compile every model as one graph, its products tuned for this processor and its weights laid out for them, and check
    that each candidate's decoded step is still the one it was.

    Prompts are read as before (:func:`benchmarks.candidates.prefill`). A model takes its weights' bytes again, and one to
    three minutes.
    """
    # Weights become constants, laid out as products want them; given as an option of one model, they are not laid out.
    torch._inductor.config.freezing = True
    # Models of one class share their code, and what is compiled for each counts; beyond a limit it would not be compiled.
    torch._dynamo.config.recompile_limit = 8 * len(candidates)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    expected = {name: _checked(*candidate) for name, candidate in candidates.items()}
    for model in {id(model): model for model, _ in candidates.values()}.values():
        model.compile(fullgraph=True, dynamic=True, mode="max-autotune-no-cudagraphs")
    for name, candidate in candidates.items():
        check_close(name, _checked(*candidate), expected[name])


def _checked(model: PreTrainedModel, make_cache: Callable[[], Cache]) -> Tensor:
    return decoded(model, random_ids(model, CHECKED_TOKENS), make_cache())
