"""A model with outlier channels says what the other says, and its cache has them."""

import pytest
import torch
from methods import tiny_model
from transformers import CohereConfig, CohereForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.errors import UserError
from scripts.outlier_model import add_outliers, main

SHAPE = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@torch.no_grad()
def test_a_text_is_read_as_before_and_channels_stand_out(tiny_dir, tmp_path):
    main([str(tiny_dir), str(tmp_path / "out"), "--scale", "50"])
    ids = torch.arange(1, 40)[None]
    logits, channels = [], []
    for path in (tiny_dir, tmp_path / "out"):
        model = load_model(str(path))
        found = model(ids, use_cache=True)
        logits.append(found.logits)
        layer = found.past_key_values.layers[0]
        channels.append([states.square().mean(dim=2).flatten() for states in (layer.keys, layer.values)])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    heads = geometry_of(model).num_kv_heads
    for before, after, in_a_head in zip(*channels, (2, 1), strict=True):
        larger = after > 1000 * before
        assert int(larger.sum()) == in_a_head * heads
        torch.testing.assert_close(after[~larger], before[~larger], rtol=1e-4, atol=1e-7)


def test_models_that_would_say_something_else_are_refused():
    with pytest.raises(UserError, match="not hold such numbers; use one such as Llama, or a smaller `scale`"):
        add_outliers(tiny_model(), float("inf"))
    with pytest.raises(UserError, match="`scale` must be positive"):
        add_outliers(tiny_model(), 0.0)
    with pytest.raises(
        UserError, match="has k_norm, .*; use a model whose attention has q_proj, k_proj, v_proj, o_proj"
    ):
        add_outliers(Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)), 30.0)
    with pytest.raises(UserError, match="says something else .* rotate other dims together than the halves"):
        add_outliers(CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=1.0)).float(), 30.0)
