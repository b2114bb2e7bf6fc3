"""What may be trained beside the compressor: LoRA adapters or the whole backbone, and that it comes back from disk."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from methods import tiny_model
from safetensors.torch import load_file
from training_runs import STILL, launch, losses, merged, summary, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereConfig, CohereForCausalLM

import dynakv
import training.finish
import training.loop
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.optimizer import build_optimizer

KINDS = ("lora", "full")
FEW = {"optimizer": {"steps": 3, "batch_size": 2, "lr_backbone": 1e-3}, "checkpoint_every": 2}


@pytest.fixture
def caught(monkeypatch):
    """The trained model as the loop had it in memory, and what it generates."""
    found = {}
    save = training.finish._save

    def catch(engine, tokenizer, output, values):
        model = engine.model.eval()
        ids = torch.arange(1, 30)[None]
        found["tokens"] = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        found["logits"] = model(input_ids=ids, use_cache=False).logits.detach()
        return save(engine, tokenizer, output, values)

    monkeypatch.setattr(training.finish, "_save", catch)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_reloaded_model_is_the_trained_one(training_values, tmp_path, caught, kind):
    pytest.importorskip("peft")
    directory = train_here(training_values, tmp_path / "run", trainable=kind, **FEW)
    assert directory == tmp_path / "run/full"
    assert not (tmp_path / "run/checkpoint").exists(), "a compressor alone would be put on the wrong backbone"
    model = AutoModelForCausalLM.from_pretrained(directory)
    AutoTokenizer.from_pretrained(directory)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, caught["logits"], atol=2e-4, rtol=0)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=12, do_sample=False), caught["tokens"])
    stock = AutoModelForCausalLM.from_pretrained(training_values["model"])
    moved = [
        name for name, value in stock.named_parameters() if not torch.equal(value, dict(model.named_parameters())[name])
    ]
    if kind == "full":
        assert len(moved) == len(list(stock.parameters()))
    else:
        assert len(moved) == 4 * stock.config.num_hidden_layers
        assert all("self_attn" in name for name in moved)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(training_values, tmp_path, kind):
    pytest.importorskip("peft")
    train_here(training_values, tmp_path / "whole", trainable=kind, **FEW)
    train_here(training_values, tmp_path / "parts", trainable=kind, **FEW)
    shutil.rmtree(tmp_path / "parts/full")
    shutil.rmtree(tmp_path / "parts/states/step-000003")  # the last one, after which nothing would be left to do
    train_here(training_values, tmp_path / "parts", trainable=kind, resume=True, **FEW)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for file in sorted((tmp_path / "whole/full").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "parts/full" / file.name).read_bytes()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_a_directory_of_an_adapter_is_no_model_to_train_on(training_values, tmp_path):
    """The run would take that adapter for its own, and switch it off where it asks the model by itself."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(training_values["model"])
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    values = {**training_values, "model": str(tmp_path / "adapter")}
    AutoTokenizer.from_pretrained(training_values["model"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"`model` is .*adapter, an adapter of peft.*merge_and_unload"):
        train_here(values, tmp_path / "run", **FEW)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("changes", [{"trainable": "lora"}, {"full_checkpoint": True}], ids=str)
def test_a_quantized_model_is_refused_before_training_what_it_cannot_save(
    training_values, tmp_path, monkeypatch, changes
):
    load = training.loop.load_model

    def load_quantized(*args, **options):
        model = load(*args, **options)
        model.config.quantization_config = SimpleNamespace(quant_method="bitsandbytes")
        return model

    monkeypatch.setattr(training.loop, "load_model", load_quantized)
    with pytest.raises(
        UserError, match="`model` is .*, which is quantized, and `.*` .*; set `trainable` to compressor"
    ):
        train_here(training_values, tmp_path / "run", **FEW, **changes)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def heads_with_norms():
    """A model whose norms of queries and keys have a row for each head."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True, "bos_token_id": None}
    return CohereForCausalLM(CohereConfig(**sizes, **heads, eos_token_id=None))


@pytest.mark.parametrize("made", [tiny_model, heads_with_norms])
@pytest.mark.parametrize("policy", ["gate", "soft_threshold", "plan"])
def test_weights_decay_in_the_backbones_matrices_alone(policy, made):
    """Biases of gates and bounds of classes learn so fast that a decay would take them to zero."""
    model = made()
    loss = {"cross_entropy": 1, "distillation": 0}
    values = {
        "model": "m",
        "dataset": {"name": "t"},
        "trainable": "full",
        "loss": loss,
        "rate": {"target_retain_rate": 0.3},
    }
    values |= {"compressor": {"rank_policy": policy}, "optimizer": {"weight_decay": 0.1}}
    config = build(TrainConfig, values)
    dynakv.add_compressors(model, config.compressor)
    own = {id(each) for compressor in dynakv.token_compressors(model) for each in compressor.parameters()}
    groups = build_optimizer(model, config, 1e-3).param_groups
    decays = {id(each): group["weight_decay"] for group in groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        decays_here = id(parameter) not in own and "norm" not in name and "bias" not in name
        assert decays[id(parameter)] == (0.1 if decays_here else 0), name


@pytest.mark.slow
def test_lora_under_zero_3_equals_plain(training_values, tmp_path):
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    train_here(training_values, tmp_path / "plain", trainable="lora", **FEW)
    launch(
        "zero3",
        2,
        training_values,
        tmp_path / "zero",
        trainable="lora",
        **{**FEW, "optimizer": {**FEW["optimizer"], "batch_size": 1}},
    )
    assert summary(tmp_path / "zero")["engine"] == {"type": "DEEPSPEED", "zero_stage": 3}
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    train_here(training_values, tmp_path / "still", trainable="lora", **merged(FEW, STILL))
    names = ("still", "plain", "zero")
    start, one, two = (load_file(tmp_path / name / "full/model.safetensors") for name in names)
    assert start.keys() == one.keys() == two.keys()
    moved = {name: float((value - start[name]).norm()) for name, value in one.items()}
    assert sum(distance > 0 for distance in moved.values()) == 2 * (4 + 2 * 3), "adapted projections; U, W and b"
    for name, value in one.items():
        assert float((two[name] - value).norm()) <= 0.01 * moved[name], name


def test_bf16_keeps_what_is_trained_in_fp32(training_values, tmp_path):
    directory = train_here(training_values, tmp_path / "run", dtype="bfloat16", trainable="full", **FEW)
    whole = load_file(directory / "model.safetensors")
    assert {value.dtype for value in whole.values()} == {torch.float32}
    alone = train_here(training_values, tmp_path / "alone", dtype="bfloat16", full_checkpoint=True, **FEW)
    assert {value.dtype for value in load_file(alone / "compressor.safetensors").values()} == {torch.float32}
    whole = load_file(alone.parent / "full/model.safetensors")
    compressor = {value.dtype for name, value in whole.items() if "kv_compressor" in name}
    backbone = {value.dtype for name, value in whole.items() if "kv_compressor" not in name}
    assert (compressor, backbone) == ({torch.float32}, {torch.bfloat16})


def test_fp16_needs_what_is_not_there(training_values, tmp_path):
    with pytest.raises(UserError, match="`dtype` must be one of float32, bfloat16"):
        train_here(training_values, tmp_path / "run", dtype="float16")
