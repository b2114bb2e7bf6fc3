"""No peer is a strawman: each beats its own ablation, and is as good as what it is said to be the best of."""

import dataclasses

import pytest
import torch
from families import BY_NAME
from methods import calibration_of
from window_scores import score_windows

from evaluation.peers import PEERS, palu
from evaluation.peers.expected_attention import Expected, Queries, mean_rotation, unrotated
from evaluation.peers.keydiff import likeness
from evaluation.peers.kivi import GroupedRows
from evaluation.peers.kq_svd import read_basis
from evaluation.peers.kvtc import by_energy
from evaluation.peers.output_projection import output_moments
from evaluation.peers.palu import fisher_ranks, fisher_scores, palu_maker
from evaluation.peers.puzzle_kv import Pages
from evaluation.peers.rotated import rotated_maker
from evaluation.peers.streaming_llm import SINK_TOKENS, SinksAndLatest
from evaluation.peers.think import ChannelStore, ThinKLayer, think_maker
from evaluation.peers.whole_tokens import Rule, WholeTokens, whole_tokens_maker
from evaluation.scores import summary
from evaluation.texts import windows_of
from lowrank_kv.bases.codebooks import lloyd_max
from lowrank_kv.calibration.activation_moments import KEY, VALUE, observe
from lowrank_kv.calibration.bit_plans import coded_bases
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.rotary import Rotary
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.utils.errors import UserError


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl_of(model, maker, windows=3):
    ids = torch.randint(1, 97, (windows * 200,), generator=torch.Generator().manual_seed(7))
    return summary(score_windows(model, windows_of(ids, 200, windows), maker, prefix=140))["kl"]


# -- KIVI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("by_channel", [True, False])
def test_kivi_rounds_each_group_over_its_own_range(by_channel, bits):
    rows_GND = numbers(2, 77, 64).float()  # two whole pages and thirteen tokens
    grouped = GroupedRows(bits, torch.float32, by_channel=by_channel)
    grouped.append(rows_GND[:, :40])
    grouped.append(rows_GND[:, 40:])
    assert grouped.length == 77
    found_GND = grouped.rows()
    for first, last in ((0, 32), (32, 40), (40, 72), (72, 77)):  # pages
        groups = rows_GND[:, first:last].double()
        groups = groups.mT if by_channel else groups.unflatten(2, (2, 32))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (most - least) / (2**bits - 1)
        expected = least + ((groups - least) / step).round() * step
        expected_GND = expected.mT if by_channel else expected.flatten(2)
        error_GND = (found_GND[:, first:last] - expected_GND).abs()
        # The range is in fp16, so that a number halfway between two codes may take the other one.
        close = error_GND < 4e-3
        assert close.double().mean() > 0.98
        assert float(error_GND.max()) < float(step.max()) + 4e-3
    grouped.crop(50)
    assert torch.equal(grouped.rows(), found_GND[:, :50])
    assert grouped.length == 50


def test_a_channel_with_a_bias_spoils_its_own_codes_only():
    keys_GND = numbers(1, 64, 32).float()
    keys_GND[:, :, 5] += 300
    others = torch.arange(32) != 5

    def error(by_channel):
        grouped = GroupedRows(4, torch.float32, by_channel=by_channel)
        grouped.append(keys_GND)
        return float((grouped.rows() - keys_GND)[..., others].square().mean())

    assert error(by_channel=True) < 0.02 < 0.5 < error(by_channel=False)


# -- KVTC -------------------------------------------------------------------------------------------------------------


def test_kvtc_takes_principal_components_and_their_energies(calibration):
    read = by_energy(calibration, is_relative=False).read_states()
    for sides in read.values():
        for states in sides.values():
            energy_C = torch.linalg.eigvalsh(states.state_CC.double()).flip(0)
            torch.testing.assert_close(states.spectrum.importance_C.double(), energy_C, rtol=1e-3, atol=1e-6)
            gram_CC = states.spectrum.encoder_CC.double().mT @ states.spectrum.encoder_CC.double()
            assert float((gram_CC - gram_CC.diagonal().diag()).abs().max()) < 1e-3 * float(gram_CC.max())


