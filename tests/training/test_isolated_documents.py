"""A run lets no document of a block see another, or refuses a model that cannot keep them apart."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from training_runs import train_here
from transformers import GptOssConfig, GptOssForCausalLM, RobertaConfig, RobertaForCausalLM

import training.loop
from lowrank_kv.utils.errors import UserError

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = {"bos_token_id": None, "eos_token_id": 0}
SHORT = {"optimizer": {"steps": 1, "batch_size": 1}, "checkpoint_every": 0, "heldout_blocks": 0}


@pytest.fixture
def saved(training_values, tmp_path):
    """The configuration of a run with a model that is given."""

    def save(model):
        model.save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        return {**training_values, "model": str(tmp_path / "model")}

    return save


def gpt_oss():
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES,
        **IDS,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=512,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return GptOssForCausalLM(config)


@pytest.mark.parametrize("isolate", [True, False])
def test_what_is_trained_sees_no_other_document_of_its_block(saved, tmp_path, monkeypatch, isolate):
    """GPT-OSS, whose own code lets it."""
    found, begin = [], training.loop.begin_training

    @torch.no_grad()
    def caught(engine):
        begin(engine)
        ids_2T = torch.randint(1, 257, (1, 40)).repeat(2, 1)
        ids_2T[1, :16] = torch.arange(1, 17)  # another document before the same one
        position_2T = torch.cat([torch.arange(16), torch.arange(24)]).expand(2, -1)
        one, other = engine.wrapped(input_ids=ids_2T, position_ids=position_2T, use_cache=False).logits[:, 16:]
        found.append(float((one - other).abs().max()))

    monkeypatch.setattr(training.loop, "begin_training", caught)
    values = saved(gpt_oss())
    values["dataset"] = {**values["dataset"], "isolate_documents": isolate}
    train_here(values, tmp_path / "run", **SHORT)
    [difference] = found
    assert difference < 1e-4 if isolate else difference > 0.1


def test_a_model_that_cannot_keep_them_apart_is_refused(saved, tmp_path):
    torch.manual_seed(0)
    model = RobertaForCausalLM(
        RobertaConfig(
            **SIZES, **IDS, is_decoder=True, max_position_embeddings=512, pad_token_id=1, initializer_range=0.2
        )
    )
    message = "`model` is .*, and a roberta model does not read .*; set `dataset.isolate_documents` to false"
    values = saved(model)
    with pytest.raises(UserError, match=message):
        train_here(values, tmp_path / "run", **SHORT)
    values["dataset"] = {**values["dataset"], "isolate_documents": False}
    train_here(values, tmp_path / "run", **SHORT)
