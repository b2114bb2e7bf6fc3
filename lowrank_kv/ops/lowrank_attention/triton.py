"""Decode attention over low-rank and full-rank tokens on a GPU in Triton: where each KV head has coefficients of its own
taken after rotation, or all of them joint ones taken before it.

Shapes: as in :mod:`lowrank_kv.ops.lowrank_attention.eager`.
"""

from typing import Any

import torch
from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens, Operands
from lowrank_kv.ops.rotation import Positions, RotaryTable, Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.availability import SWITCH, has_kernels, launching_on
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Numbers of all queries of a KV head: each has a sum in a program's registers.
_MAX_QUERY_NUMBERS = 64 * 256
_NO_KERNELS = f"there are no kernels for the device (an NVIDIA GPU before Ampere, no Triton, or {SWITCH}=0)"


def unsupported_reason(query_HQD: Tensor, tokens: LowRankTokens) -> str | None:
    """Why :func:`lowrank_attention` cannot attend over these tokens; None where it can.

    Keys and values must be compressed head by head and keys after rotation, or both jointly and keys before a rotation of
    pairs. All heads must hold the same tokens, integers of a row share one scale, and the rows of queries that share a KV
    head must be few enough for a program's registers.
    """
    if not has_kernels(query_HQD.device):  # first: on a CPU this is all that is checked for every token of every layer
        return _NO_KERNELS
    keys, values, rotation, _, _ = tokens
    groups, dtype = keys.full.buffer.shape[0], query_HQD.dtype
    quantization = keys.coef.quantization
    if not (_is_per_head(keys, values, rotation) or _is_joint(keys, values, rotation)):
        return "kernels take heads compressed apart after rotation, or jointly before a rotation of pairs"
    if min(keys.coef.length, keys.coef.rank, values.coef.rank) == 0:
        return "there are no low-rank tokens"
    if tokens.parts_differ:
        return "each part holds tokens of its own"
    if isinstance(quantization, (BitPlan, TokenPlans)) and not _is_joint(keys, values, rotation):
        return "kernels take plans of bits of joint coefficients"
    if isinstance(quantization, IntegerQuantization) and quantization.group_size is not None:
        return "kernels take integers of which all of a row share one scale"
    if dtype not in _DTYPES:
        return "kernels compute in fp32, fp16 and bf16"
    if any(not dtype == each.coef.dtype == each.basis_PWR.dtype == each.full.buffer.dtype for each in (keys, values)):
        return "kernels take queries, coefficients and bases of one dtype"
    if query_HQD.numel() // groups > _MAX_QUERY_NUMBERS:
        return "there are more queries than a kernel's registers hold"
    return None


def lowrank_attention(query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
    """See :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention`."""
    keys, values, rotation, positions, mask_QT = tokens
    # Only here: without a GPU there need be no Triton.
    from lowrank_kv.ops.lowrank_attention.joint.triton import joint_attention
    from lowrank_kv.ops.lowrank_attention.per_head.triton import latent_attention
    from lowrank_kv.ops.triton.launch import rows_together

    device, low, full = query_HQD.device, keys.coef.length, keys.full_GFD.shape[1]
    mask_1QT = None if mask_QT is None else rows_together(mask_QT)[None]
    full_tokens = None
    if full:
        full_mask = None if mask_1QT is None else mask_1QT[:, :, low:]
        # With their room to grow: kernels are tuned by it, and it changes less often than what it holds.
        full_tokens = FullRankTokens(keys.full.buffer[None], values.full.buffer[None], _length(full, device), full_mask)
    operation, options = latent_attention, {}
    if not _is_per_head(keys, values, rotation):
        operation = joint_attention
        options = _rotation_options(rotation.table, positions)
    with launching_on(device):
        return operation(
            query_HQD[None],
            _latent_rows(keys),
            _latent_rows(values),
            _length(low, device),
            scoring,
            mask_BQN=None if mask_1QT is None else mask_1QT[:, :, :low],
            full=full_tokens,
            **options,
        )[0]


def _is_per_head(keys: Operands, values: Operands, rotation: Rotation | None) -> bool:
    return rotation is None and keys.basis_PWR.shape[0] == values.basis_PWR.shape[0] == keys.full_GFD.shape[0]


def _is_joint(keys: Operands, values: Operands, rotation: Rotation | None) -> bool:
    """Keys that nothing rotates are not rebuilt: plain products on their coefficients do less."""
    rotates_pairs = rotation is not None and rotation.table is not None
    halves_heads = keys.full_GFD.shape[2] % 2 == 0
    return rotates_pairs and halves_heads and keys.basis_PWR.shape[0] == values.basis_PWR.shape[0] == 1


def _rotation_options(table: RotaryTable, positions: Positions) -> dict[str, Any]:
    """The kernels' arguments for keys at some positions."""
    if isinstance(positions, slice):
        return {"rotation": RotaryTable(table.cos_BTF[:, positions], table.sin_BTF[:, positions])}
    return {"rotation": table, "position_BN": positions.to(torch.int32)[None]}


def _latent_rows(operands: Operands) -> LatentRows:
    """One sequence's as a batch of one, its room to grow included."""
    row_GNY, scale_GN2 = operands.coef.buffers()
    if isinstance(operands.coef, TokenwiseCoefficients):
        classes, marks = operands.coef.classes.buffer[None], operands.coef.marks.buffer[None]
        row_11Y1 = row_GNY[None, None, :, None]
        return LatentRows(row_11Y1, operands.basis_PWR[None], None, operands.coef.quantization, classes, marks)
    scale_BGN2 = None if scale_GN2 is None else scale_GN2[None]
    return LatentRows(row_GNY[None], operands.basis_PWR[None], scale_BGN2, operands.coef.quantization)


def _length(count: int, device: torch.device) -> Tensor:
    # Filled by the device, for which the host need not wait as it would for a copy.
    return torch.full((1,), count, dtype=torch.int32, device=device)
