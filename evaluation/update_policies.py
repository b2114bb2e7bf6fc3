"""What fewer basis updates cost: the error of everything a cache holds, and the loss of the text that reads it.

Shapes: B batch, G KV heads, T tokens, D head dim.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan
from ojakv.cache import OjaKVLayer

from .reading import check_split, full_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRow:
    """One rule of updating on one text.

    Attributes:
        updates: over all layers, keys and values, the prompt's included.
        relative_error: ‖cached − exact‖² / ‖exact‖² over all keys and values, each layer's side counting alike. Exact are
            those of an uncompressed cache, so it holds the drift of the hidden states, too.
        perplexity: of what follows the prompt.
    """

    text: str
    rule: str
    updates: int
    relative_error: float
    perplexity: float
    rate: float


def continued(model: PreTrainedModel, prompt_T: Tensor, tokens: int) -> Tensor:
    """A prompt and `tokens` that the uncompressed model samples after it, at temperature 1 and without an end."""
    torch.manual_seed(0)
    ids = prompt_T[None].to(model.device)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, **settings)[0].cpu()


@torch.no_grad()
def measure_updates(
    model: PreTrainedModel,
    calibration: Calibration,
    text: str,
    tokens_T: Tensor,
    *,
    prefix: int,
    configs: dict[str, OjaKVConfig],
) -> list[UpdateRow]:
    """Read a prompt of `prefix` tokens, then the rest a few at a time as decoding does, under every rule.

    Args:
        model: served by OjaKV caches or none.
        calibration: of this model.
        text: the text's name in the rows.
        configs: name of the rule → settings.

    Raises:
        UserError: no prompt, nothing after it, or more than the model's positions.
    """
    check_split(model, len(tokens_T), prefix)
    ids = tokens_T[None].to(model.device)
    exact = full_cache(model)
    model(ids, past_key_values=exact, logits_to_keep=1)
    rows = []
    for rule, config in configs.items():
        cache = OjaKVCache(model, make_plan(calibration, config))
        logits = [model(ids[:, :prefix], past_key_values=cache, logits_to_keep=1).logits[0].float()]
        for part in ids[:, prefix:].split(MAX_DECODE_QUERIES, dim=1):
            logits.append(model(part, past_key_values=cache).logits[0].float())
        loss = float(F.cross_entropy(torch.cat(logits)[:-1], ids[0, prefix:]))
        rows.append(
            UpdateRow(
                text=text,
                rule=rule,
                updates=cache.updates,
                relative_error=_error(cache, exact),
                perplexity=math.exp(loss),
                rate=cache.rate,
            )
        )
    return rows


def _error(cache: OjaKVCache, exact: Cache) -> float:
    errors = []
    for layer, whole in zip(cache.layers, exact.layers, strict=True):
        if isinstance(layer, OjaKVLayer):
            for held_BGTD, exact_BGTD in zip(layer.dense(), (whole.keys, whole.values), strict=True):
                errors.append(float((held_BGTD - exact_BGTD).square().sum() / exact_BGTD.square().sum()))
    return sum(errors) / len(errors)
