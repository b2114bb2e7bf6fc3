"""Rows of several layers learned: what a training pass rebuilds is what a cache does, and what is written is served."""

import pytest
import torch
from methods import planned_model, tiny_model
from training_runs import EXACT, PLANNED, STILL, assert_learned, launch, launched, losses, merged, summary, train_here

import dynakv
from dynakv.checkpoint import load_compressors
from dynakv.checkpoint_files import read_config
from dynakv.joint_rows import rebuilt_states, states_of_pass
from dynakv.measured_rates import measured_rates
from dynakv.objective import RateRecorder, objective
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.activation_moments import KEY_VALUE
from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.attention import REBUILT
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.data import Batch
from training.distillation import read_by_teacher, summed_kl, uncompressed, without_compressors
from training.inspection import inspect
from training.optimizer import build_optimizer

# At a rate at which rows of two layers have something to learn.
JOINT = merged(
    PLANNED,
    {
        "compressor": {"joint_layers": 2},
        "rate": {"target_retain_rate": 0.04},
        "optimizer": {"lr_projection": 3e-4},
    },
)
# Which bits the plans of a tiny model give depends on the processor's sums: how far a step moves the loss, and which texts
# have a number at the border of two codes, where rounding decides.
IS_NARROW = torch.backends.cpu.get_cpu_capability() == "AVX2"
LR_THAT_MOVES, CLEAR_TEXT = (6e-3, 1) if IS_NARROW else (3e-3, 0)


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def joint_model(rate: float = 0.2, joint_layers: int = 2, **more):
    """(model, maker of caches); of the three layers the last one is coded by itself where two are coded together."""
    model = tiny_model()
    make_cache = planned_model(model, rate, joint_layers=joint_layers, **more)
    dynakv.set_exact_tokens(model, EXACT)
    return model, make_cache


@pytest.mark.parametrize("joint_layers", [1, 2, 3])
@pytest.mark.parametrize("token_classes", [1, 4])
@torch.no_grad()
def test_a_pass_rebuilds_what_a_cache_rebuilds(joint_layers, token_classes):
    model, make_cache = joint_model(joint_layers=joint_layers, token_classes=token_classes)
    ids = token_ids(1, 41, seed=CLEAR_TEXT)
    with states_of_pass(model) as states, uncompressed(model):
        model(ids, use_cache=False)
    rebuilt = rebuilt_states(model, states, None)
    cache = make_cache()
    model(ids, past_key_values=cache)
    compared = 0
    for index, layer in zip(sorted(rebuilt), cache.compressed_layers(), strict=True):
        [sequence] = layer.sequences
        place_N = sequence.positions.low_rank()
        for store, found_BTC in ((sequence.key, rebuilt[index].key_BTC), (sequence.value, rebuilt[index].value_BTC)):
            coef_NR = store.coef.rows()
            stored_NC = coef_NR.squeeze(0) @ store.initial.decoder_PWR[0].mT
            torch.testing.assert_close(stored_NC, found_BTC[0, place_N], atol=1e-4, rtol=1e-3)
            compared += len(place_N)
    assert compared > 100


def test_rows_learn_and_their_price_has_a_gradient():
    model, _ = joint_model(token_classes=4, learned_classes=True)
    model.train()
    batch = Batch.from_ids(token_ids(2, 60), None)
    teacher, more = read_by_teacher(model, batch.inputs, logits=True)
    with RateRecorder(model) as recorder:
        logits = model(**batch.inputs, **more, use_cache=False).logits
    rates = recorder.rates()
    assert rates.soft_L2.shape == (3, 2)
    assert torch.equal(rates.hard_L2[0], rates.hard_L2[1]), "layers of one row have one rate"
    objective(summed_kl(logits, teacher, batch.targets), rates, 1.0).backward()
    sides = dynakv.token_compressors(model)
    assert [side.width for side in sides] == [4 * 32, 2 * 32]
    for side in sides:
        for name, parameter in side.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_a_pass_that_is_not_told_of_rows_is_refused():
    model, _ = joint_model()
    with pytest.raises(UserError, match="layer 0 is coded together with others.*fill one, as `generate\\(\\)` does"):
        model(token_ids(1, 20), use_cache=False)


@torch.no_grad()
def test_documents_of_a_block_are_read_apart():
    model, _ = joint_model(token_classes=4)
    first, second = token_ids(1, 21), token_ids(1, 19, seed=1)
    position = torch.cat([torch.arange(21), torch.arange(19)])[None]
    packed = Batch(torch.cat([first, second], dim=1), position)

    def logits(batch: Batch) -> torch.Tensor:
        _, more = read_by_teacher(model, batch.inputs, logits=False)
        assert set(more) == {REBUILT}
        return model(**batch.inputs, **more, use_cache=False).logits

    together = logits(packed)
    torch.testing.assert_close(together[:, :21], logits(Batch.from_ids(first, None)), atol=1e-4, rtol=0)
    torch.testing.assert_close(together[:, 21:], logits(Batch.from_ids(second, None)), atol=1e-4, rtol=0)


