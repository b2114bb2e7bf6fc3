"""What the decode-attention benchmark runs: one step over caches of random tokens, uncompressed and compressed.

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, T tokens, R rank, F = D/2.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, lowrank_attention
from lowrank_kv.ops.lowrank_attention.joint.reference import joint_attention as joint_reference
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.lowrank_attention.per_head.reference import latent_attention as latent_reference
from lowrank_kv.ops.paged_attention.reference import paged_attention as paged_reference
from lowrank_kv.ops.ragged_attention import RaggedTokens, ragged_attention
from lowrank_kv.ops.ragged_attention.reference import ragged_attention as ragged_reference
from lowrank_kv.ops.rotation import Positions, RotaryTable, Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.page_pool import PagePool
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.ragged import RaggedStore


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention layer's cache."""

    batch: int
    heads: int
    groups: int
    head_dim: int
    context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def has_kernels(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rank_step(self) -> int:
        """Rows of multiples of so many coefficients fill vector registers, or are read by kernels in wide loads."""
        return 16 if self.has_kernels else 8

    @property
    def width(self) -> int:
        return self.groups * self.head_dim

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, dtype=self.dtype, device=self.device) * scale

    def query(self) -> Tensor:
        return self.random(self.batch, self.heads, 1, self.head_dim)

    def states(self) -> Tensor:
        return self.random(self.batch, self.groups, self.context, self.head_dim)

    @property
    def full_bytes(self) -> int:
        return 2 * self.batch * self.context * self.width * self.dtype.itemsize

    def flops(self, key: float, value: float) -> float:
        """Of scores over `key` and sums over `value` numbers a token and query head."""
        return 2.0 * self.batch * self.context * self.heads * (key + value)


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step over one cache.

    Attributes:
        attend: the step, (B, H, 1, D).
        reference: the same in fp64.
        nbytes: what a step must read.
        flops: what it must compute.
    """

    attend: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    nbytes: int
    flops: float


def preallocated(shape: Shape) -> Step:
    return _uncompressed(shape, lambda states: states)


def flash(shape: Shape) -> Step:
    """The same by flash attention, whatever torch would choose."""
    step = preallocated(shape)

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return step.attend()

    return dataclasses.replace(step, attend=attend)


def concatenated(shape: Shape) -> Step:
    """As a dynamic cache does it: the newest token is joined to all before it, into a new tensor."""
    return _uncompressed(shape, lambda states: torch.cat([states[:, :, :-1], states[:, :, -1:]], dim=2))


def _uncompressed(shape: Shape, held: Callable[[Tensor], Tensor]) -> Step:
    query, key, value = shape.query(), shape.states(), shape.states()

    def attend() -> Tensor:
        # Heads that share keys as queries of one head, as transformers decodes: `enable_gqa` may copy keys for each.
        query_BGJD = query.view(shape.batch, shape.groups, -1, shape.head_dim)
        output_BGJD = F.scaled_dot_product_attention(query_BGJD, held(key), held(value), scale=shape.scaling)
        return output_BGJD.view(query.shape)

    def reference() -> Tensor:
        states = (tensor.double() for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*states, scale=shape.scaling, enable_gqa=True)

    width = shape.head_dim
    return Step(attend, reference, shape.full_bytes, shape.flops(width, width))


def one_rank(shape: Shape, key_rate: float, value_rate: float, *, is_joint: bool) -> Step:
    """OjaKV's layouts, all tokens at one rank: coefficients of each KV head after rotation, or joint ones before it."""
    query, (table, rotation) = shape.query(), _rotation(shape)
    parts, width = (1, shape.width) if is_joint else (shape.groups, shape.head_dim)
    step = shape.rank_step
    ranks = [max(step, round(rate * width / step) * step) for rate in (key_rate, value_rate)]
    coefs = [shape.random(shape.batch, parts, shape.context, rank) for rank in ranks]
    bases = [shape.random(shape.batch, parts, rank, width, scale=rank**-0.5).mT for rank in ranks]
    length = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=shape.device)
    rows = [LatentRows(coef, basis) for coef, basis in zip(coefs, bases, strict=True)]
    options = {"scoring": Scoring(shape.scaling)} | ({"rotation": table} if is_joint else {})

    def reference() -> Tensor:
        return (joint_reference if is_joint else latent_reference)(query.double(), *rows, length, **options)

    if shape.has_kernels:
        from lowrank_kv.ops.lowrank_attention.joint.triton import joint_attention
        from lowrank_kv.ops.lowrank_attention.per_head.triton import latent_attention

        def attend() -> Tensor:
            return (joint_attention if is_joint else latent_attention)(query, *rows, length, **options)
    else:
        nothing = GrowingTensor(shape.random(shape.groups, 0, shape.head_dim), dim=1)
        sides = [
            [
                Operands(Coefficients.from_rows(coef[b]), basis[b], nothing)
                for coef, basis in zip(coefs, bases, strict=True)
            ]
            for b in range(shape.batch)
        ]
        rotated = (rotation, slice(0, shape.context)) if is_joint else ()

        def attend() -> Tensor:
            steps = [
                lowrank_attention(query[b], LowRankTokens(*sides[b], *rotated), Scoring(shape.scaling))
                for b in range(shape.batch)
            ]
            return torch.stack(steps)

    flops = shape.flops(*ranks)
    if is_joint:
        flops = _joint_flops(shape, *(shape.batch * shape.context * rank for rank in ranks))
    return Step(attend, reference, sum(coef.nbytes for coef in coefs), flops)


