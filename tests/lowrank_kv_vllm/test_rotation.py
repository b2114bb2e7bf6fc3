"""What is read of a model's rotary embedding."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowrank_kv.ops import native
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.rotation import _table_of, rotation_of_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [1e4, 1e5, 5e5])
def test_slow_pairs_are_found_in_the_table_that_vllm_keeps(base, dtype):
    frequency_F = base ** (-torch.arange(0, 64, 2) / 64)
    angle_TF = torch.arange(300)[:, None] * frequency_F
    rope = nn.Module()
    rope.cos_sin_cache = torch.cat([angle_TF.cos(), angle_TF.sin()], dim=1).to(dtype)
    assert _table_of(rope, 300).slow_from == native.slow_from(frequency_F)


def test_a_model_without_a_table_of_vllm_s_is_refused_and_the_remedy_is_named(monkeypatch):
    from vllm.model_executor.layers import rotary_embedding

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with pytest.raises(UserError, match="has 0 rotary embeddings, .*`--model-impl vllm`"):
        rotation_of_model(1)


def test_a_model_whose_table_is_for_neighbouring_dims_is_refused(monkeypatch):
    from vllm.model_executor.layers import rotary_embedding

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {"any": SimpleNamespace(is_neox_style=False)})
    with pytest.raises(UserError, match="the model rotates neighbouring dims of a head as pairs, as GPT-J does"):
        rotation_of_model(1)