@torch.no_grad()
def test_rows_are_those_of_the_adapted_model(training_values):
    """Its keys and values are what a cache is filled with; what is learned from is the model without adapters."""
    model, _ = joint_model()
    stock, inputs = tiny_model(), Batch.from_ids(token_ids(1, 60), None).inputs
    build_optimizer(model, build(TrainConfig, {**training_values, "output": "none", "trainable": "lora"}), 0.0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    with states_of_pass(model) as states, without_compressors(model):
        adapted = model(**inputs, use_cache=False).logits
    expected = rebuilt_states(model, states, inputs["position_ids"])
    for wants_logits in (True, False):
        teacher, more = read_by_teacher(model, inputs, logits=wants_logits)
        for index, rebuilt in more[REBUILT].items():
            for found, wanted in zip(rebuilt, expected[index], strict=True):
                assert torch.equal(found, wanted)
        if wants_logits:
            torch.testing.assert_close(teacher, stock(**inputs).logits)
            assert (teacher - adapted).norm() > 0.2 * adapted.norm(), "adapters must matter"


def test_training_lowers_the_divergence_and_serves_what_it_wrote(training_values, tmp_path):
    longer = merged(JOINT, {"optimizer": {"steps": 120}})
    checkpoint = train_here(training_values, tmp_path / "run", **longer)
    train_here(training_values, tmp_path / "still", **merged(longer, STILL))
    learned, still = (sum(losses(tmp_path / name)[-20:]) for name in ("run", "still"))
    assert learned < 0.98 * still
    found = summary(tmp_path / "run")
    assert 0 < next(iter(found["heldout"].values()))["kl"] < 1
    config = read_config(checkpoint)
    rates = measured_rates(checkpoint, config)
    assert rates.keys == rates.values
    assert len(rates.keys) == len(config.geometry.layers)
    assert rates.mean == pytest.approx(found["measured_classes"]["hard_rate"], rel=1e-3)
    layers = load_compressors(checkpoint)
    assert [list(layer.sides) for layer in layers.values()] == [
        [KEY_VALUE] if index % 2 else [] for index in range(len(layers))
    ]


@torch.no_grad()
def test_a_checkpoint_and_its_export_are_served(tmp_path):
    model, make_cache = joint_model(token_classes=4)
    ids = token_ids(2, 40)
    expected = model(ids, past_key_values=make_cache()).logits
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    dynakv.save_compressor(model, tmp_path / "c")
    attached = dynakv.attach(tiny_model(), tmp_path / "c")
    assert torch.equal(attached(ids).logits, expected)
    assert torch.equal(attached.generate(ids, max_new_tokens=12, do_sample=False), text)
    dynakv.export_compressor(tmp_path / "c", tmp_path / "small")
    small = dynakv.attach(tiny_model(), tmp_path / "small")
    torch.testing.assert_close(small(ids).logits, expected, atol=0.3, rtol=0)
    assert torch.equal(small.generate(ids, max_new_tokens=1, do_sample=False), text[:, : ids.shape[1] + 1])


@torch.no_grad()
def test_inspection_shows_every_layer():
    model, _ = joint_model(token_classes=4)
    found = inspect(model, token_ids(12))
    assert found.rate_L2T.shape == (3, 2, 12)
    assert torch.equal(found.rate_L2T[0, 0], found.rate_L2T[1, 1])
    assert found.condition_L2.shape == (3, 2)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_two_processes_train_as_one_does(training_values, tmp_path, engine):
    """Parameters of rows are used before the pass that an engine watches."""
    changes = merged(JOINT, {"optimizer": {"steps": 3, "batch_size": 4, "lr_projection": LR_THAT_MOVES}})
    train_here(training_values, tmp_path / "one", **changes)
    train_here(training_values, tmp_path / "still", **merged(changes, STILL))
    assert_learned(tmp_path / "one", tmp_path / "still", 5e-2)
    launch(engine, 2, training_values, tmp_path / "two", **merged(changes, {"optimizer": {"batch_size": 2}}))
    # Sums in another order take a few coefficients across the border of two codes.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-2)


def test_zero3_is_refused(training_values, tmp_path):
    done = launched("zero3", 1, training_values, tmp_path / "run", **JOINT)
    assert done.returncode != 0
    assert "`compressor.joint_layers` must be 0 with ZeRO-3" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joint_layers": -1}, "`joint_layers` must be zero or positive"),
        ({"joint_layers": 2, "rank_policy": "gate"}, "`joint_layers` must be 0 where `rank_policy` is gate"),
        (
            {"joint_layers": 2, "eviction": Eviction(keep_ratio=0.5)},
            "`eviction.keep_ratio` must be 1 with `joint_layers: 2`",
        ),
        ({"joint_layers": 2, "prefill": "reconstructed"}, "`prefill` must be exact with `joint_layers: 2`"),
        # A cache of one layer's rows could, but a training pass would measure other prompts than are served.
        ({"joint_layers": 1, "prefill": "reconstructed"}, "`prefill` must be exact with `joint_layers: 1`"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dynakv.DynaKVConfig(**{"rank_policy": "plan", **changes})
