"""Coders learned as they are served: what a training pass reads compressed, what moves, and what is written and served."""

import json

import pytest
import torch
from methods import calibration_of, planned_model, tiny_model
from safetensors.torch import load_file
from training_runs import EXACT, PLANNED, STILL, losses, merged, summary, train_here

import dynakv
from dynakv.checkpoint import load_compressors
from dynakv.measured_rates import measured_rates
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.bit_plans import coded_bases
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli.planned_cache import dynakv_nbytes
from lowrank_kv_cli.saved import describe
from training.data import Batch
from training.distillation import summed_kl, teacher_logits
from training.inspection import inspect


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("token_classes", [1, 4])
@torch.no_grad()
def test_a_training_pass_reads_what_the_cache_serves(token_classes):
    """Token by token through the cache, and in one pass: the same tokens are read compressed, and rounded alike."""
    model = tiny_model()
    make_cache = planned_model(model, 0.15, num_sink_tokens=1, token_classes=token_classes)
    ids = token_ids(1, 41)
    cache = make_cache()
    served = [model(ids[:, :1], past_key_values=cache).logits]
    served += [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(1, 41)]
    compressors = [layer.train() for layer in dynakv.compressors(model).values()]
    assert compressors
    model.config.use_cache = False
    dynakv.set_exact_tokens(model, EXACT)
    at_once = model(ids, use_cache=False).logits
    everything = tiny_model()(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(served, dim=1), at_once, atol=2e-4, rtol=0)
    assert torch.allclose(at_once[:, :8], everything[:, :8], atol=1e-5), "the first tokens read nothing compressed"
    assert not torch.allclose(at_once[:, 12:], everything[:, 12:], atol=1e-2)


