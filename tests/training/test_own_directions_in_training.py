"""Directions of a document's own in a pass that trains: those of a cache, and what it rebuilds with them."""

import pytest
import torch
from methods import planned_model, tiny_model
from torch import Tensor
from training_runs import PLANNED, losses, merged, summary, train_here

import dynakv
from dynakv.document_directions import DocumentDirections
from dynakv.objective import RateRecorder, objective
from lowrank_kv.hf.cache.windowed.adaptive_store import AdaptiveStore
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.loading import load_model
from training.data import Batch
from training.distillation import summed_kl, teacher_logits
from training.validation import run_uncached

# A prompt of a period, and behind it as many tokens again, which is what a pass takes for its first half and its second.
PERIOD = 48
EXACT = ExactTokens(num_sink_tokens=2, recent_window=3, update_period=PERIOD)
OWN = {"own_directions": 3, "own_directions_from": 8}


def token_ids(*shape: int, seed: int = 0) -> Tensor:
    """Of few words, none of which the calibration saw."""
    return torch.randint(80, 90, shape, generator=torch.Generator().manual_seed(seed))


def adaptive_model(*, token_classes: int = 4, **settings):
    """A coder for whose calibration the words of these tests are foreign, so that they have directions of their own."""
    model = tiny_model()
    planned_model(model, 0.1, token_classes=token_classes, words=40, **OWN, **settings)
    dynakv.configure(model, exact_tokens={"recent_window": 3, "update_period": PERIOD})
    dynakv.set_exact_tokens(model, EXACT)
    return model


def stores_of(cache, sequence: int = 0) -> list[AdaptiveStore]:
    found = [layer.sequences[sequence] for layer in cache.compressed_layers()]
    return [store for each in found for store in (each.key, each.value)]


def in_one_pass(model, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits of a pass, and the keys and values that each layer's compressor rebuilt, (B, G, T, D)."""
    rebuilt = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: rebuilt.append(output[:2]))
        for layer in dynakv.compressors(model).values()
    ]
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, rebuilt


@pytest.mark.parametrize("token_classes", [1, 4])
@torch.no_grad()
def test_a_pass_rebuilds_what_the_cache_serves(token_classes, tmp_path):
    """A prompt at once and then token by token through the cache of a checkpoint; and all of it in one pass that trains."""
    dynakv.save_compressor(adaptive_model(token_classes=token_classes), tmp_path / "c")
    model = dynakv.attach(tiny_model(), tmp_path / "c")
    ids = token_ids(1, 2 * PERIOD, seed=7)
    cache = dynakv.DynaKVCache.from_model(model)
    cache.activate_past_recording()  # the prompt waits until the call behind it, as a pass has it
    served = [model(part, past_key_values=cache).logits for part in ids.split([PERIOD, *[1] * PERIOD], dim=1)]
    owns = [store.own for store in stores_of(cache)]
    assert sum(own is not None for own in owns) >= 3

    for layer in dynakv.compressors(model).values():
        layer.train()
    dynakv.set_exact_tokens(model, EXACT)
    logits, rebuilt = in_one_pass(model, ids)
    torch.testing.assert_close(logits, torch.cat(served, dim=1), atol=2e-4, rtol=0)
    compressed = slice(EXACT.num_sink_tokens, PERIOD - EXACT.recent_window)
    for layer, (key_BGTD, value_BGTD) in zip(cache.compressed_layers(), rebuilt, strict=True):
        assert layer.sequences[0].key.coef.length == compressed.stop - compressed.start
        served_key_BGTD, served_value_BGTD = layer.dense()
        torch.testing.assert_close(key_BGTD[:, :, compressed], served_key_BGTD[:, :, compressed], atol=1e-5, rtol=0)
        torch.testing.assert_close(value_BGTD[:, :, compressed], served_value_BGTD[:, :, compressed], atol=1e-5, rtol=0)

    for compressor in dynakv.token_compressors(model):
        compressor.config = compressor.config.overridden(own_directions=0)
    without, _ = in_one_pass(model, ids)
    assert (without - logits)[:, PERIOD + 1 :].abs().max() > 0.02, "directions change what is read"
    assert torch.equal(without[:, :PERIOD], logits[:, :PERIOD])


