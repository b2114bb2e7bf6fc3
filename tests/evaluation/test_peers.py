"""Every peer once: it equals the dense model where its budget is full, keeps within its bytes, and errs more with fewer."""

import dataclasses

import pytest
import torch
from methods import calibration_of, tiny_model
from tensors_held import found_tensors
from transformers import Olmo2Config, Olmo2ForCausalLM
from window_scores import score_windows

from evaluation.anatomy.shares import states_of, token_shares
from evaluation.peers import PEERS, TextLength
from evaluation.peers.peer import NEEDS
from evaluation.peers.puzzle_kv import PAGE_TOKENS, puzzle_maker
from evaluation.peers.quantized_cache import quantized_tensors
from evaluation.reading import cache_bytes
from evaluation.scores import summary
from evaluation.texts import windows_of
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.utils.errors import UserError

TEXT = TextLength(prompt=150, tokens=230)
CHOSEN = [name for name, each in PEERS.items() if not each.is_fixed]
OWN_LAYERS = [
    "puzzle-kv",
    "kivi-int4",
    "kivi-int2",
    "think",
    "snapkv",
    "expected-attention",
    "keydiff",
    "streaming-llm",
]  # the others are windowed caches, which the contracts test
WHOLE_TOKENS = ["snapkv", "expected-attention", "keydiff", "streaming-llm"]
WINDOWED = [name for name in PEERS if name.startswith(("rotated", "kvtc", "kq", "eigen", "palu"))]
# The error that rounding leaves where a token has all of its bytes.
ROUNDS = {
    "rotated-int8": 1e-3,
    "hqq-int8": 1e-3,
    "kvtc": 1e-4,
    "kvtc-128": 1e-4,
    "kvtc-joint": 1e-4,
    "palu-j-int4": 0.1,
}


@pytest.fixture(scope="module")
def windows():
    ids = torch.randint(1, 97, (2 * TEXT.tokens,), generator=torch.Generator().manual_seed(0))
    return windows_of(ids, TEXT.tokens, 2)


def measured(model, windows, maker):
    return summary(score_windows(model, windows, maker, prefix=TEXT.prompt))


def full_maker(name, model, calibration):
    if name == "puzzle-kv":  # two factors of a whole page are more than the page
        width = geometry_of(model).width
        return puzzle_maker(model, calibration, (PAGE_TOKENS + width) / width)
    if name in WHOLE_TOKENS:  # positions and scores come on top of tokens, which are fewer after a choice than before
        return PEERS[name].build(model, calibration, 2.0, None)
    return PEERS[name].maker(model, calibration, None if PEERS[name].is_fixed else 1.0)


@torch.no_grad()
def decoded(model, ids, cache, prompt, mask=None):
    logits, seen, masked = [], 0, {}
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        seen += part.shape[1]
        if mask is not None:
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, seen - part.shape[1] : seen]
            masked = {"attention_mask": mask[:, :seen], "position_ids": places}
        logits.append(model(part, past_key_values=cache, **masked).logits)
    return torch.cat(logits[1:], dim=1)


@pytest.mark.parametrize("name", [*ROUNDS, *(name for name in CHOSEN if name not in ROUNDS)])
def test_a_full_budget_is_the_dense_model(name, model, calibration, windows):
    kl = measured(model, windows[:1], full_maker(name, model, calibration))["kl"]
    assert kl < ROUNDS.get(name, 1e-7)


@pytest.mark.parametrize("name", [name for name in CHOSEN if name not in ("kvtc-128", "palu-j-int4")])
def test_fewer_bytes_are_less_faithful_and_no_more_than_asked_for(name, model, calibration, windows):
    least = 0.8 if name == "think" else 0.4 if name.startswith("kvtc") else 0.35
    rows = []
    for share in (least, least + 0.15):
        row = measured(model, windows, PEERS[name].maker(model, calibration, share, TEXT))
        # What a call of 16 tokens finds full is emptied by it, and a rank is a whole number.
        assert share - 0.15 < row["rate"] < share + 0.02
        rows.append(row)
    assert rows[0]["kl"] > 1.05 * rows[1]["kl"] > 0
    assert rows[0]["rate"] < rows[1]["rate"]


