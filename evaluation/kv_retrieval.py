"""Looking values up in a long prompt: what a cache must not lose, whatever it forgets.

A prompt lists facts (``"amber river": "482",``), each twice, in random order, then begins one again; the model must finish
it by copying what it read. Small language models can do this, which most retrieval benchmarks ask too much of.
"""

import dataclasses
import random
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import position_limit
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.progress import progress_bar

from .reading import cache_bytes

# fmt: off
WORDS = (
    "river", "mountain", "garden", "window", "bridge", "candle", "forest", "engine", "market", "island", "silver", "doctor",
    "basket", "winter", "summer", "castle", "letter", "mirror", "pencil", "rocket", "saddle", "temple", "tunnel", "velvet",
    "violin", "walnut", "wagon", "yellow", "zebra", "anchor", "butter", "carpet", "desert", "eagle", "feather", "guitar",
    "hammer", "insect", "jacket", "kettle", "ladder", "magnet", "needle", "orange", "palace", "quarry", "rabbit", "salmon",
)
# fmt: on
KEY_WORDS = 3  # of a key, so that many different ones share words
REPEATS = 2  # of every fact


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupScore:
    """How many of the questions were answered right, and the bytes the cache held after each prompt, summed."""

    right: int
    asked: int
    cache_bytes: int
    full_bytes: int

    @property
    def rate(self) -> float:
        return self.cache_bytes / self.full_bytes


def lookup_prompts(count: int, facts: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs (prompt, answer); a prompt lists `facts` facts, of which one is asked."""
    require(count >= 1, "prompts", count, "at least 1")
    require(facts >= 1, "facts", facts, "at least 1")
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        codes: dict[str, str] = {}
        while len(codes) < facts:
            codes[" ".join(generator.sample(WORDS, KEY_WORDS))] = f"{generator.randrange(100, 1000)}"
        lines = [f'"{key}": "{code}",\n' for key, code in codes.items()] * REPEATS
        generator.shuffle(lines)
        asked = generator.choice(list(codes))
        pairs.append((f'{"".join(lines)}"{asked}": "', codes[asked]))
    return pairs


@torch.no_grad()
def score_lookup(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[str, str]],
    make_cache: Callable[[], Cache],
    *,
    description: str = "looking up",
) -> LookupScore:
    """Answer every prompt greedily from a fresh cache; an answer is right when all of its tokens are.

    Raises:
        UserError: a prompt and its answer are longer than the model's positions; nothing is measured then.
    """
    geometry = geometry_of(model)
    questions = []
    for prompt, answer in pairs:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        expected = tokenizer(answer, add_special_tokens=False).input_ids
        # The answer's last token is not read.
        _check_fits(model, ids.shape[1] + len(expected) - 1, facts=prompt.count("\n") // REPEATS)
        questions.append((ids.to(model.device), expected))
    right = held = full = 0
    for ids, expected in progress_bar(questions, unit="question", desc=description, leave=False):
        cache, given = make_cache(), []
        token = ids
        for _ in expected:
            logits = model(token, past_key_values=cache, logits_to_keep=1).logits
            if not given:
                held += cache_bytes(cache, geometry.layers)
                full += geometry.full_nbytes(ids.shape[1], model.dtype.itemsize)
            token = logits[:, -1:].argmax(dim=-1)
            given.append(int(token))
        right += given == expected
    return LookupScore(right=right, asked=len(pairs), cache_bytes=held, full_bytes=full)


def _check_fits(model: PreTrainedModel, tokens: int, facts: int) -> None:
    limit = position_limit(model)
    if limit is None or tokens <= limit:
        return
    # The question and its answer are about one line more.
    fitting = (limit * (REPEATS * facts + 1) // tokens - 1) // REPEATS
    remedy = f"use about {fitting}, or fewer" if fitting > 0 else "use a model of more positions"
    raise UserError(
        f"`facts` is {facts}, which makes prompts of {tokens:,} tokens with their answers, but this model has {limit:,} "
        f"positions; {remedy}"
    )