def test_kvtc_counts_each_part_of_a_row_by_its_own_energy(calibration):
    """Keys have many times the energy of values: else values that share a row with them would get no bits."""
    width = calibration.geometry.width
    joint = by_energy(calibration).joint_read_states(calibration.joint_layers)
    for states in joint.values():
        weighted_PW = (states.gradient_CC.diagonal() * states.state_CC.diagonal()).unflatten(0, (-1, width))
        torch.testing.assert_close(weighted_PW.sum(1), torch.ones(len(weighted_PW)))


@pytest.mark.parametrize("bits", [2, 3])
def test_bits_by_energy_beat_one_width(calibration, bits):
    energies = by_energy(calibration, is_relative=False)
    coded = coded_bases(energies, (1 + 4 * bits) / 64)  # a byte of scale and 32 numbers, over 64 bytes
    error = {"by energy": 0.0, "one width": 0.0}
    held = {"by energy": 0, "one width": 0}
    for index, sides in coded.items():
        for side in (KEY, VALUE):
            basis, row_NC = sides[side], energies.read[index][side].sample_NC.float()
            coef_NC = row_NC @ basis.encoder_CC
            width = len(basis.encoder_CC)
            flat = BitPlan([bits] * width, {bits: lloyd_max(coef_NC.flatten(), bits)})
            for name, plan in (("by energy", basis.plan), ("one width", flat)):
                rank = plan.num_coefficients
                rounded_NC = plan.rounded(coef_NC[:, :rank]) @ basis.decoder_CC[:rank]
                error[name] += float((row_NC - rounded_NC).square().sum())
                held[name] += plan.row_bytes(rank)
    assert held["by energy"] <= held["one width"]
    assert error["by energy"] < 0.8 * error["one width"]


# -- KQ-SVD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_kq_svd_is_the_best_low_rank_form_of_the_scores(rank):
    key_ND, query_MD = numbers(80, 8) @ numbers(8, 8, seed=1), numbers(60, 8, seed=2) @ numbers(8, 8, seed=3)
    score_NM = key_ND @ query_MD.mT
    best = torch.linalg.svdvals(score_NM)[rank:].square().sum()

    def error(encoder_DD, decoder_DD):
        return (score_NM - key_ND @ encoder_DD[:, :rank] @ decoder_DD[:, :rank].mT @ query_MD.mT).square().sum()

    encoder, decoder, _ = read_basis((key_ND.mT @ key_ND)[None], (query_MD.mT @ query_MD)[None])
    component_DD = torch.linalg.eigh(key_ND.mT @ key_ND).eigenvectors.flip(1)
    torch.testing.assert_close(error(encoder[0], decoder[0]), best, rtol=1e-3, atol=0)
    assert error(component_DD, component_DD) > 1.05 * best


def test_outputs_are_what_values_are_weighed_by(model):
    geometry = geometry_of(model)
    module = attention_modules(model)[geometry.layers[1]]
    value_GD, moments = numbers(2, 16), output_moments(model)[geometry.layers[1]]
    for head in range(2):
        # Both query heads of a KV head put its value into their own columns of the projection.
        heads = torch.zeros(4, 16, dtype=torch.float64)
        expected, weight_XY = 0.0, module.o_proj.weight.detach().double()
        for query_head in (2 * head, 2 * head + 1):
            heads.zero_()
            heads[query_head] = value_GD[head]
            expected += float((weight_XY @ heads.flatten()).square().sum())
        assert float(value_GD[head] @ moments[head] @ value_GD[head]) == pytest.approx(expected)


