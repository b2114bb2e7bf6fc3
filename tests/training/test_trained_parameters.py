"""`trainable: full` trains what a pass over text gives gradients to, and nothing that it does not."""

import shutil

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file
from training_runs import launch, losses, train_here
from transformers import BertConfig, BertLMHeadModel, Gemma3Config, Gemma3ForConditionalGeneration

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from scripts.tiny_families import families, tiny_configs, tiny_model
from training.memory_plan import size_of_run
from training.optimizer import build_optimizer, reached_by_text

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
FEW = {"optimizer": {"steps": 3, "batch_size": 2, "lr_backbone": 1e-3}, "checkpoint_every": 2, "trainable": "full"}


@pytest.fixture
def with_images(tmp_path):
    """A tiny Gemma 3 with its vision tower, saved with a byte tokenizer."""
    torch.manual_seed(0)
    text = {
        **SIZES,
        **IDS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * 2,
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252}
    directory = tmp_path / "gemma3"
    Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).save_pretrained(
        directory
    )
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_a_model_that_reads_images_is_trained_saved_and_resumed(training_values, with_images, tmp_path):
    values = {**training_values, "model": str(with_images)}
    directory = train_here(values, tmp_path / "whole", **FEW)
    train_here(values, tmp_path / "parts", **FEW)
    shutil.rmtree(tmp_path / "parts/full")
    shutil.rmtree(tmp_path / "parts/states/step-000003")  # the last one, after which nothing would be left to do
    train_here(values, tmp_path / "parts", resume=True, **FEW)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    before, after = (load_file(each / "model.safetensors") for each in (with_images, directory))
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if "language_model" in name or "lm_head" in name} != set()
    saved = load_file(tmp_path / "whole/states/step-000002/backbone.safetensors")
    assert len(saved) == len(moved)


# With encoders beside the decoder and within it, with routers' biases that have no gradient, and others.
@pytest.mark.parametrize(
    "name",
    ["gemma3", "gemma4", "gemma4_unified", "phi4_multimodal", "afmoe", "ernie4_5_moe", "laguna", "llama4", "opt"],
)
def test_all_that_is_trained_gets_gradients_and_all_that_gets_some_is_trained(name):
    model = tiny_model(next(tiny_configs(families()[name])))
    model.requires_grad_(True)  # as it is after loading
    trained = {id(parameter) for parameter in reached_by_text(model)}
    model(input_ids=torch.randint(3, 90, (2, 16)), use_cache=False).logits.float().square().sum().backward()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reached = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    assert {names[each] for each in trained} == {names[each] for each in reached}


def test_the_optimizer_and_a_plan_have_what_is_trained_and_nothing_else():
    gates = {"rank_policy": "gate"}
    config = build(
        TrainConfig, {"model": "none", "trainable": "full", "dataset": {"name": "none"}, "compressor": gates}
    )
    model = tiny_model(next(tiny_configs(families()["gemma3"])))
    size = size_of_run(config, model)
    assert size.frozen == sum(each.numel() for each in model.parameters() if not each.requires_grad) > 0
    assert not any(each.requires_grad for each in model.model.vision_tower.parameters())
    optimizer = build_optimizer(model, config, 0.0)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert held == {id(each) for each in model.parameters() if each.requires_grad}


def test_what_no_gradient_reaches_is_named_before_the_first_step(training_values, tmp_path):
    torch.manual_seed(0)
    # Untied, one of its two biases of the logits is not used.
    config = BertConfig(**SIZES, **IDS, max_position_embeddings=512, is_decoder=True, tie_word_embeddings=False)
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    message = (
        "`trainable` is full, and text gives no gradient to 1 of the model's parameters, such as `cls.predictions.bias`"
    )
    with pytest.raises(UserError, match=message):
        train_here({**training_values, "model": str(tmp_path / "bert")}, tmp_path / "run", **FEW)


@pytest.mark.slow
def test_two_processes_train_it_as_one_does(training_values, with_images, tmp_path):
    values = {**training_values, "model": str(with_images)}
    train_here(values, tmp_path / "alone", **FEW)
    launch("ddp", 2, values, tmp_path / "run", **{**FEW, "optimizer": {**FEW["optimizer"], "batch_size": 1}})
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