@pytest.mark.parametrize("name", ["eigen-attention", "kvtc", "palu-j"])
def test_rotations_that_depend_on_the_length_are_of_the_share(name, calibration, windows):
    """Such a cache keeps cos and sin of every token in place of its position: a quarter of this model's full cache."""
    turning = tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    row = measured(turning, windows, PEERS[name].maker(turning, calibration, 0.7, TEXT))
    assert 0.7 - 0.15 < row["rate"] < 0.7 + 0.02


def test_caches_of_transformers_refuse_layers_that_they_do_not_serve(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "sliding_attention"], raising=False)
    with pytest.raises(UserError, match=r"of full attention only, and this model has others \(sliding_attention\)"):
        PEERS["hqq-int4"].maker(model, None, None)


@pytest.mark.parametrize("name", list(PEERS))
def test_bytes_are_those_of_the_tensors_held(name, model, calibration):
    share = None if PEERS[name].is_fixed else 0.8
    cache = PEERS[name].maker(model, calibration, share)()
    decoded(model, torch.randint(1, 97, (1, 150)), cache, 144)
    reported = (
        list(quantized_tensors(cache))
        if name.startswith(("quanto", "hqq"))
        else [tensor for _, tensor in cache.tensors_by_kind()]
    )
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in reported}
    held = cache_bytes(cache, geometry_of(model).layers)
    assert held == sum(storages.values())
    assert held < 1.2 * geometry_of(model).full_nbytes(150, 4)
    if name in (*OWN_LAYERS, *WINDOWED):
        # Expected Attention says that it does not count its statistics of queries.
        noted = [layer.sequences[0].noted for layer in cache.layers if name == "expected-attention"]
        uncounted = {tensor.untyped_storage().data_ptr() for queries, _ in noted for tensor in queries[1:]}
        assert found_tensors(cache) - uncounted <= storages.keys(), "the cache holds tensors it does not report"


def test_channels_of_wide_heads_are_told_apart():
    model = tiny_model(head_dim=320)
    cache = PEERS["think"].maker(model, None, 0.99)()
    decoded(model, torch.randint(1, 97, (1, 120)), cache, 119)
    store = cache.layers[0].sequences[0].key
    kept_GR = store.channel_GR.long()
    assert store.basis_PWR.sum(dim=(1, 2)).tolist() == [313, 313]
    assert kept_GR.max() > 255
    assert (kept_GR.diff(dim=1) > 0).all()


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_a_left_padded_batch_is_its_sequences_alone(name, model, calibration):
    maker = PEERS[name].maker(model, calibration, None if PEERS[name].is_fixed else 0.6)
    ids = torch.randint(1, 97, (2, 120), generator=torch.Generator().manual_seed(3))
    lengths = [120, 85]
    mask = (torch.arange(120) >= 120 - torch.tensor(lengths)[:, None]).long()
    batch = decoded(model, ids * mask, maker(), 100, mask)
    for row, length in enumerate(lengths):
        alone = decoded(model, ids[row : row + 1, 120 - length :], maker(), length - 20)
        torch.testing.assert_close(batch[row : row + 1], alone, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_sequences_are_reordered_and_copied(name, model, calibration):
    maker = PEERS[name].maker(model, calibration, None if PEERS[name].is_fixed else 0.6)
    ids = torch.randint(1, 97, (2, 100), generator=torch.Generator().manual_seed(3))
    cache = maker()
    model(ids, past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    twins = decoded(model, ids[[1, 1]], cache, 1)
    assert torch.equal(twins[0], twins[1])
    same = maker()  # a batch of as many, so that no number at the border of two codes gets the other one
    model(ids[[1, 1]], past_key_values=same)
    torch.testing.assert_close(decoded(model, ids[[1, 1]], same, 1), twins, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name in OWN_LAYERS if not PEERS[name].is_fixed])
def test_generate_goes_through_the_cache(name, model, calibration):
    ids = torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(4))
    cache = full_maker(name, model, calibration)()
    settings = {"max_new_tokens": 50, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    generated = model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(generated, model.generate(ids, **settings))
    assert cache.get_seq_length() == 109


def test_what_is_needed_and_served_is_said_and_checked(model, calibration):
    for each in PEERS.values():
        assert all((each.what, each.source, each.simplified))
        assert each.needs <= set(NEEDS)
        if each.needs:
            with pytest.raises(UserError, match="`calibration` must be given"):
                each.maker(model, None, 0.8)
        if not each.is_fixed:
            with pytest.raises(UserError, match="`share` must be above"):
                each.maker(model, calibration, None)
            continue
        with pytest.raises(UserError, match="`share` must be none"):
            each.maker(model, calibration, 0.3)
    with pytest.raises(UserError, match="`share` must be above 0.5"):
        PEERS["think"].maker(model, calibration, 0.4)
    with pytest.raises(UserError, match="leaves no byte for a compressed token"):
        PEERS["kvtc"].maker(model, calibration, 0.05, TEXT)
    with pytest.raises(UserError, match="of 20 tokens behind a prompt of 8 none is compressed"):
        PEERS["kvtc"].maker(model, calibration, 0.9, TextLength(prompt=8, tokens=20))
    unread = dataclasses.replace(calibration, read=None)
    with pytest.raises(UserError, match="does not say what is read"):
        PEERS["kvtc"].maker(model, unread, 0.5)


def test_palu_is_refused_where_no_norm_says_what_its_projections_read():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "pad_token_id": 0}
    model = Olmo2ForCausalLM(Olmo2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    with pytest.raises(
        UserError, match=r"they all stand behind \(post_attention_layernorm, post_feedforward_layernorm\)"
    ):
        PEERS["palu-j"].maker(model, calibration_of(model, read=True), 0.5)


def test_a_cache_that_forgets_refuses_to_go_back(model, calibration):
    cache = PEERS["snapkv"].maker(model, calibration, 0.5)()
    ids = torch.randint(1, 97, (1, 90), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(UserError, match="forgets tokens as it goes"):
        cache.crop(-3)


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "expected-attention"])
@torch.no_grad()
def test_evictions_hold_their_share_on_average(name, model, calibration):
    """Between two choices they hold more and more."""
    ids = torch.randint(1, 97, (1, 250), generator=torch.Generator().manual_seed(1))
    cache, geometry = PEERS[name].maker(model, calibration, 0.5)(), geometry_of(model)
    model(ids[:, :122], past_key_values=cache)
    held = []
    for place in range(122, 250):  # four choices
        model(ids[:, place : place + 1], past_key_values=cache)
        held.append(cache_bytes(cache, geometry.layers) / geometry.full_nbytes(place + 1, 4))
    assert sum(held) / len(held) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("share", [0.1, 0.14])
