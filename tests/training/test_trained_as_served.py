"""What training sees of a cache, and what it says about it, is what is served."""

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from families import RECURRENT
from methods import dynakv_model, planned_model, tiny_model
from training_runs import merged, rows, summary, train_here

import dynakv
import training.loop as loop
from dynakv.measured_rates import measured_rates
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.gradient_moments import gradient_moments, probes_of
from lowrank_kv.hf.attention import PREPARED
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.data import Batch
from training.data_sources import heldout_blocks
from training.distillation import read_by_teacher, uncompressed
from training.measure_command import main as measure_command
from training.model_card import model_card

# A plan of bits as training that is told nothing learns it, and small enough for the tiny model.
PLANNED = {
    "compressor": {"rank_policy": "plan"},
    "calibration": {"start": None, "tokens": 1024},
    "rate": {"target_retain_rate": 0.15, "calibrate_threshold_tokens": 1024},
    "dataset": {"sequence_length": 128},
}


def seen_by(model):
    return [getattr(module, PREPARED).exact_tokens for module in attention_modules(model).values()]


def test_a_calibration_leaves_what_tokens_see():
    model, exact = tiny_model(), ExactTokens(num_sink_tokens=1, recent_window=3, update_period=4)
    planned_model(model, 0.15)
    dynakv.set_exact_tokens(model, exact)
    with uncompressed(model):
        gradient_moments(model, torch.randint(1, 97, (2, 24)), progress=False)
        with probes_of(model, ExactTokens()):
            assert seen_by(model) == [ExactTokens()] * 3
    assert seen_by(model) == [exact] * 3