@torch.no_grad()
def test_documents_of_a_block_are_read_apart():
    model = tiny_model()
    planned_model(model, 0.15)
    dynakv.set_exact_tokens(model, EXACT)
    first, second = token_ids(1, 21), token_ids(1, 19, seed=1)
    position = torch.cat([torch.arange(21), torch.arange(19)])[None]
    packed = Batch(torch.cat([first, second], dim=1), position)
    together = model(**packed.inputs, use_cache=False).logits
    torch.testing.assert_close(together[:, :21], model(first, use_cache=False).logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(together[:, 21:], model(second, use_cache=False).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("token_classes", [1, 4])
def test_only_the_projection_learns_and_gradients_pass_the_rounding(token_classes):
    model = tiny_model()
    planned_model(model, 0.15, token_classes=token_classes)
    dynakv.set_exact_tokens(model, EXACT)
    model.train()
    batch = Batch.from_ids(token_ids(2, 60), None)
    logits = model(**batch.inputs, use_cache=False).logits
    summed_kl(logits, teacher_logits(model, batch.inputs), batch.targets).backward()
    for side in dynakv.token_compressors(model):
        [(name, parameter)] = side.named_parameters()
        assert name == "projection.weight"
        assert parameter.grad.abs().sum() > 0


def test_training_lowers_the_divergence_and_serves_what_it_wrote(training_values, tmp_path):
    checkpoint = train_here(training_values, tmp_path / "run", **PLANNED)
    train_here(training_values, tmp_path / "still", **merged(PLANNED, STILL))
    learned, still = (sum(losses(tmp_path / name)[-20:]) for name in ("run", "still"))
    assert learned < 0.95 * still
    heldout = next(iter(summary(tmp_path / "run")["heldout"].values()))
    assert 0 < heldout["kl"] < 1
    # Steps this large move tokens into other classes, and they take what they take.
    assert heldout["hard_rate"] == pytest.approx(0.13, abs=0.03)
    described = describe(checkpoint)
    assert described["rates"]["of_bytes"]
    config = json.loads((checkpoint / "config.json").read_text())["compressor"]
    assert config["exact_tokens"] == PLANNED["compressor"]["exact_tokens"]


def test_a_run_starts_from_the_keys_that_it_asks_for(training_values, tmp_path):
    def coefficients(rebuild_cost):
        changes = {"compressor": {"rebuild_cost": rebuild_cost}, "optimizer": {"steps": 1}}
        checkpoint = train_here(merged(training_values, PLANNED), tmp_path / f"{rebuild_cost}", **changes)
        layers = load_compressors(checkpoint).values()
        return [
            sum(getattr(layer, side).initial_basis().quantization.num_coefficients for layer in layers)
            for side in ("key", "value")
        ]

    (keys, values), (fewer, as_many) = coefficients(0), coefficients(8)
    assert fewer < 0.9 * keys
    assert as_many >= values


def test_the_mean_of_states_keeps_their_bits(training_values, tmp_path):
    """Sevenths of whole numbers do not add up to them."""
    averaged = {"checkpoint_every": 1, "keep_checkpoints": 7, "average_checkpoints": 7, "optimizer": {"steps": 7}}
    checkpoint = train_here(training_values, tmp_path / "run", **merged(PLANNED, averaged))
    assert summary(tmp_path / "run")["averaged_steps"] == list(range(1, 8))
    final = load_file(checkpoint / "compressor.safetensors")
    last = load_file(tmp_path / "run/states/step-000007/compressor.safetensors")
    whole = {name for name, tensor in final.items() if not tensor.is_floating_point()}
    assert {name.rpartition(".")[2] for name in whole} >= {"bits"}
    for name, tensor in final.items():
        assert tensor.dtype == last[name].dtype
        assert name not in whole or torch.equal(tensor, last[name])
    assert any(not torch.equal(final[name], last[name]) for name in final.keys() - whole)


@pytest.mark.parametrize("token_classes", [1, 4])
@torch.no_grad()
def test_an_inspection_shows_what_each_token_takes(token_classes):
    model = tiny_model()
    planned_model(model, 0.2, token_classes=token_classes)
    recorded = {}
    hooks = [
        side.register_forward_hook(lambda side, _, output: recorded.update({side: output[2]}))
        for side in dynakv.token_compressors(model)
    ]
    rate_L2T = inspect(model, token_ids(1, 40)[0]).rate_L2T
    for hook in hooks:
        hook.remove()
    assert all(len(rate_T.unique()) <= token_classes for rate_T in rate_L2T.flatten(0, 1))
    assert max(len(rate_T.unique()) for rate_T in rate_L2T.flatten(0, 1)) == min(token_classes, 4)
    expected = torch.stack([recorded[side] for side in dynakv.token_compressors(model)])
    torch.testing.assert_close(rate_L2T.mean(dim=2).flatten(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("token_classes", [1, 4])
@torch.no_grad()
def test_a_checkpoint_is_served_as_it_was_trained(tmp_path, token_classes):
    model = tiny_model()
    make_cache = planned_model(model, 0.2, token_classes=token_classes)
    ids = token_ids(2, 40)
    expected = model(ids, past_key_values=make_cache()).logits
    dynakv.save_compressor(model, tmp_path / "c")
    loaded = dynakv.attach(tiny_model(), tmp_path / "c")
    served = loaded(ids)
    assert torch.equal(served.logits, expected)
    assert served.past_key_values.compressed_layers()[0].config.recent_window == 3
    maker = dynakv.DynaKVCache.maker(loaded)
    dynakv.detach(loaded)
    assert torch.equal(loaded(ids, past_key_values=maker()).logits, expected), "caches outlive the compressors"
    dynakv.save_full(model, tmp_path / "full")
    whole = type(model).from_pretrained(tmp_path / "full").eval()
    assert torch.equal(whole(ids).logits, expected)


@pytest.mark.parametrize("joint_layers", [0, 2])
@torch.no_grad()
def test_predicted_bytes_are_those_of_a_cache(tmp_path, joint_layers):
    model = tiny_model()
    planned_model(model, 0.2, joint_layers=joint_layers)
    dynakv.save_compressor(model, tmp_path / "c")
    config = dynakv.checkpoint_files.read_config(tmp_path / "c")
    rates = measured_rates(tmp_path / "c", config)
    for tokens in (30, 120):
        cache = model(token_ids(1, tokens)).past_key_values
        assert dynakv_nbytes(config, rates, tokens=tokens, itemsize=4) == cache.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration.start": "pca"}, "`calibration.start` must be `gradient`"),
        ({"compressor.decoder": "orthogonal"}, "`compressor.decoder` must be exact where `rank_policy` is plan"),
        ({"compressor.cache_dtype": "int4"}, "`compressor.cache_dtype` must be model where `rank_policy` is plan"),
        ({"compressor.rank_policy": "gate"}, "`compressor.exact_tokens` must be left out"),
        ({"compressor.rebuild_cost": -0.5}, "`compressor.rebuild_cost` must be zero or positive"),
        ({"rate.key_cost": 3}, "`rate.key_cost` must be 1"),
        ({"rate.alpha": 0.5}, "`rate.alpha` must be left out"),
    ],
)
def test_settings_that_a_plan_does_not_know_are_refused(changes, message):
    values = {"model": "m", "dataset": {"name": ["t"]}, **PLANNED}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        values[group] = {**values[group], name: value}
    with pytest.raises(UserError, match=message):
        build(TrainConfig, values)


def test_overrides_that_a_plan_does_not_know_are_refused():
    config = dynakv.DynaKVConfig(rank_policy="plan", prefill="exact")
    assert config.overridden(exact_tokens={"recent_window": 64}).exact_tokens.recent_window == 64
    for key, value in (("threshold", 0.2), ("cache_dtype", "int4"), ("rank_policy", "gate")):
        with pytest.raises(UserError, match=f"`{key}` cannot be overridden"):
            config.overridden(**{key: value})
    message = "`own_directions_from` cannot be overridden with 7: `own_directions` is 0.*or give `own_directions`, too"
    with pytest.raises(UserError, match=message):
        config.overridden(own_directions_from=7)
    assert config.overridden(own_directions_from=7, own_directions=2).own_directions_from == 7
    both = config.overridden(own_directions=2)
    assert both.overridden(own_directions_from=7).own_directions_from == 7
    assert both.overridden(own_directions=0).own_directions_from == 128


def test_a_plan_starts_as_the_coder_that_needs_no_training():
    model = tiny_model()
    coders = coded_bases(calibration_of(model, read=True), 0.2)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(rank_policy="plan"))
    dynakv.initialize_from_coders(model, coders)
    for index, layer in dynakv.compressors(model).items():
        for side in ("key", "value"):
            coder, basis = coders[index][side], getattr(layer, side).initial_basis()
            rank = coder.plan.num_coefficients
            assert basis.quantization.bits == coder.plan.bits
            torch.testing.assert_close(basis.vectors_PWR[0], coder.encoder_CC[:, :rank])
            torch.testing.assert_close(basis.decoder_PWR[0].T, coder.decoder_CC[:rank])
            assert getattr(layer, side).initial_basis() is basis
    with pytest.raises(UserError, match="one with gates or ranks to open"):
        dynakv.open_gates(model)
