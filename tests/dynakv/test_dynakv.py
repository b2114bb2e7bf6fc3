"""Gate, projection, objective and rate control."""

import copy

import pytest
import torch
from methods import dynakv_model, spread_gates, tiny_model
from tensors_held import found_tensors
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partial_rotary_pos_emb
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import dynakv
from dynakv.config import DynaKVConfig
from dynakv.gate import Gate
from dynakv.layer_compressor import SingleLayerCompressor
from dynakv.mask import soft_mask
from dynakv.objective import RateRecorder, objective
from dynakv.projection import Projection
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.hf.cache.layer import join_heads
from lowrank_kv.hf.loading import recompute_activations
from lowrank_kv.hf.rope import Rope
from lowrank_kv.ops import native
from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.native.ragged_view import view_of
from lowrank_kv.stores.ragged import RaggedStore
from lowrank_kv.utils.errors import UserError


def test_gate_follows_equations_5_and_6():
    generator = torch.Generator().manual_seed(0)
    gate = Gate(6).double()
    gate.weight.data = torch.randn(6, 6, generator=generator).double()
    gate.bias.data = torch.randn(6, generator=generator).double()
    gate.input_scale = torch.rand(6, generator=generator).double() + 0.5
    coef = torch.randn(2, 3, 6, generator=generator).double()
    mask = soft_mask(gate(coef))
    for b in range(2):
        for t in range(3):
            logits = (coef[b, t] * gate.input_scale) @ gate.weight + gate.bias
            p = (logits.exp() / logits.exp().sum()).tolist()
            expected = [sum(p[: 6 - i]) for i in range(6)]
            torch.testing.assert_close(mask[b, t].tolist(), expected, atol=1e-6, rtol=0)
    assert (mask.diff(dim=-1) <= 0).all()


def test_hard_rank_counts_what_exceeds_the_threshold():
    cumulative = torch.rand(4, 50, 24, generator=torch.Generator().manual_seed(0)).softmax(-1).cumsum(-1)
    rank = hard_rank(cumulative, 0.1, 1)
    assert torch.equal(rank, (soft_mask(cumulative) > 0.1).sum(-1).clamp(min=1))
    # Equation 8 keeps a prefix.
    kept = soft_mask(cumulative) > 0.1
    assert torch.equal(kept, torch.arange(24) < rank[..., None])


@pytest.mark.parametrize(("rank", "rounded"), [(1, 8), (3, 8), (4, 8), (11, 8), (12, 16), (20, 20), (19, 16)])
def test_ranks_round_to_the_nearest_multiple_and_never_to_nothing(rank, rounded):
    cumulative = torch.zeros(1, 1, 20)
    cumulative[..., 20 - rank :] = 1.0
    assert int(hard_rank(cumulative, 0.1, 8)) == rounded


def test_the_gate_starts_nearly_open():
    gate = Gate(192)
    gate.initialize(torch.logspace(4, -4, 192), decay=dynakv.DynaKVConfig().gate_decay)
    rank = hard_rank(gate(torch.randn(1, 100, 192)), 0.1, 1)
    assert rank.float().mean() / 192 > 0.97


@pytest.mark.parametrize("decoder", ["exact", "orthogonal"])
def test_projection_inverts(decoder):
    projection = Projection(32, decoder=decoder, name="layer 0 keys")
    start = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
    projection.initialize(start, start.T)
    projection.weight.data += 0.02 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    for basis, inverse in (projection.matrices(), projection.fixed_matrices(torch.float32, torch.device("cpu"))):
        torch.testing.assert_close(basis @ inverse, torch.eye(32), atol=1e-5, rtol=0)
        if decoder == "orthogonal":
            torch.testing.assert_close(basis.T @ basis, torch.eye(32), atol=1e-5, rtol=0)


def test_fixed_matrices_follow_the_parameters():
    projection = Projection(4, decoder="exact", name="layer 0 keys")
    before = projection.fixed_matrices(torch.float32, torch.device("cpu"))[1]
    with torch.no_grad():
        projection.weight.mul_(2)
    after = projection.fixed_matrices(torch.float32, torch.device("cpu"))[1]
    torch.testing.assert_close(after, before / 2)


