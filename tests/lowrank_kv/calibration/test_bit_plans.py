"""What is read of a compressed cache, and the coder that is made of it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from methods import tiny_model

from lowrank_kv.calibration.bit_plans import coded_bases, coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.gradient_moments import probes_of
from lowrank_kv.calibration.read_moments import read_moments
from lowrank_kv.calibration.token_gates import fit_gate
from lowrank_kv.hf.attention import TRANSFORM
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError

EXACT = ExactTokens(num_sink_tokens=2, recent_window=3, update_period=4)


def ids_of(blocks: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (blocks, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_text(tiny_model(), ids_of(3, 160), read_gradients=True, progress=False)


def test_a_query_reads_what_a_cache_would_have_compressed_by_then():
    reads = EXACT.is_read_compressed(torch.arange(24)[None])[0]
    for query in range(24):
        compressed = (query - 1) // 4 * 4 - 3  # whole periods of those before the newest, without the window
        assert reads[query].nonzero().flatten().tolist() == list(range(2, max(compressed, 2)))
    assert EXACT.read_by_some(24) == slice(2, 17)
    assert EXACT.read_by_some(4) == slice(2, 2)
    # The last query of 22 reads four tokens more, and nothing that it says is scored.
    assert (EXACT.read_by_some(22), EXACT.read_by_some(23)) == (slice(2, 13), slice(2, 17))


class Changed(torch.nn.Module):
    """A compressor that changes one number of the values."""

    def __init__(self, token: int, place: int, change: float):
        super().__init__()
        self.token, self.place, self.change = token, place, change

    def forward(self, key_BGTD, value_BGTD, rope, position_BT):
        value_BGTD = value_BGTD.clone()
        value_BGTD[0, self.place // 16, self.token, self.place % 16] += self.change
        return key_BGTD, value_BGTD


@pytest.mark.parametrize(("layer", "token", "place"), [(2, 9, 5), (1, 4, 20)])
def test_gradients_are_those_of_the_compressed_copies_alone(layer, token, place):
    """Against finite differences of the loss where only the copies that are read compressed change."""
    model, ids, eps = tiny_model(), ids_of(1, 24), 2e-2

    @torch.no_grad()
    def loss(change: float) -> float:
        model.model.layers[layer].self_attn._modules[TRANSFORM] = Changed(token, place, change)
        logits = model(ids, use_cache=False).logits[0, :-1].double()
        return float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))

    with probes_of(model, EXACT) as probes, torch.enable_grad():
        total = F.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum")
        [gradient] = torch.autograd.grad(total, [probes[layer].states[1]])
        numeric = (loss(eps) - loss(-eps)) / (2 * eps)
    assert float(gradient[0, token, place]) == pytest.approx(numeric, rel=2e-2, abs=2e-4)
    assert float(gradient[0, 17:].abs().max()) == 0.0, "nobody reads the latest tokens compressed"
    found = read_moments(model, ids, joint_layers=0, exact_tokens=EXACT, progress=False)
    read = gradient[0, EXACT.read_by_some(24)].double()
    torch.testing.assert_close(found[layer]["value"].gradient.mean(), read.T @ read / 15)


@pytest.mark.parametrize("tokens", [22, 23])
def test_each_token_that_is_counted_as_read_has_gradients(tokens):
    found = read_moments(tiny_model(), ids_of(1, tokens), joint_layers=0, exact_tokens=EXACT, progress=False)
    for side in ("key", "value"):
        assert (found[0][side].sample_gradient_NC.abs().amax(dim=1) > 0).all()


def test_a_loss_that_no_key_or_value_moves_is_refused():
    model = tiny_model()
    model.lm_head.weight.data.zero_()
    with pytest.raises(UserError, match="the loss has no gradient with regard to any key or value"):
        read_moments(model, ids_of(1, 24), joint_layers=0, exact_tokens=EXACT, progress=False)


def test_nothing_is_left_on_the_model():
    model, ids = tiny_model(), ids_of(1, 160)
    before = model(ids, use_cache=False).logits
    read_moments(model, ids, joint_layers=0, progress=False)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_states_that_are_not_finite_are_named():
    model = tiny_model()
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(UserError, match="layer 1, value: calibration rows hold NaN or infinite entries"):
        read_moments(model, ids_of(1, 160), joint_layers=0, progress=False)


def test_blocks_too_short_to_be_read_compressed_are_refused():
    with pytest.raises(UserError, match="in blocks of 32 tokens none is read compressed"):
        read_moments(tiny_model(), ids_of(1, 32), joint_layers=0, progress=False)


def test_what_is_read_survives_saving(calibration, tmp_path):
    calibration.save(tmp_path / "bases", model="tiny", text=["random"])
    loaded = Calibration.load(tmp_path / "bases").read_states()
    for index, sides in calibration.read_states().items():
        for side, read in sides.items():
            for name in ("state_CC", "gradient_CC", "sample_NC"):
                assert torch.equal(getattr(loaded[index][side], name), getattr(read, name))


def test_a_calibration_without_it_says_how_to_get_it():
    calibration = Calibration.from_text(tiny_model(), ids_of(1, 32), progress=False)
    with pytest.raises(UserError, match="read_gradients: true"):
        coded_bases(calibration, 0.2)


@pytest.mark.parametrize("rate", [0.08, 0.3, 1.0])
def test_a_coder_takes_the_bytes_it_was_given(calibration, rate):
    coded = [each for sides in coded_bases(calibration, rate).values() for each in sides.values()]
    full = sum(2 * len(each.encoder_CC) for each in coded)
    taken = sum(each.plan.row_bytes(each.plan.num_coefficients) for each in coded)
    assert taken <= rate * full
    assert taken >= rate * full - 2 * len(coded)  # rows are whole bytes


@pytest.mark.parametrize("classes", [1, 2])
def test_where_rebuilding_counts_keys_have_fewer_coefficients_and_rows_as_many_bytes(calibration, classes):
    def means(rebuild_cost):
        coded = coded_bases(calibration, 0.2, token_classes=classes, rebuild_cost=rebuild_cost).values()
        sides = [[layer[name].plan for layer in coded] for name in ("key", "value")]
        return [sum(plan.num_coefficients for plan in plans) for plans in sides], sum(
            plan.nbytes(plan.num_coefficients) for plans in sides for plan in plans
        )

    (keys, values), taken = means(0.0)
    (fewer, more), as_many = means(6.0)
    assert fewer < 0.9 * keys
    assert more >= values
    assert as_many == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize("classes", [1, 2])
def test_a_rate_without_a_bit_for_every_layer_names_the_least(calibration, classes):
    with pytest.raises(UserError, match=r"the rate 0.001 leaves no bit .*; give at least 0\.\d+") as error:
        coded_bases(calibration, 0.001, token_classes=classes)
    assert coded_bases(calibration, float(str(error.value).split()[-1]), token_classes=classes)


def test_a_gate_of_a_single_row_foretells_what_that_row_costs():
    coef_1C, cost_1 = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3.0])
    gate = fit_gate(coef_1C, cost_1, leading=4)
    for weight in (gate.linear_C, gate.square_C, gate.rest_3[:2]):
        assert torch.equal(weight, torch.zeros_like(weight))
    assert torch.isfinite(gate.scores(coef_1C)).all()


def test_more_bytes_lose_less(calibration):
    def lost(rate):
        total = 0.0
        for index, sides in coded_bases(calibration, rate).items():
            for side, coded in sides.items():
                rows = calibration.read_states()[index][side].sample_NC.float()
                rank = coded.plan.num_coefficients
                coefficients = rows @ coded.encoder_CC[:, :rank]
                decoded = coded.plan.decode(*coded.plan.encode(coefficients), rank, torch.float32)
                assert torch.equal(decoded, coded.plan.rounded(coefficients))
                total += float((decoded @ coded.decoder_CC[:rank] - rows).square().sum() / rows.square().sum())
        return total / 6

    losses = [lost(rate) for rate in (0.08, 0.15, 0.3, 0.6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3


@pytest.mark.parametrize("classes", [1, 4])
def test_what_a_unit_of_the_rate_is_worth_falls_with_it_as_the_loss_does(calibration, classes):
    """Between two rates the loss falls by no more than the first price says, and no less than the second: it is convex."""
    rates = [0.1, 0.12, 0.15, 0.2, 0.3]
    models = [coded_model(calibration, rate, token_classes=classes) for rate in rates]
    worth = [model.loss_per_rate for model in models]
    assert all(more > less > 0 for more, less in itertools.pairwise(worth))
    if classes > 1:
        return  # the weights of classes are not part of a coder
    loss = [expected_loss(model.layers) for model in models]
    for (low, high), (before, after), (dear, cheap) in zip(
        itertools.pairwise(rates), itertools.pairwise(loss), itertools.pairwise(worth), strict=True
    ):
        # Codebooks are fitted anew at each rate, and rows are whole bytes.
        assert 0.7 * cheap < (before - after) / (high - low) < 1.4 * dear


def expected_loss(layers):
    """Half of what each coefficient is asked times the share of it that normal numbers lose at its width."""
    lost = {0: 1.0, 1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.00064, 8: 4.1e-5, 16: 0.0}
    total = 0.0
    for coded in (each for sides in layers.values() for each in sides.values()):
        widths = [*coded.plan.bits, *[0] * len(coded.importance_C)][: len(coded.importance_C)]
        total += sum(float(asked) * lost[bits] / 2 for asked, bits in zip(coded.importance_C, widths, strict=True))
    return total
