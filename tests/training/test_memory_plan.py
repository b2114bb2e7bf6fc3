"""What a plan says a run needs is what a run holds."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import yaml
from training_runs import merged, train_here
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

import dynakv
from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import load_shape, recompute_activations
from lowrank_kv.utils.config import build, read_yaml
from lowrank_kv.utils.errors import UserError
from training import command
from training.memory_plan import GB, advised, plans, report, size_of_run, table
from training.optimizer import build_optimizer

ROOT = Path(__file__).parents[2]
LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
QWEN = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
RECIPE = ROOT / "configs/redpajama-8b.yaml"


def shape_of(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def values(**changes):
    base = {"model": "none", "dataset": {"name": "none", "sequence_length": 64}, "compressor": {"rank_policy": "gate"}}
    return build(TrainConfig, {**base, **changes})


def small(layers=3) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=128,
        tie_word_embeddings=False,
    )


def trained_model(shape: LlamaConfig, config: TrainConfig) -> LlamaForCausalLM:
    """A model as the training loop has it; its backbone is fp32 where it is trained."""
    dtype = torch.float32 if config.trainable == "full" else getattr(torch, config.dtype)
    model = LlamaForCausalLM(shape).to(dtype).train()
    dynakv.add_compressors(model, config.compressor)
    for compressor in dynakv.token_compressors(model):
        torch.nn.init.orthogonal_(compressor.projection.weight)
    build_optimizer(model, config, 0.0)
    dynakv.use_dynakv_cache(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    return model


def forward(model: LlamaForCausalLM, config: TrainConfig) -> torch.Tensor:
    """The logits of a pass of training."""
    ids = torch.arange(config.dataset.sequence_length)[None] % 97 + 1
    with torch.autocast("cpu", torch.bfloat16, enabled=(config.trainable, config.dtype) == ("full", "bfloat16")):
        return model(input_ids=ids, use_cache=False).logits


def saved_bytes(shape: LlamaConfig, config: TrainConfig) -> int:
    """What autograd keeps of one pass, parameters aside."""
    model = trained_model(shape, config)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # or its address might be another's later
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, config)
    return sum(found.values())


def peak_bytes(run) -> int:
    """The most that torch's allocator holds at a time while `run` runs, beside what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
    return max(held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainable", ["compressor", "full"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_those_that_autograd_keeps(dtype, trainable, recompute):
    """Of one layer more and of more tokens, so that what does not grow with both cancels, such as copies of weights."""
    config = values(dtype=dtype, trainable=trainable, gradient_checkpointing=recompute)
    lengths = {"dataset": {"name": "none", "sequence_length": 128}}
    longer = values(dtype=dtype, trainable=trainable, gradient_checkpointing=recompute, **lengths)
    found = [saved_bytes(small(layers), longer) - saved_bytes(small(layers), config) for layers in (2, 3)]
    planned = [size_of_run(config, shape_of(small(layers))).activations for layers in (2, 3)]
    assert planned[1] - planned[0] == pytest.approx(found[1] - found[0], rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_pass_holds_copies_of_weights_where_these_are_trained_in_fp32(recompute, tied):
    """In bf16, under autocast. Short texts and small compressors, so that most of what is held are copies."""
    text = {"dataset": {"name": "none", "sequence_length": 16}}
    config = values(dtype="bfloat16", trainable="full", gradient_checkpointing=recompute, **text)
    other = {"vocab_size": 2048, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    shape = LlamaConfig(**{**small(4).to_dict(), **other})
    model, size = trained_model(shape, config), size_of_run(config, shape_of(shape))

    def whole_pass() -> None:
        forward(model, config).float().square().mean().backward()

    whole_pass()  # inverts projections and makes gradients
    kept = []
    found = peak_bytes(lambda: kept.append(forward(model, config)))
    assert found == pytest.approx(size.activations + size.output + size.copies, rel=0.05)
    assert size.copies > 0.7 * found
    kept.clear()
    # Without recomputation the peak is in the backward pass, beside its largest gradient, in both dtypes at most. A plan
    # takes that for one of the allocator's gaps.
    gradient = 0 if recompute else 6 * model.get_output_embeddings().weight.numel()
    assert 0.9 * size.of_pass < peak_bytes(whole_pass) < 1.1 * size.of_pass + gradient


@pytest.mark.parametrize(("trainable", "dtype"), [("compressor", "bfloat16"), ("full", "float32")])
def test_no_other_run_holds_copies(trainable, dtype):
    size = size_of_run(values(trainable=trainable, dtype=dtype), shape_of(small()))
    assert (size.copies, size.kept_copies, size.of_pass) == (0.0, 0.0, size.of_text)


def test_zero_3_multiplies_without_copies_of_weights():
    zero = pytest.importorskip("deepspeed.runtime.zero.linear")
    weight, states = torch.randn(512, 512, requires_grad=True), torch.randn(1, 2, 512, requires_grad=True)
    for multiply, is_kept in ((torch.nn.functional.linear, True), (zero.zero3_linear_wrap, False)):
        with torch.autocast("cpu", torch.bfloat16):
            multiply(states, weight)
            again = peak_bytes(functools.partial(multiply, states, weight))
        assert (again < weight.numel()) == is_kept, "a copy in bf16 has two bytes of each number"
    size = size_of_run(values(trainable="full", dtype="bfloat16"), shape_of(small()))
    without = dataclasses.replace(size, copies=0.0, kept_copies=0.0)
    for one, other in zip(plans(size, 8), plans(without, 8), strict=True):
        assert (one.gpu == other.gpu) == one.name.startswith("zero3")


@pytest.mark.parametrize("trainable", ["compressor", "full"])
def test_trained_numbers_are_those_of_the_optimizer(trainable):
    config = values(trainable=trainable, dtype="float32")
    size = size_of_run(config, shape_of(small()))
    model = LlamaForCausalLM(small())
    dynakv.add_compressors(model, config.compressor)
    optimizer = build_optimizer(model, config, 0.0)
    assert size.trained == sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    everything = sum(each.numel() for each in model.parameters())
    assert (size.frozen, size.itemsize) == (everything - size.trained, 4)


@pytest.mark.parametrize("policy", ["gate", "plan"])
def test_what_compressors_hold_beside_what_they_train_is_counted(policy):
    config = values(compressor={"rank_policy": policy})
    size = size_of_run(config, shape_of(small()))
    model = dynakv.add_compressors(LlamaForCausalLM(small()), config.compressor)
    held = [each for compressor in dynakv.token_compressors(model) for each in compressor.buffers()]
    assert size.buffers == sum(each.nbytes for each in held) > 0
    with_them, without = (plans(dataclasses.replace(size, buffers=each), 8) for each in (size.buffers, 0.0))
    assert all(one.gpu > other.gpu for one, other in zip(with_them, without, strict=True))


def test_layers_that_are_coded_together_are_not_sent_to_an_engine_that_refuses_them():
    config = values(compressor={"rank_policy": "plan", "joint_layers": 3})
    found = report(config, gpus=8, gpu_memory=80.0, model=shape_of(small()))
    assert "zero3" not in found
    assert "the rows of all layers, recomputed or not" in found


def test_an_8b_model_with_a_frozen_backbone_belongs_on_ddp_and_a_trained_one_does_not():
    recipe = read_yaml(RECIPE)
    for trainable, expected in (("compressor", "ddp"), ("full", "zero2")):
        size = size_of_run(build(TrainConfig, {**recipe, "trainable": trainable}), shape_of(LLAMA))
        found = plans(size, 8)
        assert advised(found, 80 * GB).name == expected
        by_name = {each.name: each for each in found}
        assert by_name["zero3"].gpu < by_name["zero2"].gpu <= by_name["zero1"].gpu
        assert by_name["zero3"].sent > 5 * by_name["ddp"].sent, "what is gathered at every pass"
        assert by_name["zero3-offload"].gpu == min(each.gpu for each in found)
    assert 130e6 < size_of_run(build(TrainConfig, recipe), shape_of(LLAMA)).trained < 140e6


@pytest.mark.parametrize("name", ["redpajama-8b", "dynakv-paper"])
def test_a_recipe_of_8b_models_names_the_engine_that_a_plan_advises(name):
    path = ROOT / f"configs/{name}.yaml"
    found = plans(size_of_run(build(TrainConfig, read_yaml(path)), shape_of(LLAMA)), 8)
    named = set(re.findall(r"--config_file configs/accelerate/(\S+).yaml", path.read_text(encoding="utf-8")))
    assert named == {advised(found, 80 * GB).name}


def test_more_gpus_and_shorter_texts_never_need_more():
    config = values()
    size = size_of_run(config, shape_of(small()))
    for few, many in zip(plans(size, 2), plans(size, 16), strict=True):
        assert many.gpu <= few.gpu
    longer = size_of_run(values(dataset={"name": "none", "sequence_length": 128}), shape_of(small()))
    assert longer.of_text == 2 * size.of_text
    [single] = plans(size, 1)
    assert (single.name, single.sent) == ("single", 0)


def test_nothing_that_fits_says_what_to_do():
    found = report(values(), gpus=8, gpu_memory=0.5, model=shape_of(small()))
    assert "none fits 0.5 GB: shorten `dataset.sequence_length`" in found
    with pytest.raises(UserError, match="--gpus"):
        report(values(), gpus=0, gpu_memory=80.0, model=shape_of(small()))


def test_the_command_plans_and_trains_nothing(tiny_dir, text_file, tmp_path, here):
    config = tmp_path / "train.yaml"
    settings = {"model": str(tiny_dir), "output": str(tmp_path / "run"), "dataset": {"name": str(text_file)}}
    config.write_text(yaml.safe_dump(settings))
    found = here("train_dynakv.py", "--config", config, "--plan", "--gpus", 4)
    assert "| **ddp** |" in found
    assert "use configs/accelerate/ddp.yaml of a checkout" in found
    for option in ("--gpus", "--gpu_memory"):  # without which a run of one process would begin
        with pytest.raises(UserError, match=f"`{option}` is of `--plan`.*to train on several GPUs: `lowrank-kv launch"):
            command.main(["--config", str(config), option, "4"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("trainable", ["compressor", "full"])
def test_a_machine_has_room_for_a_state_while_it_is_written(training_values, tmp_path, trainable):
    """The first process holds all of it: what is trained, and its moments."""
    changes = {"trainable": trainable, "optimizer": {"steps": 1}, "checkpoint_every": 1}
    train_here(training_values, tmp_path / "run", **changes)
    files = [path for path in (tmp_path / "run/states/step-000001").iterdir() if path.suffix == ".safetensors"]
    config = build(TrainConfig, merged({**training_values, "output": str(tmp_path)}, changes))
    [single] = plans(size_of_run(config, load_shape(training_values["model"])), 1)
    assert single.host == pytest.approx(sum(path.stat().st_size for path in files), rel=0.05)
    assert len(files) == (2 if trainable == "compressor" else 3)


@pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("trainable", ["compressor", "full"])
def test_the_guides_tables_are_these(model, trainable):
    config = build(TrainConfig, {**read_yaml(RECIPE), "trainable": trainable})
    found = plans(size_of_run(config, shape_of(model)), 8)
    expected = "\n".join(table(found, advised(found, 80 * GB)))
    assert expected in (ROOT / "docs/training.md").read_text(encoding="utf-8"), expected