def test_integers_of_latents_hold_their_share(share, model, calibration, windows):
    row = measured(model, windows, PEERS["palu-j-int4"].maker(model, calibration, share, TEXT))
    assert row["rate"] == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize(("name", "share"), [("puzzle-kv", 0.9), ("kivi-int4", None)])
def test_a_page_of_tokens_has_no_shares_of_tokens(name, share, model):
    maker = PEERS[name].maker(model, None, share, TEXT)
    assert token_shares(maker, states_of(model, torch.randint(1, 97, (64,))), 4) is None


@pytest.mark.parametrize("share", [0.06, 0.1])
@pytest.mark.parametrize("name", ["snapkv", "keydiff", "expected-attention"])
@torch.no_grad()
def test_evictions_choose_within_a_small_budget_and_hold_it_at_the_end(name, share, model, calibration):
    """With as many latest tokens as at a large budget nothing was left to choose, and less was held than asked."""
    ids = torch.randint(1, 97, (1, 480), generator=torch.Generator().manual_seed(1))
    cache = PEERS[name].maker(model, calibration, share, TextLength(prompt=360, tokens=480))()
    model(ids[:, :360], past_key_values=cache)
    rule = cache.layers[0].rule
    for layer in cache.layers:
        [tokens] = layer.sequences
        chosen_P = (tokens.position_PN < 360 - rule.latest_of(tokens)).sum(dim=1) - rule.least
        assert (chosen_P >= 10).all(), "of tokens before the latest"
    for first in range(360, 480, 16):
        model(ids[:, first : first + 16], past_key_values=cache)
    layers = geometry_of(model).layers
    assert cache_bytes(cache, layers) / geometry_of(model).full_nbytes(480, 4) == pytest.approx(share, abs=0.004)


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "expected-attention"])
def test_a_share_that_leaves_nothing_to_choose_is_refused(name, model, calibration):
    with pytest.raises(UserError, match="`share` must be large enough for more than the . tokens that are held always"):
        PEERS[name].maker(model, calibration, 0.02, TextLength(prompt=50, tokens=100))
