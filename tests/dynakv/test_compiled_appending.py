"""Compiled code appends a token's coefficients in the call that encodes it, as the store would."""

import pytest
import torch

from dynakv.config import DynaKVConfig
from dynakv.layer_compressor import SingleLayerCompressor
from lowrank_kv.ops import native
from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.native.ragged_view import view_of
from lowrank_kv.stores.ragged import RaggedStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_compiled_appending_rounds_to_what_the_store_holds(dtype):
    if library() is None:
        pytest.skip("there is no C compiler")
    layer = SingleLayerCompressor(64, 16, DynaKVConfig(granularity=8), 0).eval()
    generator = torch.Generator().manual_seed(0)
    for side in (layer.key, layer.value):
        side.gate.weight.copy_(torch.randn(64, 64, generator=generator) / 4)
    codec = layer.codec()
    encoder = native.encoder_of(codec.key.token_gate(dtype), codec.value.token_gate(dtype), dtype)
    for _ in range(20):
        stores = [RaggedStore(64, dtype=dtype, device=torch.device("cpu")) for _ in range(2)]
        for store in stores:  # with room for one more at every rank
            rows = torch.randn(512, 64, generator=generator)
            store.append(rows, torch.arange(8, 72, 8).repeat(64), is_prompt=True)
        states = torch.randn(2, 1, 4, 1, 16, generator=generator).to(dtype)
        new = encoder.encode(*states, None, [(view_of(stores[0]), view_of(stores[1]))])
        assert new.are_stored
        for store, coef_C, rank in zip(stores, new.coef_SBTC[:, 0, 0], new.rank_SBT.flatten().tolist(), strict=True):
            assert store.length == 513
            expected_C = coef_C.to(dtype)
            expected_C[rank:] = 0
            assert store.ranks()[-1] == rank
            assert torch.equal(store.dense()[-1], expected_C)


@torch.no_grad()
def test_compiled_appending_leaves_positions_that_int16_does_not_count_to_the_store():
    if library() is None:
        pytest.skip("there is no C compiler")
    codec = SingleLayerCompressor(64, 16, DynaKVConfig(granularity=64), 0).eval().codec()  # all ranks are 64
    encoder = native.encoder_of(*(side.token_gate(torch.float32) for side in (codec.key, codec.value)), torch.float32)
    most = torch.iinfo(torch.int16).max
    stores = [RaggedStore(64, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    for store in stores:  # with room for more
        store.append(torch.zeros(most - 1, 64), torch.full((most - 1,), 64), is_prompt=True)
    targets, states = [tuple(view_of(store) for store in stores)], torch.randn(2, 1, 4, 2, 16)
    assert not encoder.encode(*states, None, targets).are_stored
    assert [store.length for store in stores] == [most - 1, most - 1]
    assert encoder.encode(*states[..., :1, :], None, targets).are_stored
    assert [store.length for store in stores] == [most, most]