def ragged(shape: Shape, key_rate: float, value_rate: float, granule: int, tokens: int) -> Step:
    """DynaKV's layout: joint coefficients taken before rotation, every token its own rank, a granule around the mean; on a
    GPU in pages of so many tokens."""
    query, (table, rotation) = shape.query(), _rotation(shape)
    decoders = Decoders(*[shape.random(shape.width, shape.width, scale=shape.width**-0.5) for _ in range(2)])
    coefs = [shape.random(shape.batch, shape.context, shape.width) for _ in range(2)]
    ranks = [_ranks(shape, rate, granule) for rate in (key_rate, value_rate)]
    options = {"scoring": Scoring(shape.scaling)}
    if shape.has_kernels:
        from lowrank_kv.ops.paged_attention.triton import paged_attention

        granules = shape.width // granule
        # Each rank's last tile may be all but empty.
        pages = sum(int(rank.sum()) // (granule * tokens) for rank in ranks) + shape.batch * granules * (granules + 1)
        pool = PagePool(pages, tokens=tokens, granule=granule, dtype=shape.dtype, device=shape.device)
        stores = [PagedStore(shape.batch, shape.width, capacity=shape.context, pool=pool) for _ in range(2)]
        for store, coef, rank in zip(stores, coefs, ranks, strict=True):
            store.append(coef, rank)
        options["rotation"] = table

        def attend() -> Tensor:
            return paged_attention(query, *stores, decoders, **options)

        def reference() -> Tensor:
            return paged_reference(query.double(), *stores, decoders, **options)
    else:
        sequences = []
        for b in range(shape.batch):
            pair = [RaggedStore(shape.width, dtype=shape.dtype, device=shape.device) for _ in range(2)]
            for store, coef, rank in zip(pair, coefs, ranks, strict=True):
                store.append(coef[b], rank[b], is_prompt=True)
            sequences.append(RaggedTokens(*pair, rotation))

        def attend() -> Tensor:
            return ragged_attention(query, sequences, decoders, **options).transpose(1, 2)

        def reference() -> Tensor:
            return ragged_reference(query.double(), sequences, decoders, **options).transpose(1, 2)

    numbers = [int(rank.sum()) for rank in ranks]
    positions = 2 * shape.batch * shape.context * 4
    return Step(attend, reference, sum(numbers) * shape.dtype.itemsize + positions, _joint_flops(shape, *numbers))


def _rotation(shape: Shape) -> tuple[RotaryTable, Rotation]:
    """A rotation of all positions, for kernels and for other operations."""
    position_T = torch.arange(shape.context, device=shape.device)
    frequency_F = 10000.0 ** -torch.linspace(0, 1, shape.head_dim // 2, device=shape.device)
    angle_TF = torch.polar(torch.ones(()).to(shape.device), position_T[:, None] * frequency_F)
    table = RotaryTable.from_complex(angle_TF[None])

    def rotate(key_GND: Tensor, positions: Positions) -> Tensor:
        return table.rotate(key_GND[None], position_T[positions][None])[0]

    return table, Rotation(rotate, table)


def _joint_flops(shape: Shape, key_numbers: int, value_numbers: int) -> float:
    # Rebuilding a key takes 2·C for each of its coefficients; a value's are summed for every query head.
    return 2.0 * shape.width * key_numbers + shape.flops(shape.head_dim, 0) + 2.0 * shape.heads * value_numbers


def _ranks(shape: Shape, rate: float, granule: int) -> Tensor:
    """Whole granules, at least one, spread by up to one around the mean, (B, T) int64."""
    mean = rate * shape.width / granule
    spread = torch.rand(shape.batch, shape.context, device=shape.device) * 2 - 1
    # With the mean's fraction taken by chance, rounding keeps the mean.
    level = math.floor(mean) + (torch.rand_like(spread) < mean % 1) + spread.round()
    return level.clamp(1, shape.width // granule).long() * granule
