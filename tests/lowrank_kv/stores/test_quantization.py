"""Coefficients as integers: rounding, packing, the growing rows, and caches that hold them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import calibration_of, dynakv_model, tiny_model

from lowrank_kv.stores.coefficients import TILE_ROWS, Coefficients
from lowrank_kv.stores.memory_report import COEFFICIENTS, SCALES
from lowrank_kv.stores.quantization import IntegerQuantization, coef_scale_of
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

BITS = pytest.mark.parametrize("bits", [8, 4])


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([None, 2, 7, 32]),
    rank=st.integers(1, 70),
    rows=st.integers(1, 9),
    scale=st.sampled_from([1e-6, 1.0, 3e4]),
    offset=st.sampled_from([0.0, -5.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_a_value_is_rounded_to_its_nearest_level(bits, group, rank, rows, scale, offset, seed):
    values = (torch.randn(2, rows, rank, generator=torch.Generator().manual_seed(seed)) + offset) * scale
    quantization = IntegerQuantization(bits=bits, group_size=group)
    codes, scales = quantization.encode(values)
    assert codes.dtype == torch.uint8
    assert codes.shape == (2, rows, quantization.row_bytes(rank))
    assert scales.shape == (2, rows, 2 * quantization.num_groups(rank))
    decoded = quantization.decode(codes, scales, rank, torch.float32)
    for start in range(0, rank, group or rank):
        part = values[..., start : start + (group or rank)]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        # Half a level, and what rounding the range to bf16 adds to it.
        allowed = ((high - low) * 1.02 + low.abs() * 0.01) / (2**bits - 1) * 0.51
        assert ((decoded[..., start : start + (group or rank)] - part).abs() <= allowed + 1e-30).all()


def test_int4_takes_half_the_bytes_of_int8_and_every_code_survives_packing():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 1)
    for rank in (1, 2, 15, 16):
        quantization = IntegerQuantization(bits=4)
        packed = quantization.pack(codes[:, :rank])
        assert packed.shape == (3, -(-rank // 2))
        assert torch.equal(quantization.unpack(packed, rank), codes[:, :rank])


@BITS
def test_companding_beats_one_scale_on_a_steep_spectrum(bits):
    deviation = 2.0 ** -torch.linspace(0, 8, 48)
    values = torch.randn(500, 48, generator=torch.Generator().manual_seed(0)) * deviation
    quantization, spread = IntegerQuantization(bits=bits), coef_scale_of(deviation.square())

    def lost(rows, factor):
        decoded = quantization.decode(*quantization.encode(rows / factor), 48, torch.float32) * factor
        return float((decoded - rows).square().sum() / rows.square().sum())

    assert lost(values, spread) < 0.5 * lost(values, torch.ones(48))


@BITS
def test_rows_grow_crop_keep_and_copy_as_plain_ones_do(bits):
    generator = torch.Generator().manual_seed(1)
    held = Coefficients(
        (2, 9), dtype=torch.float32, device=torch.device("cpu"), quantization=IntegerQuantization(bits=bits)
    )
    plain = torch.empty(2, 0, 9)
    for count in (3, 0, 1, TILE_ROWS, 5):
        rows = torch.randn(2, count, 9, generator=generator)
        held.append(rows)
        plain = torch.cat([plain, rows], dim=1)
    twin = held.clone()
    held.crop(2000)
    index = torch.stack([torch.arange(0, 2000, 3), torch.arange(1, 2000, 3)[:667]])
    held.keep(index)
    plain_kept = plain[:, :2000].take_along_dim(index[:, :, None], dim=1)
    step = 2 * 4.5 / (2**bits - 1)
    torch.testing.assert_close(held.rows(), plain_kept, atol=step, rtol=0)
    assert twin.length == plain.shape[1]
    torch.testing.assert_close(twin.rows(), plain, atol=step, rtol=0)
    # Reading tile by tile is reading the whole.
    query, weight = torch.randn(2, 3, 9, generator=generator), torch.rand(2, 3, twin.length, generator=generator)
    torch.testing.assert_close(twin.dot(query), query @ twin.rows().mT, atol=1e-4, rtol=0)
    torch.testing.assert_close(twin.weighted_sum(weight), weight @ twin.rows(), atol=1e-3, rtol=1e-5)
    kinds = {kind: tensor.nbytes for kind, tensor in held.tensors_by_kind()}
    assert kinds == {COEFFICIENTS: 2 * 667 * (9 if bits == 8 else 5), SCALES: 2 * 667 * 4}


def make_dynakv(model, rate, cache_dtype):
    return dynakv_model(model, rate, cache_dtype=cache_dtype)


def make_online(model, rate, cache_dtype, preset="ojakv-joint", **settings):
    config = OjaKVConfig.preset(
        preset, rate=rate, cache_dtype=cache_dtype, **{"update_period": 4, "recent_window": 2, **settings}
    )
    plan = make_plan(calibration_of(model), config)
    return lambda: OjaKVCache(model, plan)


MAKERS = pytest.mark.parametrize("make", [make_dynakv, make_online], ids=["dynakv", "ojakv-joint"])


@torch.no_grad()
@MAKERS
@pytest.mark.parametrize(("cache_dtype", "allowed"), [("int8", 0.02), ("int4", 0.35)])
def test_logits_stay_near_those_of_unquantized_coefficients(make, cache_dtype, allowed):
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    outputs = {}
    for kind in ("model", cache_dtype):
        model = tiny_model()
        cache = make(model, 1.0, kind)()
        model(ids[:, :30], past_key_values=cache, use_cache=True)
        steps = [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(30, 40)]
        outputs[kind] = torch.cat(steps, dim=1)
    spread = outputs["model"].std()
    error = (outputs[cache_dtype] - outputs["model"]).square().mean().sqrt() / spread
    assert 0 < error < allowed


@torch.no_grad()
@MAKERS
@pytest.mark.parametrize(("cache_dtype", "allowed"), [("int8", 1e-2), ("int4", 0.1)])
def test_a_padded_batch_predicts_what_its_sequences_do_alone(make, cache_dtype, allowed):
    """Not to the last bit: a rounding difference of a batch may turn one code into its neighbour."""
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = make(model, 0.5, cache_dtype)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    token = torch.tensor([[7], [7]])

    def decoded(prompt, mask):
        cache = make_cache()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(prompt, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        last = longer.sum(1, keepdim=True) - 1
        return model(
            token[: len(prompt)], attention_mask=longer, position_ids=last, past_key_values=cache, use_cache=True
        ).logits[:, -1]

    batch = decoded(ids * mask, mask)
    for row, start in ((0, 0), (1, 12)):
        part = ids[row : row + 1, start:]
        alone = decoded(part, torch.ones_like(part))[0]
        assert (batch[row] - alone).square().mean().sqrt() / alone.std() < allowed


@torch.no_grad()
def test_dynakv_reads_a_text_in_pieces_as_at_once():
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = make_dynakv(model, 0.5, "int4")
    whole = model(ids, past_key_values=make_cache(), use_cache=True).logits
    cache = make_cache()
    pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([20, 1, 18, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_online_integers_keep_following_though_rounding_them_again_would_cost_more_than_an_update_may():
    ids = torch.randint(1, 97, (1, 120), generator=torch.Generator().manual_seed(5))
    for cache_dtype, max_loss in (("int8", 0.01), ("int4", 0.001), ("int4", 0.5)):
        model = tiny_model()
        cache = make_online(model, 0.5, cache_dtype, max_loss=max_loss)()
        model(ids[:, :40], past_key_values=cache, use_cache=True)
        after_prompt = cache.updates
        for part in ids[:, 40:].split(8, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        assert cache.updates > after_prompt, (cache_dtype, max_loss)


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_memory_counts_codes_and_scales(cache_dtype):
    ids = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    cache = make_dynakv(model, 1.0, cache_dtype)()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    memory = cache.memory()
    width = 32 if cache_dtype == "int8" else 16
    assert memory.kinds[COEFFICIENTS] == 3 * 2 * 60 * width
    assert memory.kinds[SCALES] == 3 * 2 * 60 * 4
    assert memory.total == cache.nbytes == sum(tensor.nbytes for _, tensor in cache.tensors_by_kind())
    assert f"{memory.total:,}" in str(memory)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cache_dtype": "int2"}, "cache_dtype"),
        ({"group_size": 32}, "group_size"),
        ({"cache_dtype": "int4", "group_size": 1}, "group_size"),
    ],
)
def test_wrong_settings_are_refused(settings, named):
    with pytest.raises(UserError, match=named):
        OjaKVConfig.preset("ojakv-joint", **settings)


def test_weighted_sums_of_long_texts_are_as_exact_as_one_product():
    """Tiles were added in the weights' dtype, so that the error grew with the text."""
    generator = torch.Generator().manual_seed(0)
    tokens = 60 * TILE_ROWS
    coef = Coefficients(
        (1, 16), dtype=torch.bfloat16, device=torch.device("cpu"), quantization=IntegerQuantization(bits=8)
    )
    coef.append(torch.randn(1, tokens, 16, generator=generator) + 1)
    weight_1MN = torch.randn(1, 2, tokens, generator=generator).softmax(-1).bfloat16()
    expected = weight_1MN.double() @ coef.rows(dtype=torch.float32).double()
    assert ((coef.weighted_sum(weight_1MN).double() - expected).norm() / expected.norm()) < 3e-3
