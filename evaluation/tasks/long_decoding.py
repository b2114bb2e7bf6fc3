"""Long decoding: how caches part from the uncompressed model over thousands of generated tokens, by position.

The model's own text is written once, by sampling with an uncompressed cache. Every cache then reads the prompt and
this text as decoding reads it, in step with an uncompressed cache, and their predictions are compared.
`keep_prompt_full_rank: true` among a method's settings keeps the prompt as it is, as OjaKV's experiments on reasoning do.

Shapes: T tokens, V vocabulary.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.loading import check_length
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.progress import progress_bar

from ..reading import full_cache
from ..run_setup import identity_of
from .item import PASS_EFFORT, FreshReader, Item, ItemScore, prompt_pieces
from .reader import Reader, end_tokens

TEXTS = "generated"
"""Folder of the output in which generated texts are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongItem(Item):
    """A prompt, and a text after it.

    Attributes:
        text: token ids.
        edges: positions in the text at which a range of positions ends; the last is the text's length.
    """

    text: tuple[int, ...]
    edges: tuple[int, ...]

    def content(self) -> dict[str, Any]:
        return {"context": self.context, "text": self.text, "edges": self.edges}

    @property
    def metric_name(self) -> str:
        return "equal top-1"

    @property
    def num_asked(self) -> int:
        return 0

    @property
    def num_answered(self) -> int:
        return len(self.text)

    @property
    def effort(self) -> int:
        return PASS_EFFORT * 2 * len(self.text) // 16

    def answer_after(self, context: Reader) -> ItemScore:
        raise NotImplementedError("a long text is read behind its own prompt")

    def answer_within(self, fresh: FreshReader) -> ItemScore:
        read, full = fresh(self.context), fresh.uncompressed(self.context)
        kls, agreements = [], []
        for begin in range(0, len(self.text), read.step):
            part = self.text[begin : begin + read.step]
            log_TV, full_TV = (each.read(part).float().log_softmax(-1) for each in (read, full))
            kls.append(F.kl_div(log_TV, full_TV, reduction="none", log_target=True).sum(-1))
            agreements.append((log_TV.argmax(-1) == full_TV.argmax(-1)).float())
        kl_T, agreement_T = torch.cat(kls), torch.cat(agreements)
        values = {"kl": float(kl_T.mean())}
        for begin, end in zip((0, *self.edges), self.edges, strict=False):
            values[f"kl {begin}–{end}"] = float(kl_T[begin:end].mean())
            values[f"top1 {begin}–{end}"] = float(agreement_T[begin:end].mean())
        return ItemScore(
            score=float(agreement_T.mean()),
            values=values,
            answer="",
            cache_bytes=read.cache_bytes,
            full_bytes=read.full_bytes,
        )


def position_edges(length: int) -> tuple[int, ...]:
    """512, 1024, 2048, … and the length itself."""
    edges = []
    while (edge := 512 << len(edges)) < length:
        edges.append(edge)
    return (*edges, length)


def long_items(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    directory: Path,
    *,
    length: int,
    temperature: float,
    seed: int,
    chat: bool,
    edges: tuple[int, ...],
) -> list[LongItem]:
    """A text of `length` tokens for each prompt, written by the model, or read where it was written before.

    Args:
        directory: of the output; texts lie in :data:`TEXTS` of it.
        edges: see :class:`LongItem`.

    Raises:
        UserError: prompt and text are longer than the model's positions.
    """
    items, identity = [], identity_of(model)
    for number, text in enumerate(prompts):
        context, end = prompt_pieces(tokenizer, text, "", chat=chat)
        prompt = (*context, *end)
        check_length(model, len(prompt) + length, "length")
        settings = {"prompt": prompt, "length": length, "temperature": temperature, "seed": seed + number}
        settings |= {**identity, "dtype": str(model.dtype)}
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        path = directory / TEXTS / f"{name}.json"
        if not path.exists():
            written = write_on(model, tokenizer, prompt, length=length, temperature=temperature, seed=seed + number)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(settings | {"text": written}) + "\n")
        written = json.loads(path.read_text(encoding="utf-8"))["text"]
        items.append(LongItem(context=prompt, cluster=number, text=tuple(written), edges=edges))
    return items


def write_on(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    *,
    length: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """`length` token ids sampled after the prompt, none of which ends a text."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor(sorted(end_tokens(model, tokenizer)), dtype=torch.int64)
    reader = Reader(model, full_cache(model))
    reader.read_prompt(prompt)
    ids: list[int] = []
    for _ in progress_bar(range(length), unit="token", desc="writing a text", leave=False):
        logits_V = reader.logits_V.float().cpu()
        logits_V[ends] = -torch.inf
        if temperature == 0:
            ids.append(int(logits_V.argmax()))
        else:
            ids.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
        reader.read(ids[-1:])
    return ids