def test_kq_svd_beats_principal_components_of_keys_in_scores(model, calibration):
    def states_of(seed):
        found = {}
        ids = torch.randint(1, 97, (4, 64), generator=torch.Generator().manual_seed(seed))
        observe(
            model,
            ids,
            lambda index, side, rows_NC: found.setdefault((index, side), []).append(rows_NC.double()),
            sides=("rotated_key", "query"),
            progress=False,
        )
        return {name: torch.cat(rows) for name, rows in found.items()}

    fresh, head_dim, rank = states_of(9), 16, 8
    errors = {"kq-svd": 0.0, "pca": 0.0}
    for index, moments in calibration.moments.items():
        for head in range(2):
            part = slice(head * head_dim, (head + 1) * head_dim)
            key_DD, query_DD = (moments[side][part, part].double() for side in ("rotated_key", "query"))
            key_ND, query_MD = fresh[index, "rotated_key"][:, part], fresh[index, "query"][:, part]
            encoder, decoder, _ = read_basis(key_DD[None], query_DD[None])
            component_DD = torch.linalg.eigh(key_DD).eigenvectors.flip(1)
            for name, pair in (("kq-svd", (encoder[0], decoder[0])), ("pca", (component_DD, component_DD))):
                lost_ND = key_ND - key_ND @ pair[0][:, :rank] @ pair[1][:, :rank].mT
                errors[name] += float((lost_ND @ query_MD.mT).square().sum())
    assert errors["kq-svd"] < 0.97 * errors["pca"]


# -- Palu -------------------------------------------------------------------------------------------------------------


