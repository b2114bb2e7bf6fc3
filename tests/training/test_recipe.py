"""What the training loop minimizes and how ranks are chosen: distillation, nested ranks, floors, targets, decoders."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from methods import calibration_moments, dynakv_model, spread_gates, tiny_model
from transformers import AutoModelForCausalLM, MixtralConfig

import dynakv
from dynakv.gate import Gate
from dynakv.mask import entropy
from dynakv.objective import RateRecorder, RetainRates, objective
from lowrank_kv.utils.errors import UserError
from training.data import Batch
from training.distillation import summed_kl, teacher_logits, uncompressed
from training.inspection import inspect
from training.nested_ranks import allocate_ranks, draw_ranks
from training.reporting import bars, heat_map
from training.threshold_calibration import HIGHEST, calibrate_threshold
from training.throughput import model_flops
from training.validation import measure

ROOT = Path(__file__).parents[2]


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def test_the_teacher_is_the_stock_model():
    ids = token_ids(2, 20)
    stock = tiny_model()(ids, use_cache=False).logits
    model = tiny_model()
    dynakv_model(model, 0.3)
    model.train()
    parameters = list(model.parameters())
    torch.testing.assert_close(teacher_logits(model, {"input_ids": ids}), stock)
    assert model.training
    assert all(side.training for side in dynakv.token_compressors(model))
    assert not torch.allclose(model(ids, use_cache=False).logits, stock, atol=1e-2), "compressed again afterwards"
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    with pytest.raises(RuntimeError, match="inside"), uncompressed(model):
        raise RuntimeError("inside")
    assert dynakv.compressors(model)


def test_divergence_is_the_definition_s():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(2, 150, 11, generator=generator) for _ in range(2))
    targets = token_ids(2, 149)
    targets[0, 40:60] = -100
    p, q = teacher[:, :-1].softmax(-1), student[:, :-1].softmax(-1)
    expected = (p * (p / q).log()).sum(-1)[targets >= 0].sum()
    torch.testing.assert_close(summed_kl(student, teacher, targets), expected, rtol=1e-4, atol=0)
    assert float(summed_kl(student, student, targets)) == pytest.approx(0, abs=1e-4)


def test_nested_ranks_are_drawn_apart_and_again_from_the_seed():
    model = tiny_model()
    dynakv_model(model, 1, rank_policy="nested", decoder="orthogonal", granularity=6)
    model.train()
    ids = token_ids(1, 20)
    seen = set()
    for number in range(40):
        draw_ranks(model, f"0 {number}")
        drawn = [side.gate.drawn for side in dynakv.token_compressors(model)]
        seen |= set(drawn)
        with RateRecorder(model) as recorder:
            model(ids, use_cache=False)
        assert recorder.rates().hard_L2.flatten().tolist() == pytest.approx([rank / 32 for rank in drawn])
    assert seen == {6, 12, 18, 24, 30, 32}
    draw_ranks(model, "0 39")
    assert [side.gate.drawn for side in dynakv.token_compressors(model)] == drawn
    assert len(set(drawn)) > 1


def test_nested_training_moves_bases_and_serves_the_allocated_ranks(tmp_path):
    model = tiny_model()
    dynakv_model(model, 1, rank_policy="nested", decoder="orthogonal", granularity=1)
    model.train()
    draw_ranks(model, "0 1")
    ids = token_ids(2, 20)
    with RateRecorder(model) as recorder:
        loss = model(ids, labels=ids).loss
    objective(loss, recorder.rates(), 1.0).backward()
    for side in dynakv.token_compressors(model):
        [(name, parameter)] = side.named_parameters()
        assert name == "projection.weight"
        assert parameter.grad.abs().sum() > 0
    assert allocate_ranks(model, [Batch.from_ids(ids, None)], 0.4) == pytest.approx(0.4, abs=0.01)
    model.eval()
    assert measure(model, [Batch.from_ids(ids, None)])["hard_rate"] == pytest.approx(0.4, abs=0.01)
    assert len({int(side.gate.rank) for side in dynakv.token_compressors(model)}) > 1, (
        "water-filling, not one rank for all"
    )
    dynakv.save_compressor(model, tmp_path / "c")
    loaded = dynakv.attach(tiny_model(), tmp_path / "c")
    with torch.no_grad():
        served = loaded(ids)
        assert torch.equal(served.logits, model(ids).logits)
    assert 0.3 < served.past_key_values.rate < 0.55


@torch.no_grad()
def test_nested_ranks_are_allocated_by_the_energies_of_the_trained_basis():
    model = tiny_model()
    dynakv_model(model, 1, rank_policy="nested", decoder="orthogonal", granularity=1)
    sides = dynakv.token_compressors(model)
    for number, side in enumerate(sides):
        generator = torch.Generator().manual_seed(number)
        side.projection.weight += 0.1 * torch.randn(side.width, side.width, generator=generator)
    started_C = [side.gate.energies().clone() for side in sides]
    read = {side: [] for side in sides}
    for side in sides:
        side.register_forward_pre_hook(lambda side, arguments: read[side].append(arguments[0].flatten(0, 1)))
    allocate_ranks(model, [Batch.from_ids(token_ids(2, 20), None), Batch.from_ids(token_ids(1, 30, seed=1), None)], 0.4)
    for side, start_C in zip(sides, started_C, strict=True):
        coef_NC = torch.cat(read[side]).double() @ side.projection.matrices()[0].double()
        assert len(coef_NC) == 70
        torch.testing.assert_close(side.gate.energies().double(), coef_NC.square().mean(dim=0), rtol=1e-4, atol=1e-6)
        assert not torch.allclose(side.gate.energies(), start_C, rtol=0.05)


@torch.no_grad()
def test_a_decoupled_decoder_is_saved_loaded_and_served(tmp_path):
    model = tiny_model()
    dynakv_model(model, 0.5, decoder="decoupled")
    coupled = tiny_model()
    dynakv_model(coupled, 0.5)
    ids = token_ids(2, 24)
    torch.testing.assert_close(model(ids).logits, coupled(ids).logits, atol=1e-4, rtol=0)
    for side in dynakv.token_compressors(model):
        side.projection.decoder.mul_(1.3)
    changed = model(ids).logits
    assert not torch.allclose(changed, coupled(ids).logits, atol=1e-2), "the cached matrices must follow the decoder"
    dynakv.save_compressor(model, tmp_path / "c")
    assert torch.equal(dynakv.attach(tiny_model(), tmp_path / "c")(ids).logits, changed)
    dynakv.save_full(model, tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    assert torch.equal(loaded(ids).logits, changed)
    with pytest.raises(UserError, match="`decoder` cannot be overridden.*decoupled"):
        dynakv.attach(tiny_model(), tmp_path / "c", decoder="exact")
    # Nothing is inverted, so a singular U is not an error; what is not finite is.
    dynakv.token_compressors(model)[3].projection.weight[0] = 0
    model(ids)
    dynakv.token_compressors(model)[3].projection.decoder[0, 0] = torch.nan
    with pytest.raises(UserError, match="layer 1 values.*NaN"):
        model(ids)


def test_conditioning_is_reported():
    model = tiny_model()
    dynakv_model(model, 0.4)
    with torch.no_grad():
        dynakv.token_compressors(model)[1].projection.weight[:, 0] *= 5
        dynakv.token_compressors(model)[2].gate.open()
    model.train()
    found = inspect(model, token_ids(12))
    assert model.training
    assert found.rate_L2T.shape == (3, 2, 12)
    assert float(found.rate_L2T[1, 0].min()) == 1, "an open gate keeps all of every token"
    assert float(found.rate_L2T.min()) < 1
    torch.testing.assert_close(found.condition_L2.flatten(), torch.tensor([1.0, 5, 1, 1, 1, 1]), atol=1e-3, rtol=0)
    assert float(found.inversion_error_L2.max()) < 1e-5
    assert float(found.entropy_L2[1, 0]) == pytest.approx(0, abs=1e-4)
    assert float(found.entropy_L2[0, 0]) > 0.1
    assert found.values()["condition_largest"] == pytest.approx(5, abs=1e-3)


def test_entropy_of_a_flat_gate_is_the_logarithm_of_the_width():
    gate = Gate(16)
    torch.testing.assert_close(entropy(gate(torch.randn(1, 3, 16))), torch.full((1, 3), 16.0).log())


def test_the_price_turns_round_below_the_floor():
    soft = torch.tensor([[0.5, 0.2], [0.4, 0.3]], requires_grad=True)
    hard = torch.tensor([[0.5, 0.09], [0.4, 0.1]])
    priced = objective(torch.zeros(()), RetainRates(soft, hard), 2.0, floor=0.1)
    torch.testing.assert_close(priced, 2 * soft.mean() ** 2)
    priced.backward()
    slope = 2 * 2 * 0.35 / 4
    torch.testing.assert_close(soft.grad, slope * torch.tensor([[1.0, -1.0], [1.0, 1.0]]))


def test_keys_can_be_dearer_than_values():
    soft = torch.tensor([[0.5, 0.2], [0.4, 0.3]], requires_grad=True)
    rates = RetainRates(soft, torch.tensor([[0.5, 0.05], [0.4, 0.3]]))
    priced = objective(torch.zeros(()), rates, 2.0, floor=0.1, key_cost=3.0)
    mean = (1.5 * 0.5 + 0.5 * 0.2 + 1.5 * 0.4 + 0.5 * 0.3) / 4
    torch.testing.assert_close(priced, torch.tensor(2 * mean**2))
    priced.backward()
    torch.testing.assert_close(soft.grad, 2 * 2 * mean / 4 * torch.tensor([[1.5, -0.5], [1.5, 0.5]]))


def test_no_layer_is_pushed_below_its_floor():
    # A price so high that it alone decides; without a floor it closes every gate.
    moments = calibration_moments(tiny_model())

    def lowest(floor: float) -> float:
        model = tiny_model()
        dynakv_model(model, 1)
        dynakv.initialize_from_moments(model, moments)
        model.train()
        optimizer = torch.optim.Adam([side.gate.bias for side in dynakv.token_compressors(model)], lr=0.1)
        ids = token_ids(2, 32)
        for step in range(120):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 120)
            optimizer.zero_grad()
            with RateRecorder(model) as recorder:
                loss = model(ids, labels=ids).loss
            objective(loss, recorder.rates(), 200.0, floor=floor).backward()
            optimizer.step()
        with RateRecorder(model) as recorder:
            model(ids)
        return float(recorder.rates().hard_L2.min())

    assert lowest(0.0) < 0.4
    assert lowest(0.5) >= 0.5 - 1 / 32, "to within one coefficient"


@pytest.mark.parametrize("target", [0.5, 0.3, 0.2])
@pytest.mark.parametrize("granularity", [1, 4])
def test_the_calibrated_threshold_meets_the_target_on_other_text(target, granularity):
    model = tiny_model(num_key_value_heads=4)
    dynakv_model(model, 0.4, granularity=granularity)
    for index, side in enumerate(dynakv.token_compressors(model)):
        # As training leaves them: masks that fall about the target, differently from layer to layer and token to token.
        middle = 64 * (1 - target) + 4 * (index % 3)
        side.gate.weight.data.mul_(0.2)
        side.gate.bias.data.copy_(-((torch.arange(64) - middle) ** 2) / 100)
    calibrated = calibrate_threshold(model, [Batch.from_ids(token_ids(6, 100, seed=1), None)], target)
    rate = measure(model, [Batch.from_ids(token_ids(6, 100, seed=2), None)])["hard_rate"]
    assert calibrated["hard_rate"] == pytest.approx(target, abs=0.01)
    assert rate == pytest.approx(target, abs=0.01)
    assert dynakv.compressors(model)[0].key.config.threshold == calibrated["threshold"]


def test_threshold_calibration_stops_where_a_layer_reaches_its_floor():
    model = tiny_model()
    dynakv_model(model, 0.4)
    blocks = token_ids(4, 60)
    batch = Batch.from_ids(blocks, None)
    with pytest.warns(UserWarning, match="the calibrated threshold leaves the hard rate at .*, for a target of 0.05"):
        free = calibrate_threshold(model, [batch], 0.05)
    assert free["threshold"] == HIGHEST
    model.eval()

    def lowest() -> float:
        with torch.no_grad(), RateRecorder(model) as recorder:
            model(blocks, use_cache=False)
        return float(recorder.rates().hard_L2.min())

    floor = lowest() + 0.1
    with pytest.warns(UserWarning, match="above the floor"):
        held = calibrate_threshold(model, [batch], 0.05, floor=floor)
    assert held["threshold"] < HIGHEST
    assert floor - 0.01 < lowest() < floor + 0.05


def test_model_flops_are_counted():
    model = tiny_model()
    dynakv_model(model, 0.4)
    model.requires_grad_(False)
    for side in dynakv.token_compressors(model):
        side.requires_grad_(True)
    # 3 layers: q, o 64², k, v 64·32, gate, up, down 64·96; head 97·64; frozen, so 4 operations for each.
    backbone = 4 * (3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 97 * 64)
    assert model_flops(model, 10) == backbone + 6 * 3 * 2 * 3 * 32 * 32 + 6 * 10 * 64 * 3


def test_of_experts_the_flops_are_those_of_the_chosen():
    def flops(experts):
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = MixtralConfig(**size, **heads, num_local_experts=experts, num_experts_per_tok=2)
        model = AutoModelForCausalLM.from_config(config)
        routers = 6 * 2 * 64 * experts
        return model_flops(model, 10) - routers

    assert flops(16) == flops(4) == flops(2)


def test_figures_are_darker_where_more_is_kept():
    image = heat_map(torch.tensor([[0.0, 1.0], [0.5, 0.25]]))
    assert image.shape == (3, 24, 24)
    assert image[1, 0, 0] == 1
    assert image[1, 0, 23] == 0
    assert image[1, 23, 0] == 0.5
    drawn = bars(torch.tensor([1.0, 0.25]))
    heights = (1 - drawn[1]).sum(dim=0)
    assert heights.max() == 160
    assert heights[12:].max() == 40


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_matryoshka_is_a_preset_of_the_same_loop_and_reports_itself(here, four_steps, tiny_dir, text_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    preset = yaml.safe_load((ROOT / "configs/matryoshka.yaml").read_text())
    own = yaml.safe_load(four_steps.read_text())
    # The rate's price would grow without end, since nothing that is learned answers it.
    assert "gain" not in preset["rate"]
    merged = {**own, **{key: {**own.get(key, {}), **preset[key]} for key in ("compressor", "loss", "rate")}}
    four_steps.write_text(yaml.safe_dump(merged))
    here("train_dynakv.py", "--config", four_steps)
    output = tmp_path / "run"
    rows = rows_of(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        priced = 0.75 * row["cross_entropy"] + 0.25 * row["kl"] + row["alpha"] * row["soft_rate"] ** 2
        assert row["loss"] == pytest.approx(priced, rel=1e-4)
        assert row["kl"] > 0
        assert row["alpha"] == 0
        assert 0 < row["flop_utilization"] < 1
        assert row["peak_memory_bytes"] > 50e6
    assert len({row["hard_rate_keys"] for row in rows}) > 1
    looks = rows_of(output / "inspections.jsonl")
    assert [look["step"] for look in looks] == [2, 4]
    assert len(looks[0]["rate_keys"]) == 2
    assert len(looks[0]["rate_keys"][0]) == len(looks[0]["tokens"]) == len("the cache keeps | what")
    assert looks[0]["condition_largest"] == 1
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    images = {"rate/layers_by_keys_values", "conditioning/layers_by_keys_values"}
    assert set(events.Tags()["images"]) == images | {"sentence/tokens", "sentence/layers_by_tokens"}
    assert {"train/kl", "train/flop_utilization", "train/soft_rate_values"} <= set(events.Tags()["scalars"])
    summary = json.loads((output / "checkpoint/config.json").read_text())["summary"]
    assert summary["allocated_ranks"]["hard_rate"] == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compressor.rank_policy", "nested"), "`rate.target_retain_rate` must be given"),
        (
            ("--compressor.rank_policy", "nested", "--compressor.mask", "soft_prefix"),
            "`compressor.mask` must be `hard` where `rank_policy` is nested",
        ),
        (("--loss.cross_entropy", "0"), "`loss.cross_entropy` must be positive"),
        (("--loss.distillation", "0.5", "--trainable", "full"), "`loss.distillation` must be 0 with `trainable: full`"),
        (("--rate.layer_floor", "0.4", "--rate.target_retain_rate", "0.3"), "`rate.layer_floor` must be below"),
        (("--rate.key_cost", "0"), "`rate.key_cost` must be positive"),
        (
            ("--rate.target_retain_rate", "0.4", "--compressor.granularity", "16"),
            "`rate.target_retain_rate` must be at least 0.5: every token keeps `compressor.granularity`, 16, of 32 coeff",
        ),
        (("--calibration.bases", "nowhere"), "`nowhere` is no calibration"),
    ],
)
def test_mistakes_are_named_before_anything_runs(four_steps, tmp_path, arguments, message):
    from dynakv.training_config import TrainConfig
    from lowrank_kv.utils.config import parse_config
    from training.loop import train

    with pytest.raises(UserError) as caught:
        train(parse_config(TrainConfig, ["--config", str(four_steps), *arguments], description="")[0])
    assert message in str(caught.value)
    assert not (tmp_path / "run/checkpoint").exists()


def test_spread_gates_are_what_the_tests_above_take_them_for():
    # Ranks that differ from token to token; calibration and floors would be trivial without.
    model = tiny_model()
    dynakv_model(model, 0.4)
    spread_gates(model)
    found = inspect(model, token_ids(40))
    assert len(found.rate_L2T[0, 0].unique()) > 5
