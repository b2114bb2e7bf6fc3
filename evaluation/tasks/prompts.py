"""Prompts that are read into fresh caches, of several methods at once where one reading serves them all."""

from collections.abc import Callable, Collection, Mapping, Sequence

from transformers import Cache, PreTrainedModel

from ..reading import full_cache
from ..shared_prompt import can_share
from .reader import Reader, read_together


class Prompts:
    """Reads each prompt once for all methods that read it exactly, and once for each of the others."""

    def __init__(
        self,
        model: PreTrainedModel,
        makers: Mapping[str, Callable[[], Cache]],
        *,
        exact: Collection[str] = (),
        step: int,
    ):
        """
        Args:
            makers: makers of caches, by the method's label.
            exact: labels of methods whose prompts attend to their own exact states.
            step: see :class:`Reader`.
        """
        self._model, self._makers, self._step = model, makers, step
        self._exact = [label for label in makers if label in exact] if can_share(model) else []
        self._waiting: dict[tuple[int, ...], dict[str, Reader]] = {}  # read, and not asked for yet

    def read(self, label: str, prompt: Sequence[int]) -> Reader:
        """A reader of this method that has read the prompt in one call."""
        if label not in self._exact:
            reader = self._fresh(label)
            reader.read_prompt(prompt)
            return reader
        waiting = self._waiting.setdefault(tuple(prompt), {})
        if label not in waiting:
            readers = {each: self._fresh(each) for each in self._exact if each not in waiting}
            read_together(list(readers.values()), prompt)
            waiting |= readers
        return waiting.pop(label)

    def read_uncompressed(self, prompt: Sequence[int]) -> Reader:
        """A reader with an uncompressed cache that has read the prompt."""
        reader = Reader(self._model, full_cache(self._model), step=self._step)
        reader.read_prompt(prompt)
        return reader

    def of(self, label: str) -> "FreshReader":
        """Reads prompts for one method."""
        return FreshReader(self, label)

    def _fresh(self, label: str) -> Reader:
        return Reader(self._model, self._makers[label](), step=self._step)


class FreshReader:
    """Reads prompts of one method, each into a cache of its own."""

    def __init__(self, prompts: Prompts, label: str):
        self._prompts, self._label = prompts, label

    def __call__(self, prompt: Sequence[int]) -> Reader:
        """A reader that has read this prompt, in one call."""
        return self._prompts.read(self._label, prompt)

    def uncompressed(self, prompt: Sequence[int]) -> Reader:
        """The same with an uncompressed cache."""
        return self._prompts.read_uncompressed(prompt)