def inputs_of(model, ids):
    """Layer index → what its projections read, (N, X) fp64."""
    found, hooks = {}, []
    for index, module in attention_modules(model).items():
        hooks.append(
            module.k_proj.register_forward_pre_hook(
                lambda _, args, index=index: found.setdefault(index, []).append(args[0].flatten(0, 1).double())
            )
        )
    with torch.no_grad():
        for block_T in ids:
            model(block_T[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {index: torch.cat(rows) for index, rows in found.items()}


@pytest.mark.parametrize("heads", [1, 2])
def test_palus_cache_is_the_latent_of_whitened_factors_of_the_weights(model, heads):
    ids = torch.randint(1, 97, (12, 64), generator=torch.Generator().manual_seed(3))
    input_NX, rank = inputs_of(model, ids)[1], 10
    weight_CX = attention_modules(model)[1].k_proj.weight.detach().double()
    key_NC, eye_XX = input_NX @ weight_CX.mT, torch.eye(64, dtype=torch.float64)

    def by_factors(root_XX):
        lefts = [torch.linalg.svd(each_WX @ root_XX).U for each_WX in weight_CX.split(16 * heads)]
        left_CR = torch.block_diag(*(left_WW[:, : rank * heads // 2] for left_WW in lefts))
        return key_NC @ left_CR @ left_CR.mT

    whitened_NC = by_factors(torch.linalg.cholesky(input_NX.mT @ input_NX + 1e-9 * eye_XX))
    found = palu._initial_basis(key_NC.mT @ key_NC, geometry_of(model), heads, rank, None).vectors_PWR[0].double()
    torch.testing.assert_close(key_NC @ found @ found.mT, whitened_NC, atol=1e-5, rtol=1e-5)
    assert (key_NC - whitened_NC).square().sum() < 0.9 * (key_NC - by_factors(eye_XX)).square().sum()


def test_joint_factors_beat_those_of_each_head(model, calibration):
    joint, alone = (
        kl_of(model, palu_maker(model, calibration, 0.5, grouped_heads=heads, prefill="exact")) for heads in (None, 1)
    )
    assert 0 < joint < alone


def test_fisher_ranks_spend_the_budget_by_score():
    ranks = fisher_ranks([1.0, 2.0, 4.0, 1.0], 0.5, width=32, multiple=4)
    assert sum(ranks) == 64
    assert ranks[2] == 32
    assert ranks[0] == ranks[3] < ranks[1]
    assert all(rank % 4 == 0 for rank in ranks)
    assert fisher_ranks([1.0, 9.0], 1.0, width=30, multiple=4) == [30, 30]
    assert fisher_ranks([1e-9, 1.0, 1.0], 0.25, width=32, multiple=4)[0] == 4
    # What nobody reads gets the least, and the budget is kept.
    assert fisher_ranks([0.0, 1.0], 0.5, width=32, multiple=4) == [4, 28]
    assert sum(fisher_ranks([0.0, 0.0], 0.5, width=32, multiple=4)) == 32
    with pytest.raises(UserError, match="keep at least 0.12 of a width of 32"):
        fisher_ranks([1.0] * 3, 0.05, width=32, multiple=4)


def test_fisher_scores_grow_with_the_gradients(model, calibration):
    louder = {
        index: {side: dataclasses.replace(each, gradient_CC=4 * each.gradient_CC) for side, each in sides.items()}
        for index, sides in calibration.read.items()
    }
    before = fisher_scores(model, calibration)
    after = fisher_scores(model, dataclasses.replace(calibration, read=louder))
    assert after == pytest.approx([2 * score for score in before])


# -- PuzzleKV ---------------------------------------------------------------------------------------------------------


def test_a_pages_factors_are_its_best_of_their_rank():
    rows_NC = numbers(75, 24).float()
    pages = Pages(5, torch.float32)
    pages.append(rows_NC)
    assert pages.length == 75
    error_N = (pages.rows() - rows_NC).square().sum(dim=1)
    for page in (slice(0, 32), slice(32, 64), slice(64, 75)):
        best = torch.linalg.svdvals(rows_NC[page])[5:].square().sum()
        torch.testing.assert_close(error_N[page].sum(), best, rtol=1e-4, atol=1e-4)
    whole = pages.rows()
    for length in (70, 64, 40, 7, 0):
        pages.crop(length)
        assert pages.length == length
        assert not length or torch.equal(pages.rows(), whole[:length])


# -- rotated integers, ThinK, SnapKV, StreamingLLM ---------------------------------------------------------------------


def test_a_rotation_spreads_what_one_dim_would_lose(model):
    [initial, _] = rotated_maker(model, "rotated-int4")().layers[0].plan.layers[0]
    rows_ND = numbers(500, 16).float()
    rows_ND[:, 3] *= 50  # one dim has nearly all of a row's energy

    def error(vectors_DD):
        return float((initial.quantization.rounded(rows_ND @ vectors_DD) @ vectors_DD.mT - rows_ND).square().sum())

    assert error(initial.vectors_PWR[0]) < 0.5 * error(torch.eye(16))


class RandomChannels(ThinKLayer):
    class Store(ChannelStore):
        def chosen(self, key_GND, rank):
            generator = torch.Generator().manual_seed(rank + key_GND.shape[1])
            return torch.stack([torch.randperm(16, generator=generator)[:rank].sort().values for _ in key_GND])

    store = Store


def test_channels_by_queries_and_keys_beat_random_ones(model):
    chosen, random = (kl_of(model, think_maker(model, None, 0.85, layer=each)) for each in (ThinKLayer, RandomChannels))
    assert 0 < chosen < 0.9 * random


class RandomTokens(Rule):
    def kept(self, tokens, count):
        latest = self.latest_of(tokens)
        order = torch.randperm(tokens.num_held - latest, generator=torch.Generator().manual_seed(count))
        latest_N = torch.arange(tokens.num_held - latest, tokens.num_held)
        return torch.cat([order[: count - latest].sort().values, latest_N])[None]


@pytest.mark.parametrize("name", ["snapkv", "expected-attention"])
def test_tokens_that_are_looked_at_beat_random_ones(model, name):
    looked_at = kl_of(model, PEERS[name].maker(model, None, 0.5))
    random = kl_of(model, whole_tokens_maker(model, RandomTokens(0.5, most_latest=32, least=0)))
    assert 0 < looked_at < 0.96 * random


def test_the_most_distinct_keys_are_those_farthest_from_the_mean():
    """Two of nine keys point elsewhere, and are kept."""
    key_GND = torch.ones(1, 9, 4) + 0.01 * numbers(1, 9, 4).float()
    key_GND[0, [2, 5]] *= -3
    found = likeness(key_GND)
    assert found[0].argsort()[:2].sort().values.tolist() == [2, 5]
    lengths = torch.rand(1, 9, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    torch.testing.assert_close(likeness(key_GND * lengths), found)  # lengths do not matter


@torch.no_grad()
def test_attention_is_expected_from_the_queries_before_their_rotation(model):
    """Against queries of a normal distribution, drawn and rotated to places to come."""
    rotary = Rotary.from_model(model)
    rule, generator = Expected(0.5, rotary), torch.Generator().manual_seed(0)
    seen, length = 4000, 300
    query_HQD = 0.7 * torch.randn(4, seen, 16, generator=generator) + torch.randn(4, 1, 16, generator=generator)
    cos, sin = rotary.cos_sin(torch.arange(seen)[None], torch.float32)
    rotated_HQD = rotary.function(query_HQD[None], query_HQD[None], cos, sin)[0][0]
    torch.testing.assert_close(unrotated(rotated_HQD, torch.arange(seen), rotary), query_HQD, atol=1e-5, rtol=0)
    queries = Queries.of(rotated_HQD[:, 2000:], Queries.of(rotated_HQD[:, :2000], None))
    torch.testing.assert_close(queries.mean_and_covariance()[0], rotated_HQD.mean(dim=1), atol=1e-5, rtol=0)

    tokens = WholeTokens(rule, torch.zeros(2, 0, 16))
    tokens.append(*torch.randn(2, 2, length, 16, generator=generator), None)
    scores = rule.scores(tokens, Queries.of(query_HQD, None), scaling=0.25)
    turn_DD = mean_rotation(length, 16, rotary, torch.device("cpu"))
    score_HQN = 0.25 * (query_HQD @ turn_DD) @ tokens.key_GND.repeat_interleave(2, dim=0).mT
    weight_HN = score_HQN[..., 4:].exp().mean(dim=1)
    weight_HN /= weight_HN.sum(dim=1, keepdim=True)
    expected = weight_HN.unflatten(0, (2, 2)).mean(dim=1) * tokens.value_GND[:, 4:].norm(dim=-1)
    assert float((scores[:, 4:] - expected).abs().sum() / expected.sum()) < 0.1
    assert (scores[:, :4] == 0).all()


@torch.no_grad()
def test_streaming_holds_sinks_and_a_window_that_grows_with_the_text(model):
    cache = PEERS["streaming-llm"].maker(model, None, 0.4)()
    ids = torch.randint(1, 97, (1, 150), generator=torch.Generator().manual_seed(1))
    model(ids[:, :100], past_key_values=cache)
    for t in range(100, 150):
        model(ids[:, t : t + 1], past_key_values=cache)
        for layer in cache.compressed_layers():
            [position_N] = layer.sequences[0].position_PN.tolist()
            assert position_N[:SINK_TOKENS] == list(range(SINK_TOKENS))
            assert position_N[SINK_TOKENS:] == list(range(t + 1 - len(position_N) + SINK_TOKENS, t + 1))
        assert cache.rate <= 0.4
    assert cache.rate > 0.38
    assert SinksAndLatest(0.4).num_kept(layer.sequences[0], 1) == len(position_N)


def test_fisher_scores_of_norms_that_multiply_by_one_more():
    """Their fresh weights are zero, and they scale by one."""
    model = BY_NAME["gemma2"].model(layer_types=["full_attention"] * 3)
    assert min(fisher_scores(model, calibration_of(model, read=True))) > 0


def test_eigen_attention_keeps_keys_of_before_the_rotation_where_there_is_one(model, calibration):
    """As its authors' code does; a basis of rotated keys and queries is the OjaKV paper's baseline."""
    [layer, *_] = PEERS["eigen-attention"].maker(model, calibration, 0.5)().layers
    assert (layer.plan.config.rope, layer.plan.config.query_key, layer.plan.config.layout) == ("pre", False, "per_head")
    flat = BY_NAME["gpt2"].model()
    [layer, *_] = PEERS["eigen-attention"].maker(flat, calibration_of(flat), 0.5)().layers
    assert (layer.plan.config.rope, layer.plan.config.query_key) == ("post", True)


def test_palu_reads_a_prompt_exactly_where_it_is_asked_to(model, calibration):
    rebuilt, exact = (kl_of(model, PEERS[name].maker(model, calibration, 0.3)) for name in ("palu-j", "palu-j-exact"))
    assert 0 < exact < rebuilt
    assert (PEERS["palu-j"].reads_exactly, PEERS["palu-j-exact"].reads_exactly) == (False, True)
