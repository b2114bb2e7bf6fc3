"""Looking values up in a long prompt: what a cache must not lose, whatever it forgets.

A prompt lists facts (``"amber river": "482",``), each twice, in random order, then begins one again; the model must
finish it by copying what it read. Small language models can do this, which most retrieval benchmarks ask too much of.
"""

import math
import random

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import require

from .continuation import encode_behind
from .item import GenerationItem, prompt_pieces
from .matching import BeginsWith

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
_MOST_FACTS = math.perm(len(WORDS), KEY_WORDS)


def lookup_prompts(count: int, facts: int, seed: int, *, questions: int = 1) -> list[tuple[str, list[tuple[str, str]]]]:
    """`count` lists of facts, and the beginning and the rest of each fact that is asked.

    Args:
        facts: in a list.
        questions: asked of a list, each about another fact.
    """
    require(count >= 1, "items", count, "at least 1")
    require(facts <= _MOST_FACTS, "facts", facts, f"at most {_MOST_FACTS:,}, of which each has a key of its own")
    require(1 <= questions <= facts, "questions", questions, f"between 1 and the {facts} `facts`")
    generator = random.Random(seed)
    lists = []
    for _ in range(count):
        codes: dict[str, str] = {}
        while len(codes) < facts:
            codes[" ".join(generator.sample(WORDS, KEY_WORDS))] = f"{generator.randrange(100, 1000)}"
        lines = [f'"{key}": "{code}",\n' for key, code in codes.items()] * REPEATS
        generator.shuffle(lines)
        asked = generator.sample(list(codes), questions)
        lists.append(("".join(lines), [(f'"{key}": "', codes[key]) for key in asked]))
    return lists


def lookup_items(
    tokenizer: PreTrainedTokenizerBase, *, count: int, facts: int, questions: int, seed: int
) -> list[GenerationItem]:
    """`count` questions, `questions` of them about each list of `facts` facts."""
    items = []
    lists = lookup_prompts(-(-count // questions), facts, seed, questions=questions)
    for number, (text, asked) in enumerate(lists):
        for beginning, code in asked:
            context, question = prompt_pieces(tokenizer, text, beginning)
            items.append(
                GenerationItem(
                    cluster=number,
                    context=context,
                    question=question,
                    references=(code,),
                    max_new_tokens=len(encode_behind(tokenizer, code)),
                    metric=BeginsWith(),
                    tokenizer=tokenizer,
                )
            )
    return items[:count]