@torch.no_grad()
def test_a_pass_finds_the_directions_of_the_cache():
    model = adaptive_model()
    ids = token_ids(2, 2 * PERIOD)
    cache = dynakv.DynaKVCache.from_model(model)
    model(ids[:, :PERIOD], past_key_values=cache)
    found = {}

    def record(gate, arguments, _) -> None:
        found[gate] = arguments[0]

    sides = dynakv.token_compressors(model)
    run_uncached(model, [Batch.from_ids(ids, None)], {side.gate: record for side in sides})
    count = 0
    for place, side in enumerate(sides):
        shared = side.initial_basis().shared
        passed = DocumentDirections.find(found[side.gate], None, shared, side.gate.plan, side.config)
        for b, [(_, own)] in enumerate(passed.documents):
            served = stores_of(cache, b)[place].own
            assert (own is None) == (served is None)
            if own is not None:
                count += 1
                assert own.places == served.places
                vector_CK, served_CK = (each.code_CK * each.scale_K for each in (own, served))
                overlap_K = (vector_CK * served_CK).sum(dim=0).abs()
                torch.testing.assert_close(overlap_K, torch.ones_like(overlap_K), atol=2e-2, rtol=0)
                torch.testing.assert_close(own.size_K, served.size_K, rtol=1e-2, atol=0)
    assert count


@torch.no_grad()
def test_each_document_of_a_block_has_its_own():
    """A long one, one too short for any, and another long one."""
    model = adaptive_model()
    parts = [token_ids(1, length, seed=length) for length in (100, 20, 90)]
    position = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    together = model(**Batch(torch.cat(parts, dim=1), position).inputs, use_cache=False).logits
    apart = [model(part, use_cache=False).logits for part in parts]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), atol=1e-5, rtol=0)
    dynakv.configure(model, own_directions=0)
    changes = [
        not torch.equal(model(part, use_cache=False).logits, with_own)
        for part, with_own in zip(parts, apart, strict=True)
    ]
    assert changes == [True, False, True]


def test_all_that_learns_has_gradients_and_rows_take_no_more_bytes():
    """With classes that learn; gradients reach the projection through the rows of each document's own basis, too."""
    model = adaptive_model(learned_classes=True).train()
    batch = Batch.from_ids(token_ids(2, 100), None)
    gradients, rates = [], []
    for count in (OWN["own_directions"], 0):
        for side in dynakv.token_compressors(model):
            side.config = side.config.overridden(own_directions=count)
        model.zero_grad()
        with RateRecorder(model) as recorder:
            logits = model(**batch.inputs, use_cache=False).logits
        kl = summed_kl(logits, teacher_logits(model, batch.inputs), batch.targets)
        objective(kl, recorder.rates(), 1.0).backward()
        sides = dynakv.token_compressors(model)
        gradients.append([{name: each.grad.clone() for name, each in side.named_parameters()} for side in sides])
        rates.append(recorder.rates().hard_L2)
    for with_own, without in zip(*gradients, strict=True):
        assert set(with_own) == {
            "projection.weight",
            *(f"gate.{name}" for name in ("linear", "square", "rest", "bounds")),
        }
        assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in with_own.values())
        assert not torch.allclose(with_own["projection.weight"], without["projection.weight"], rtol=1e-2)
    # The first layer's keys and values are the same in both passes.
    assert torch.equal(rates[0][0], rates[1][0])


def test_a_run_learns_with_the_directions_in_the_loop(training_values, tmp_path):
    """Trained on from a coder for which the text is foreign; what is measured and written knows of them, too."""
    model = load_model(training_values["model"])
    planned_model(model, 0.1, num_sink_tokens=2, token_classes=4, words=40, **OWN)
    dynakv.save_compressor(model, tmp_path / "start")
    changes = {
        "initial_checkpoint": str(tmp_path / "start"),
        "optimizer": {"steps": 3},
        "dataset": {"sequence_length": 192},
        "rate": {"target_retain_rate": 0.1, "alpha": 4.0},
    }

    def run(name: str, count: int, **more) -> list[float]:
        """Its losses, and the divergence that it measures at its end."""
        compressor = {"learned_classes": True, "own_directions": count, "own_directions_from": 8}
        values = merged(merged(PLANNED, changes), {"compressor": compressor, **more})
        checkpoint = train_here(training_values, tmp_path / name, **values)
        assert dynakv.checkpoint_files.read_config(checkpoint).compressor.own_directions == count
        [heldout] = summary(tmp_path / name)["heldout"].values()
        return [*losses(tmp_path / name), heldout["kl"]]

    own = run("own", 3)
    # At the first step all but the directions is equal.
    for with_own, without in zip(own, run("shared", 0), strict=True):
        assert abs(with_own / without - 1) > 0.01
    assert run("recomputed", 3, gradient_checkpointing=True) == own
