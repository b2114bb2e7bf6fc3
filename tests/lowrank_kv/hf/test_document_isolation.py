"""Documents packed into one sequence are read as each by itself, or why they are not is said."""

import pytest
import torch
from families import FAMILIES, SIZES, TWO_KINDS, tiny_opt
from methods import dynakv_model, planned_model, tiny_model
from transformers import (
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    RobertaConfig,
    RobertaForCausalLM,
)

import dynakv
from lowrank_kv.hf import document_isolation
from lowrank_kv.hf.document_isolation import isolate_documents, objection_to_packing
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.loading import recompute_activations
from lowrank_kv.hf.prepare import prepare

CPU = torch.device("cpu")
# The code of these makes masks without positions. GPT-OSS has sinks and two kinds of layers, OPT learned positions.
LEAKING = {
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **{key: value for key, value in {**SIZES, **TWO_KINDS}.items() if key != "query_pre_attn_scalar"},
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "opt": lambda: tiny_opt(vocab_size=97, init_std=0.15),
}
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def with_masks(model):
    return len(model.get_decoder()._forward_pre_hooks)


def leaking(name):
    torch.manual_seed(0)
    return LEAKING[name]().eval()


@torch.no_grad()
def largest_difference(call, ids_BT, lengths):
    """Of the logits, or states, of packed documents from those of each by itself, in units of their root mean square."""
    position_BT = torch.cat([torch.arange(length) for length in lengths])[None].expand_as(ids_BT)
    packed = call(input_ids=ids_BT, position_ids=position_BT, use_cache=False)[0]
    apart = torch.cat([call(input_ids=each, use_cache=False)[0] for each in ids_BT.split(lengths, dim=1)], dim=1)
    return float((packed - apart).abs().max() / apart.square().mean().sqrt())


@every_dtype
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_that_passes_positions_on_is_left_as_it_is(family, dtype):
    model = prepare(family.model().to(dtype))
    hooks = with_masks(model)
    assert isolate_documents(model, CPU) is None
    assert with_masks(model) == hooks


@every_dtype
@pytest.mark.parametrize("name", LEAKING)
def test_a_family_that_does_not_is_given_masks(name, dtype):
    model = leaking(name).to(dtype)
    prepare(model)
    hooks = with_masks(model)
    assert "hidden states differ by up to" in objection_to_packing(model, CPU)
    assert isolate_documents(model, CPU) is None
    assert with_masks(model) == hooks + 1
    assert objection_to_packing(model, CPU) is None


@pytest.mark.parametrize("name", LEAKING)
def test_with_masks_documents_of_any_length_are_read_as_each_by_itself(name):
    model = leaking(name)
    prepare(model)
    ids_BT, lengths = (
        torch.randint(3, 90, (2, 40)),
        [9, 1, 12, 18],
    )
    assert largest_difference(model, ids_BT, lengths) > 0.1
    isolate_documents(model, CPU)
    for call in (model, model.base_model):
        assert largest_difference(call, ids_BT, lengths) < 1e-4
    assert largest_difference(model, ids_BT, [40]) < 1e-5


def test_a_compressed_pass_is_given_them_too():
    model = leaking("opt")
    dynakv_model(model, 0.4)
    ids_BT, lengths = torch.randint(3, 90, (1, 30)), [12, 18]
    assert largest_difference(model, ids_BT, lengths) > 0.1
    isolate_documents(model, CPU)
    assert largest_difference(model, ids_BT, lengths) < 1e-3


# The code of these does not tell attention the positions of tokens.
SILENT = {
    "llama4_text": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **{key: value for key, value in SIZES.items() if key != "initializer_range"},
            intermediate_size_mlp=64,
            head_dim=16,
            num_local_experts=2,
            initializer_range=0.15,
        )
    ),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(
        GPTBigCodeConfig(
            **{"vocab_size": 97, "n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 4, "multi_query": False},
            **{"initializer_range": 0.15, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
            **{"bos_token_id": None, "eos_token_id": None},
        )
    ),
}


def with_exact_tokens(name, *, isolated):
    torch.manual_seed(0)
    model = prepare(SILENT[name]().eval())
    assert not isolated or isolate_documents(model, CPU) is None
    planned_model(model, 0.2)
    dynakv.set_exact_tokens(model, ExactTokens(num_sink_tokens=2, recent_window=3, update_period=2))
    return model


@pytest.mark.parametrize("name", SILENT)
def test_what_stays_exact_in_a_document_follows_its_own_start(name):
    ids_BT, lengths = torch.randint(3, 90, (1, 40)), [17, 23]
    assert largest_difference(with_exact_tokens(name, isolated=False), ids_BT, lengths) > 1e-2
    assert largest_difference(with_exact_tokens(name, isolated=True), ids_BT, lengths) < 1e-4


@pytest.mark.parametrize("name", SILENT)
def test_a_backward_pass_that_recomputes_activations_knows_it_too(name):
    model = with_exact_tokens(name, isolated=True)
    model.train().requires_grad_(True)
    ids_BT, position_BT = torch.randint(3, 90, (1, 40)), torch.cat([torch.arange(17), torch.arange(23)])[None]
    gradients = []
    for recomputes in (False, True):
        if recomputes:
            recompute_activations(model)
        model.zero_grad()
        model(input_ids=ids_BT, position_ids=position_BT, use_cache=False).logits.square().mean().backward()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_a_model_that_masks_do_not_help_is_left_as_it_was():
    """RoBERTa counts positions from another number than those it is given."""
    sizes = {key: value for key, value in SIZES.items() if key in ("vocab_size", "hidden_size", "intermediate_size")}
    model = RobertaForCausalLM(
        RobertaConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=4, is_decoder=True, pad_token_id=1, initializer_range=0.15
        )
    ).eval()
    modes, hooks = [module.training for module in model.modules()], with_masks(model)
    assert "a roberta model does not read a document that stands behind another" in isolate_documents(model, CPU)
    assert with_masks(model) == hooks
    assert [module.training for module in model.modules()] == modes


def test_a_model_that_only_masks_help_is_left_as_it_was(monkeypatch):
    model = prepare(leaking("opt"))
    hooks = with_masks(model)
    monkeypatch.setattr(document_isolation, "_objection_to_silence", lambda *_: "silent")
    assert isolate_documents(model, CPU) == "silent"
    assert with_masks(model) == hooks


def test_trying_draws_no_random_number_and_keeps_modes():
    model = tiny_model().train()
    state = torch.get_rng_state()
    isolate_documents(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
