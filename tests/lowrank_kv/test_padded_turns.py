"""Later turns of a batch, padded on the left, that are read in chunks with eviction."""

import pytest
import torch
from methods import calibration_of, tiny_model

from ojakv import OjaKVCache, OjaKVConfig, make_plan

FIRST, NEW, PADDING = 30, 25, 18


@pytest.mark.parametrize(
    ("preset", "settings"),
    [("ojakv-pf", {}), ("static-joint-pf", {"eviction": {"keep_ratio": 0.5, "window_size": 8}})],
)
@pytest.mark.parametrize("chunk", [8, 5])
def test_a_chunk_may_end_in_the_padding_of_what_is_to_come(preset, settings, chunk):
    model = tiny_model()
    plan = make_plan(calibration_of(model), OjaKVConfig.preset(preset, rate=1.0, full_rank_ratio=0.0, **settings))
    cache = OjaKVCache(model, plan)
    generator = torch.Generator().manual_seed(3)
    first, new = (torch.randint(1, 97, (2, length), generator=generator) for length in (FIRST, NEW))
    settings = {"max_new_tokens": 4, "do_sample": False, "past_key_values": cache}
    turn = model.generate(first, attention_mask=torch.ones_like(first), **settings)
    mask = torch.ones(2, turn.shape[1] + NEW, dtype=torch.int64)
    mask[0, turn.shape[1] : turn.shape[1] + PADDING] = 0
    answered = model.generate(torch.cat([turn, new], dim=1), attention_mask=mask, prefill_chunk_size=chunk, **settings)
    assert answered.shape == (2, FIRST + 4 + NEW + 4)
    assert cache.get_seq_length() == answered.shape[1] - 1
