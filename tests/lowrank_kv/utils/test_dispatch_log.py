"""What is chosen is said once, with the reason."""

import logging

import pytest
import torch
from rotations import rotation

from lowrank_kv.codec import TokenGate
from lowrank_kv.ops import native
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, lowrank_attention
from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.ragged_attention import RaggedTokens, ragged_attention
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.ragged import RaggedStore
from lowrank_kv.utils import dispatch_log

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture
def said(caplog):
    """A function that returns what has been said since it was last asked."""
    dispatch_log._log.cache_clear()
    caplog.set_level(logging.INFO, logger="lowrank_kv")

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "lowrank_kv"]
        caplog.clear()
        return found

    yield messages
    dispatch_log._log.cache_clear()


def attend_ragged(dtype: torch.dtype, *, pairs: bool = True) -> None:
    generator = torch.Generator().manual_seed(0)
    stores = [RaggedStore(32, dtype=dtype, device=CPU) for _ in range(2)]
    for store in stores:
        store.append(torch.randn(20, 32, generator=generator), torch.full((20,), 8))
    query = torch.randn(1, 4, 1, 16, generator=generator).to(dtype)
    decoders = Decoders(*torch.randn(2, 32, 32, generator=generator).to(dtype))
    tokens = RaggedTokens(*stores, rotation(20, 16, generator, pairs=pairs))
    for _ in range(3):
        ragged_attention(query, [tokens], decoders, Scoring(0.25))


def attend_low_rank(dtype: torch.dtype, mask: torch.Tensor | None = None) -> None:
    held = Operands(
        Coefficients.from_rows(torch.randn(2, 20, 4).to(dtype)),
        torch.randn(2, 16, 4).to(dtype),
        GrowingTensor(torch.randn(2, 3, 16).to(dtype), dim=1),
    )
    for _ in range(3):
        lowrank_attention(torch.randn(4, 1, 16).to(dtype), LowRankTokens(held, held, mask_QT=mask), Scoring(0.25))


@needs_compiler
def test_ragged_attention_says_what_it_runs_on(said):
    attend_ragged(torch.float32)
    assert said() == ["ragged_attention: native (float32 on cpu)"]
    attend_ragged(torch.float16)
    attend_ragged(torch.float32, pairs=False)
    assert said() == [
        "ragged_attention: eager (float16 on cpu), because compiled code reads fp32 and bf16",
        "ragged_attention: eager (float32 on cpu), because compiled code rotates keys in pairs",
    ]
    attend_ragged(torch.float32)
    attend_ragged(torch.float16)
    assert said() == []


@needs_compiler
def test_lowrank_attention_says_what_it_runs_on(said):
    attend_low_rank(torch.bfloat16)
    attend_low_rank(torch.float16)
    attend_low_rank(torch.float32, torch.ones(4, 1, 23, dtype=torch.bool))
    assert said() == [
        "lowrank_attention: native (bfloat16 on cpu)",
        "lowrank_attention: eager (float16 on cpu), because compiled code reads fp32 and bf16",
        "lowrank_attention: eager (float32 on cpu), because each part holds tokens of its own",
    ]


def test_without_compiled_code_says_why(said, monkeypatch):
    monkeypatch.setenv("LOWRANK_KV_NATIVE", "0")
    library.cache_clear()
    try:
        attend_ragged(torch.float32)
        attend_low_rank(torch.float32)
        assert not native.encodes(torch.float32, CPU)
    finally:
        library.cache_clear()
    because = "because there is no compiled code (no C compiler that serves, or LOWRANK_KV_NATIVE=0)"
    assert said() == [
        f"ragged_attention: eager (float32 on cpu), {because}",
        f"lowrank_attention: eager (float32 on cpu), {because}",
        f"encode: eager (float32 on cpu), {because}",
    ]


@needs_compiler
def test_the_encoder_says_what_it_is(said):
    def gate(width: int) -> TokenGate:
        return TokenGate(
            basis_CC=torch.eye(width),
            scale_C=torch.ones(width),
            weight_CC=torch.eye(width),
            bias_C=torch.zeros(width),
            threshold=0.1,
            granularity=1,
        )

    assert not native.encodes(torch.float16, CPU)
    assert native.encodes(torch.bfloat16, CPU)
    assert native.encodes(torch.float32, CPU)
    for _ in range(2):  # layers
        assert native.encoder_of(gate(32), gate(32), torch.float32) is not None
    assert native.encoder_of(gate(33), gate(33), torch.float32) is None
    assert native.encoder_of(None, None, torch.float32) is None
    assert said() == [
        "encode: eager (float16 on cpu), because compiled code writes fp32 and bf16",
        "encode: native (float32 on cpu)",
        "encode: eager (float32 on cpu), because compiled code encodes widths that fill vector registers",
        "encode: eager (float32 on cpu), because compiled code encodes by a gate's weights",
    ]


@needs_compiler
def test_who_begins_to_listen_late_is_told(said, caplog):
    caplog.set_level(logging.WARNING, logger="lowrank_kv")
    attend_ragged(torch.float32)
    assert said() == []
    caplog.set_level(logging.INFO, logger="lowrank_kv")
    attend_ragged(torch.float32)
    assert said() == ["ragged_attention: native (float32 on cpu)"]