def test_a_run_that_calibrates_itself_goes_on_from_a_state_as_it_was(training_values, tmp_path, monkeypatch):
    values = merged(training_values, merged(PLANNED, {"checkpoint_every": 2, "optimizer": {"steps": 4}}))
    train_here(values, tmp_path / "whole")
    step = loop._step

    def stopped(engine, run, *args):
        if run.step == 2:
            raise KeyboardInterrupt
        step(engine, run, *args)

    monkeypatch.setattr(loop, "_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_here(values, tmp_path / "run")
    monkeypatch.setattr(loop, "_step", step)
    train_here(values, tmp_path / "run", resume=True)
    assert [row["kl"] for row in rows(tmp_path / "run")] == [row["kl"] for row in rows(tmp_path / "whole")]


def reconstructed_plan(model):
    make_cache = planned_model(model, 0.15, num_sink_tokens=1)
    dynakv.configure(model, prefill="reconstructed")
    return make_cache


MADE = {
    "gates, exact prompts": lambda model: dynakv_model(model, 0.5, prefill="exact"),
    "gates": lambda model: dynakv_model(model, 0.5),
    "plan, exact prompts": lambda model: planned_model(model, 0.15, num_sink_tokens=1),
    "plan": reconstructed_plan,
    "plan of rows": lambda model: planned_model(model, 0.15, num_sink_tokens=1, token_classes=4, joint_layers=1),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@torch.no_grad()
def test_each_token_is_trained_as_it_is_decoded(made):
    """One layer, whose inputs no other layer changes: token by token through the cache, and in a training pass."""
    model = tiny_model(num_hidden_layers=1)
    cache = made(model)()
    ids = torch.randint(1, 97, (1, 44), generator=torch.Generator().manual_seed(2))
    served = [model(part, past_key_values=cache).logits for part in ids.split(1, dim=1)]
    dynakv.set_exact_tokens(model, dynakv.settings_of(model).seen_exactly)
    inputs = Batch.from_ids(ids, None).inputs
    _, more = read_by_teacher(model, inputs, logits=False)
    trained = model(**inputs, **more, use_cache=False).logits
    # The first is a prompt. Where prompts are rebuilt, a period is compressed before the token that ends it attends.
    compared = [place for place in range(1, 44) if made is not reconstructed_plan or place % 4]
    torch.testing.assert_close(torch.cat(served, dim=1)[:, compared], trained[:, compared], atol=2e-4, rtol=0)


def test_heldout_rates_are_those_of_the_text(training_values, text_file, tmp_path):
    """Tokens of another text are divided into classes otherwise, and take other bytes."""
    generator = torch.Generator().manual_seed(3)
    letters = "".join(chr(33 + int(each)) for each in torch.randint(0, 90, (4000,), generator=generator))
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": letters}) + "\n")
    changes = {"dataset": {"heldout": [str(text_file), str(tmp_path / "other.jsonl")]}, "heldout_blocks": 4}
    values = merged(training_values, merged(PLANNED, changes))
    checkpoint = train_here(values, tmp_path / "run")
    config = build(TrainConfig, {**values, "output": "unused"})
    found, tokenizer = summary(tmp_path / "run"), loop.load_tokenizer(values["model"])
    model = dynakv.attach(load_model(values["model"]), checkpoint, self_check=False)
    dynakv.set_exact_tokens(model, config.compressor.seen_exactly)
    for name, batches in heldout_blocks(config, tokenizer).items():
        assert found["heldout"][name]["hard_rate"] == pytest.approx(counted_rate(model, batches), rel=1e-3)
    rates = [found["heldout"][name]["hard_rate"] for name in ("text.jsonl", "other.jsonl")]
    assert rates[1] > 1.05 * rates[0]
    expected = found["measured_classes"]
    saved = measured_rates(checkpoint, dynakv.checkpoint_files.read_config(checkpoint))
    assert saved.mean == pytest.approx(expected["hard_rate"], abs=1e-4)
    assert saved.source.endswith("as those of the training text")


@torch.no_grad()
def counted_rate(model, batches):
    """Bytes of these tokens by the classes that each side's own input falls into."""
    shares = []

    def count(side, arguments, _):
        basis_CC, _ = side.projection.fixed_matrices(torch.float32, torch.device("cpu"))
        plan = side.gate.plan
        class_N = plan.classes(arguments[0].flatten(0, -2) @ basis_CC)
        sizes = torch.tensor(plan.row_bytes(), dtype=torch.float64)
        shares.append(float(sizes[class_N].mean() + 3 / 8) / (2 * side.width))

    hooks = [side.register_forward_hook(count) for side in dynakv.token_compressors(model)]
    for batch in batches:
        model(**batch.inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sum(shares) / len(shares)


@pytest.fixture(scope="module")
def planned(training_values, tmp_path_factory):
    return train_here(merged(training_values, PLANNED), tmp_path_factory.mktemp("planned") / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": {"target_retain_rate": 0.1}}, "`rate.target_retain_rate` must be 0.15, for which the plan of"),
        ({"compressor": {"token_classes": 1}}, "`compressor.token_classes` is 1, and the checkpoint"),
    ],
)
def test_a_plan_is_not_trained_on_towards_another(changes, message, planned, training_values, tmp_path):
    values = merged(training_values, merged(PLANNED, changes))
    with pytest.raises(UserError, match=message):
        train_here(values, tmp_path / "run", initial_checkpoint=str(planned))
    assert not (tmp_path / "run/checkpoint").exists()


def test_a_plan_is_trained_on_towards_its_own_rate(planned, training_values, tmp_path, recwarn):
    values = merged(training_values, PLANNED)
    on = train_here(values, tmp_path / "run", initial_checkpoint=str(planned), optimizer={"steps": 1})
    assert not [each for each in recwarn if "is served with" in str(each.message)]
    bits = [
        dynakv.checkpoint_files.read_state(each / "compressor.safetensors")["layers.0.key.gate.bits"]
        for each in (planned, on)
    ]
    assert torch.equal(*bits)


def test_a_run_that_would_be_served_otherwise_than_its_start_says_so(planned, training_values, tmp_path):
    values = merged(training_values, merged(PLANNED, {"compressor": {"own_directions": 2}}))
    message = "`compressor.own_directions` is 2, and `initial_checkpoint` is served with 0; set it to that"
    with pytest.warns(UserWarning, match=message):
        train_here(values, tmp_path / "run", initial_checkpoint=str(planned), optimizer={"steps": 1})


@pytest.mark.parametrize("isolates", [True, False])
def test_a_measurement_reads_as_training_did_and_keeps_the_base_model(
    training_values, tiny_dir, text_file, tmp_path, isolates
):
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    short = [text[start : start + 40] for text in texts for start in (0, 40, 80)]
    text_file = tmp_path / "text.jsonl"
    text_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    dataset = {"name": str(text_file), "heldout": str(text_file), "isolate_documents": isolates}
    values = merged(training_values, {"compressor": {"prefill": "exact"}, "dataset": dataset})
    checkpoint = train_here(values, tmp_path / "run", heldout_blocks=4)
    trained = summary(tmp_path / "run")["heldout"]["text.jsonl"]
    (tmp_path / "copy").symlink_to(tiny_dir)
    arguments = ["--checkpoint", str(checkpoint), "--name", str(text_file), "--model", str(tmp_path / "copy")]
    with pytest.warns(UserWarning, match="trained on"):
        measure_command([*arguments, "--tokens", "256", "--length", "64"])
    saved = dynakv.checkpoint_files.read_config(checkpoint)
    assert saved.base_model == str(tiny_dir)
    measured = saved.summary["heldout"]["text.jsonl"]
    for key in ("hard_rate", "perplexity", "kl", "scored"):
        assert measured[key] == pytest.approx(trained[key], rel=1e-4)
    measure_command([*arguments[:-2], "--tokens", "256", "--length", "64", "--isolate_documents", str(not isolates)])
    otherwise = dynakv.checkpoint_files.read_config(checkpoint).summary["heldout"]["text.jsonl"]
    assert otherwise["perplexity"] != pytest.approx(trained["perplexity"], rel=1e-4)


def test_an_empty_section_is_one_that_is_left_out():
    values = {"model": "m", "dataset": {"name": ["t"]}}
    assert build(TrainConfig, {**values, "compressor": None}) == build(TrainConfig, values)


def test_a_target_that_no_rank_reaches_is_refused_before_training(training_values, tmp_path):
    changes = {"compressor": {"rank_policy": "nested", "granularity": 16}, "rate": {"target_retain_rate": 0.2}}
    with pytest.raises(
        UserError, match=r"`rate.target_retain_rate` must be at least 0.5: .*`compressor.granularity`, 16"
    ):
        train_here(training_values, tmp_path / "run", **changes)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
def test_documents_of_a_recurrent_model_cannot_be_kept_apart(training_values, tmp_path, family):
    family.model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"recurrent layers carry a state .*; set `dataset.isolate_documents` to false"):
        train_here(training_values, tmp_path / "run", model=str(tmp_path / "model"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_backbone_in_another_dtype_leaves_the_compressor_whole(planned, tiny_dir, tmp_path, dtype):
    model = dynakv.attach(load_model(str(tiny_dir)), planned, self_check=False)
    before = dynakv.checkpoint.compressor_state(model)
    for backbone in (dtype, torch.float32):
        model.to(backbone)
        assert model.dtype == backbone
        after = dynakv.checkpoint.compressor_state(model)
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor)
        dynakv.save_compressor(model, tmp_path / "again")
        dynakv.attach(load_model(str(tiny_dir)), tmp_path / "again", self_check=False)


@pytest.mark.parametrize("training", [False, True])
def test_a_backbone_in_fp64_runs_with_a_plan(planned, tiny_dir, training):
    model = dynakv.attach(load_model(str(tiny_dir)), planned, self_check=False).train(training)
    ids = torch.randint(1, 257, (1, 60), generator=torch.Generator().manual_seed(0))
    expected = model(ids, use_cache=False).logits
    found = model.double()(ids, use_cache=False).logits
    assert found.dtype == torch.float64
    # A coefficient at the border of two codes may go to either side.
    assert (found - expected).norm() < 0.05 * expected.norm()


@torch.no_grad()
def test_autocast_does_not_reach_a_plan(planned, tiny_dir):
    model = dynakv.attach(load_model(str(tiny_dir)), planned, self_check=False)
    side = dynakv.compressors(model)[1].value
    states = torch.randn(1, 50, side.width, generator=torch.Generator().manual_seed(0))
    side.train()
    expected, error = side(states)[0], side.projection.inversion_error()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(side(states)[0], expected, atol=1e-4)
        assert side.projection.inversion_error() == error < 1e-5


@pytest.mark.parametrize(("trainable", "says"), [("compressor", "to the uncompressed"), ("full", "without its comp")])
def test_a_card_says_of_what_the_divergence_is(trainable, says, training_values):
    values = merged(training_values, {"output": "out", "trainable": trainable})
    values["dataset"] = {**values["dataset"], "name": ["/data/private/te*.jsonl", "allenai/c4"], "weights": [1, 1]}
    found = {
        "tokens": 1,
        "steps": 1,
        "rounds": {"te*.jsonl": 1, "c4": 1},
        "heldout": {"text": {"hard_rate": 0.1, "perplexity": 2.0, "kl": 0.1, "scored": 9}},
    }
    record = {"run_id": "id", "code": {"version": "1", "commit": "c"}}
    card = model_card(build(TrainConfig, values), record, found, is_compressor=trainable == "compressor")
    assert says in card
    assert "/data" not in card
    assert "datasets:\n- allenai/c4\n---" in card


def test_both_checkpoints_of_a_run_have_a_card_of_their_own(training_values, tmp_path):
    train_here(training_values, tmp_path / "run", full_checkpoint=True, optimizer={"steps": 1})
    cards = {name: (tmp_path / "run" / name / "README.md").read_text() for name in ("checkpoint", "full")}
    assert "lowrank_kv.compress(" in cards["checkpoint"]
    assert "lowrank_kv.compress(" not in cards["full"]
    assert 'from_pretrained("THIS_REPOSITORY")' in cards["full"]