@pytest.mark.parametrize(("value", "what"), [(0.0, "condition number"), (float("nan"), "NaN")])
def test_a_projection_that_cannot_be_inverted_names_the_layer(value, what):
    projection = Projection(4, decoder="exact", name="layer 7 values")
    projection.weight.data[0] = value
    with pytest.raises(UserError, match=f"layer 7 values.*{what}"):
        projection.fixed_matrices(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("mask", ["hard", "soft_prefix", "straight_through"])
def test_gradients_reach_every_parameter(mask):
    model = tiny_model()
    dynakv_model(model, 0.4, mask=mask, granularity=4)
    model.train()
    for layer in dynakv.compressors(model).values():
        layer.key.train_on_hard_mask = layer.value.train_on_hard_mask = mask == "straight_through"
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    with RateRecorder(model) as recorder:
        loss = model(ids, labels=ids).loss
    objective(loss, recorder.rates(), 4.0).backward()
    for layer in dynakv.compressors(model).values():
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_gradients_are_the_same_with_checkpointing():
    def gradients(checkpointing: bool):
        model = tiny_model()
        dynakv_model(model, 0.4)
        model.train()
        if checkpointing:
            recompute_activations(model)
        ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
        with RateRecorder(model) as recorder:
            loss = model(ids, labels=ids).loss
        objective(loss, recorder.rates(), 4.0).backward()
        return [p.grad for layer in dynakv.compressors(model).values() for p in layer.parameters()]

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_frozen_open_training_loss_is_the_base_model_s():
    model = tiny_model()
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    base = model(ids, labels=ids, use_cache=False).loss
    dynakv_model(model, 1.0)
    model.train()
    torch.testing.assert_close(model(ids, labels=ids).loss, base, atol=1e-5, rtol=0)


def test_reported_rates_are_those_of_the_masks():
    model = tiny_model()
    make_cache = dynakv_model(model, 0.4)
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with RateRecorder(model) as recorder:
            model(ids, use_cache=False)
        cache = make_cache()
        model(ids, past_key_values=cache)
    hard = recorder.rates().hard
    stores = [store for layer in cache.layers for one in layer.sequences for store in (one.key, one.value)]
    stored = [store.ranks().float().mean() / 32 for store in stores]
    assert hard == pytest.approx(float(torch.stack(stored).mean()), abs=1e-6)


@torch.no_grad()
def test_attached_models_survive_a_deep_copy():
    model = tiny_model()
    dynakv_model(model, 0.4)
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    before = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    twin = copy.deepcopy(model)
    spread_gates(model, seed=9)
    after = twin.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(after.sequences, before)
    assert isinstance(after.past_key_values, dynakv.DynaKVCache)


@torch.no_grad()
def test_detaching_restores_the_stock_model():
    model = tiny_model()
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    dense = model(ids).logits
    dynakv_model(model, 0.4)
    assert not torch.equal(model(ids).logits, dense)
    dynakv.detach(model)
    output = model(ids)
    assert torch.equal(output.logits, dense)
    assert model.config._attn_implementation == "sdpa"
    assert type(output.past_key_values).__name__ == "DynamicCache"


def test_what_would_bypass_the_compressor_is_refused():
    model = tiny_model()
    dynakv_model(model, 0.4)
    ids = torch.randint(1, 97, (1, 8))
    with pytest.raises(UserError, match="DynamicCache.*bypass the compressor.*pass one of DynaKVCache.*uncompress"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(UserError, match="cache_implementation='static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="set_attn_implementation"):
        model(ids)


def test_a_cache_made_for_one_model_is_refused_by_another():
    model = tiny_model()
    cache = dynakv_model(model, 0.4)()
    with pytest.raises(UserError, match="not compressed"):
        tiny_model()(torch.randint(1, 97, (1, 8)), past_key_values=cache)


@torch.no_grad()
def test_bfloat16_decodes_as_it_prefills(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    make_cache = dynakv_model(model, 0.4)
    ids = torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(0))
    whole = model(ids, past_key_values=make_cache()).logits.float()
    cache = make_cache()
    steps = [model(step, past_key_values=cache).logits for step in (ids[:, :9], *ids[:, 9:].split(1, dim=1))]
    assert cache.layers[0].sequences[0].key.dtype == torch.bfloat16
    difference = (torch.cat(steps, dim=1).float() - whole).abs()
    assert difference.mean() < 0.02 * whole.std()


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("is_autocast", [False, True])
@torch.no_grad()
def test_gates_of_small_states_choose_the_same_ranks_in_fp16(is_training, is_autocast):
    """Their weights, scaled by the states' energies, leave its range."""
    generator = torch.Generator().manual_seed(0)
    side = SingleLayerCompressor(64, 32, DynaKVConfig(), 0).key.train(is_training)
    side.gate.initialize(torch.logspace(-6, -9, 64), decay=2.0)
    side.gate.weight.copy_(3 * torch.randn(64, 64, generator=generator))
    states = (torch.randn(2, 50, 64, generator=generator) * torch.logspace(-3, -4.5, 64)).half()
    assert float(side.gate.affine(torch.float32)[0].abs().max()) > torch.finfo(torch.float16).max
    expected = side(states.float())
    with torch.autocast("cpu", dtype=torch.float16, enabled=is_autocast):
        found = side(states)
    assert found[0].dtype == torch.float16
    assert 0.1 < float(expected[2]) < 0.9
    torch.testing.assert_close(torch.stack(found[1:]), torch.stack(expected[1:]), atol=0.01, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
@pytest.mark.parametrize("rotary", [None, 16, 8])
@torch.no_grad()
def test_compiled_encoding_is_that_of_the_modules(rotary, cache_dtype, dtype):
    """A few tokens on a CPU take compiled code into the cache: from rotated keys and values, however they are laid out. In
    bf16 every step of it is rounded, or ranks would be others than those of a prompt."""
    if library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(0)
    layer = SingleLayerCompressor(64, 16, DynaKVConfig(granularity=4, cache_dtype=cache_dtype), 0).eval()
    for side in (layer.key, layer.value):
        side.projection.weight.add_(torch.randn(64, 64, generator=generator) / 20)
        side.gate.weight.copy_(torch.randn(64, 64, generator=generator) / 4)
        side.gate.input_scale.uniform_(0.5, 2, generator=generator)
    key = torch.randn(2, 7, 4, 16, generator=generator).to(dtype).transpose(1, 2)
    value = torch.randn(2, 4, 16, 7, generator=generator).to(dtype).transpose(2, 3)
    rope = None
    if rotary:
        angle = torch.randn(2, 7, rotary // 2, generator=generator).repeat(1, 1, 2)
        apply = apply_rotary_pos_emb if rotary == 16 else apply_partial_rotary_pos_emb
        rope = Rope(apply, 1.3 * angle.cos(), 1.3 * angle.sin())
    codec = copy.deepcopy(layer).codec()
    encoder = native.encoder_of(codec.key.token_gate(dtype), codec.value.token_gate(dtype), dtype)
    rotary = None if rope is None else rope.packed
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    assert encoder.encode(key, value.to(other), rotary) is None, "it would read beyond the values or half of them"
    assert encoder.encode(*torch.zeros(2, 3, 4, 6, 16), rotary) is None, "more tokens than it serves"
    unrotated = key if rope is None else rope.unrotate(key)
    new = encoder.encode(key, value, rotary)
    assert not new.are_stored, "they were to go nowhere"
    sides = (codec.key, codec.value), (unrotated, value)
    for coef, rank, side, states in zip(new.coef_SBTC, new.rank_SBT, *sides, strict=True):
        plain_coef, plain_rank = side.encode(join_heads(states))
        rounding = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(coef, plain_coef.float(), atol=rounding, rtol=rounding)
        assert rank.tolist() == plain_rank.tolist()
        assert rank.unique().numel() > 3
    store = RaggedStore(64, dtype=torch.float32, device=key.device)
    with pytest.raises(ValueError, match="shorter"):
        encoder.encode(key, value, rotary, [(view_of(store), view_of(store))])


@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
@torch.no_grad()
def test_caches_in_bf16_share_the_gates_weights_of_the_model(cache_dtype):
    """Compiled code reads them in fp32: copies, which are not the caches' to hold."""
    ids = torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(0))
    model = tiny_model()
    dynakv_model(model, 0.4, cache_dtype=cache_dtype)
    model.to(torch.bfloat16)
    for _ in range(2):
        cache = dynakv.DynaKVCache.from_model(model)
        for part in ids.split([20, 1, 1, 1, 1], dim=1):
            model(part, past_key_values=cache)
        reported = {tensor.untyped_storage().data_ptr() for _, tensor in cache.tensors_by_kind()}
        assert found_tensors(cache) <= reported
    gates = [layer.codec.key.token_gate(torch.bfloat16) for layer in cache.compressed_layers()]
    again = [layer.codec().key.token_gate(torch.bfloat16) for layer in dynakv.compressors(model).values()]
    assert all(one.weight_CC is other.weight_CC for one, other in zip(gates, again, strict=True))
    side = dynakv.compressors(model)[1].key
    side.gate.weight.mul_(2)
    expected = (side.gate.input_scale[:, None] * side.gate.weight).bfloat16().float()
    assert torch.equal(side.token_gate(torch.bfloat16).weight_CC, expected)


@torch.no_grad()
def test_a_call_that_ends_when_compiled_code_has_appended_leaves_no_place_beyond_the_tokens(monkeypatch):
    """Ctrl-C comes when compiled code has appended; a place beyond the last token's would be written to out of bounds."""
    if library() is None:
        pytest.skip("there is no C compiler")
    model = tiny_model()
    cache = dynakv_model(model, 0.4, granularity=8)()
    ids = torch.randint(1, 97, (1, 600), generator=torch.Generator().manual_seed(0))
    model(ids, past_key_values=cache)
    stores = [store for layer in cache.layers for each in layer.sequences for store in (each.key, each.value)]

    def rows() -> int:
        return sum(store.length for store in stores)

    def interrupted(encoder, *arguments):
        before = rows()
        encode(encoder, *arguments)
        appended.append(rows() - before)
        raise KeyboardInterrupt

    encode = native.Encoder.encode
    appended: list[int] = []
    for token in ids[0, :3]:
        before = rows()
        monkeypatch.setattr(native.Encoder, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(token.view(1, 1), past_key_values=cache)
        monkeypatch.undo()
        assert rows() == before
        cache.crop(0)  # layers agree again on how many tokens there are
        assert {layer.get_seq_length() for layer in cache.layers} == {stores[-1].length}
        model(token.view(1, 1), past_key_values=cache)
    assert all(appended), "compiled code has appended none"
    assert all(store.length == 603 for store in stores)
    assert all(int(store.order().max()) < store.length for store in stores)


@pytest.mark.parametrize(("cache_dtype", "allowed"), [("model", 1e-4), ("int8", 0.1)])
@torch.no_grad()
def test_a_prompt_may_be_one_token(cache_dtype, allowed):
    model = tiny_model()
    cache = dynakv_model(model, 1, cache_dtype=cache_dtype)()
    ids = torch.randint(1, 97, (2, 5), generator=torch.Generator().manual_seed(0))
    found = torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], dim=1)
    torch.testing.assert_close(found, tiny_model()(ids).logits, atol=allowed, rtol=0)


@pytest.mark.parametrize("cache_dtype", ["model", "int8", "int4"])
@pytest.mark.parametrize("length", [2, 16])
@torch.no_grad()
def test_no_token_of_a_short_prompt_sees_the_next(length, cache_dtype):
    model = tiny_model()
    make_cache = dynakv_model(model, 1, cache_dtype=cache_dtype)
    ids = torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(0))
    other = torch.cat([ids[:, :-1], ids[:, -1:] % 96 + 1], dim=1)
    found, changed = (model(prompt, past_key_values=make_cache()).logits[:, :-1] for prompt in (ids, other))
    torch.testing.assert_close(found, changed)
    torch.testing.assert_close(
        found, tiny_model()(ids).logits[:, :-1], atol=1.0 if cache_dtype == "int4" else 0.1, rtol=0
    )


@pytest.mark.parametrize(
    ("settings", "start", "message"),
    [
        ({"rank_policy": "plan"}, dynakv.initialize_from_moments, "`rank_policy` must be one that keeps ranks"),
        ({"rank_policy": "gate"}, dynakv.initialize_from_coders, "`rank_policy` must be plan to start from coders"),
    ],
)
def test_a_start_of_the_other_kind_is_refused(settings, start, message):
    model = dynakv.add_compressors(tiny_model(), DynaKVConfig(**settings))
    with pytest.raises(UserError, match=message):
        start(model, {})
