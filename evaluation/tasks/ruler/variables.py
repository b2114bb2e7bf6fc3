"""Variable tracking: which variables were assigned a value, through a chain of assignments hidden in noise."""

import dataclasses
import random
import string

from transformers import PreTrainedTokenizerBase

from .needles import NOISE
from .sample import MOST_UNITS, RulerTask, Sample

# The example in front: of shorter names, and of at most so many tokens without those of its answer.
_EXAMPLE_NAME, _EXAMPLE_TOKENS = 3, 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(RulerTask):
    """`vt`: one chain, one example in front.

    Attributes:
        num_hops: assignments of a variable to the next.
        name_length: letters of a name.
    """

    num_hops: int = 4
    name_length: int = 5
    max_new_tokens: int = 30

    def units(self, index: int, length: int) -> tuple[int, int]:
        return self.num_hops + 1, MOST_UNITS

    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        example = self._example(random.Random(rng.random()), tokenizer)
        asked = self._text(rng, units, self.name_length)
        return dataclasses.replace(asked, context=f"{example}\n\n{asked.context}")

    def _example(self, rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> str:
        """A shorter text with its question and answer."""
        seed, shown = rng.random(), ""
        for units in range(self.num_hops + 1, _EXAMPLE_TOKENS):
            text = self._text(random.Random(seed), units, _EXAMPLE_NAME)
            if shown and sum(map(len, text.pieces(tokenizer))) > _EXAMPLE_TOKENS:
                break
            # A second space, as RULER's: a model that continues the prompt's own begins its answer with one, too.
            shown = f"{text.context}{text.question}{text.answer_prefix} {' '.join(text.references)}"
        return shown

    def _text(self, rng: random.Random, units: int, name_length: int) -> Sample:
        names: list[str] = []
        while len(names) < self.num_hops + 1:
            name = "".join(rng.choices(string.ascii_uppercase, k=name_length))
            names += [name] * (name not in names)
        value = rng.randrange(10000, 100000)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {after} = VAR {before} " for before, after in zip(names, names[1:], strict=False)]
        lines = [NOISE] * units
        for i, place in enumerate(sorted(rng.sample(range(units), len(chain)))):
            lines.insert(place + i, chain[i])
        context = "\n".join(lines)
        return Sample(
            context=f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}",
            question=f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            answer_prefix=" Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assigned the value {value}, they are: ",
            references=names,
            max_new_tokens=self.max_new_tokens,
        )
