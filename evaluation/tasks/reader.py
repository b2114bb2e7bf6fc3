"""One text that is read through one cache, and what the model answers.

Shapes: T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.geometry import geometry_of

from ..reading import cache_bytes
from ..shared_prompt import read_prompt_once


class Reader:
    """A model, a cache, and the text that the cache holds.

    Attributes:
        num_read: tokens in the cache.
        logits_V: of the token that comes next; None before anything was read.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, *, step: int = MAX_DECODE_QUERIES):
        """
        Args:
            cache: fresh.
            step: tokens after the prompt that are read at a time; at most 16 are attended as decoding attends them.
        """
        self.model, self.cache, self.step = model, cache, step
        self.num_read = 0
        self.logits_V: Tensor | None = None

    def copy(self) -> "Reader":
        """The same text in a cache of its own."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Read all tokens in one call, as serving reads a prompt."""
        self._call(ids, keep=1)

    def read(self, ids: Sequence[int]) -> Tensor:
        """Read tokens `step` at a time, as decoding reads them; their logits, each of the token after it, (T, V)."""
        parts = [self._call(ids[i : i + self.step], keep=0) for i in range(0, len(ids), self.step)]
        return torch.cat(parts)

    def log_likelihood(self, ids: Sequence[int]) -> tuple[float, bool]:
        """ln p of a continuation, and whether greedy decoding would have chosen it. The cache then holds all but its last
        token."""
        logits_TV = self.logits_V[None]
        if len(ids) > 1:
            logits_TV = torch.cat([logits_TV, self.read(ids[:-1])])
        target_T = torch.tensor(list(ids), device=logits_TV.device)
        log_T = logits_TV.float().log_softmax(-1).gather(-1, target_T[:, None])
        return float(log_T.sum()), bool((logits_TV.argmax(-1) == target_T).all())

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        *,
        is_done: Callable[[str], bool] = lambda text: False,
        ends: Iterable[int] = (),
    ) -> str:
        """Decode greedily; special tokens are left out of the text, and one that ends a text ends it.

        Args:
            max_new_tokens: at most as many.
            is_done: whether the text so far needs no continuation.
            ends: tokens that end this text, besides those that end any.
        """
        ends, ids, text = end_tokens(self.model, tokenizer) | set(ends), [], ""
        while len(ids) < max_new_tokens:
            token = int(self.logits_V.argmax())
            if token in ends:
                break
            ids.append(token)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if is_done(text) or len(ids) == max_new_tokens:
                break
            self._call([token], keep=1)
        return text

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache holds for the text."""
        return cache_bytes(self.cache, geometry_of(self.model).layers)

    @property
    def full_bytes(self) -> int:
        """Bytes that an uncompressed cache holds for it."""
        return geometry_of(self.model).full_nbytes(self.num_read, self.model.dtype.itemsize)

    @torch.no_grad()
    def _call(self, ids: Sequence[int], *, keep: int) -> Tensor:
        ids_1T = torch.tensor([list(ids)], device=self.model.device)
        logits_TV = self.model(input_ids=ids_1T, past_key_values=self.cache, logits_to_keep=keep).logits[0]
        self.num_read += ids_1T.shape[1]
        self.logits_V = logits_TV[-1]
        return logits_TV


def read_together(readers: Sequence[Reader], prompt: Sequence[int]) -> None:
    """What :meth:`Reader.read_prompt` of each does, in one pass of their model; see :func:`read_prompt_once`."""
    model = readers[0].model
    ids_1T = torch.tensor([list(prompt)], device=model.device)
    logits_V = read_prompt_once(model, ids_1T, [reader.cache for reader in readers])[0, -1]
    for reader in readers:
        reader.num_read, reader.logits_V = len(prompt), logits_V


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a text, of the model's generation and of its tokenizer."""
    found = model.generation_config.eos_token_id
    found = found if isinstance(found, list) else [found]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}
