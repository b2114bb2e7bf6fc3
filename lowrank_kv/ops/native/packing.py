"""Calling compiled code that packs rows by plans of bits, and tells their classes.

Shapes: N rows, C coefficients of the basis, R that are written, Y bytes of all rows.
"""

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, CStruct, contiguous_fp32, library
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.rows_of_classes import RowsOfClasses
from lowrank_kv.stores.token_plans import TokenPlans

# The members of `struct coder` and `struct importance` in pack.h, in their order, and of `struct rows_of_classes` in
# pack_rows.c.
_CODER, _IMPORTANCE, _ROWS = struct.Struct("6q"), struct.Struct("7q"), struct.Struct("5q")

_NO_MEMORY = "no memory for the scratch space of packing"


class PackedCoder(CStruct):
    """How rows are packed by a plan, as compiled code reads it."""

    def __init__(self, plan: BitPlan):
        runs = plan.runs(plan.num_coefficients)
        width_N = torch.tensor([width for width, _ in runs], dtype=torch.int32, device=CPU)
        end_N = torch.tensor([places.stop for _, places in runs], dtype=torch.int32, device=CPU)
        thresholds = {width: contiguous_fp32(level_L) for width, level_L in plan.thresholds.items()}
        address_N = torch.tensor(
            [thresholds[width].data_ptr() if width in thresholds else 0 for width, _ in runs],
            dtype=torch.int64,
            device=CPU,
        )
        rank = plan.num_coefficients
        memory = _CODER.pack(
            rank, plan.row_bytes(rank), len(runs), *(each.data_ptr() for each in (width_N, end_N, address_N))
        )
        super().__init__(memory, keepalive=(width_N, end_N, thresholds, address_N))


class PackedGate(CStruct):
    """What tells a token's class, as compiled code reads it.

    Raises:
        UserError: see :meth:`ImportanceGate.check`.
    """

    def __init__(self, gate: ImportanceGate, bounds_K: Tensor):
        gate.check()
        held = [contiguous_fp32(each) for each in (gate.linear_C, gate.square_C, gate.rest_3, bounds_K)]
        members = *(each.data_ptr() for each in held), len(gate.linear_C), gate.leading, len(bounds_K) + 1
        super().__init__(_IMPORTANCE.pack(*members), keepalive=held)


class _Coders:
    """How rows are packed by one plan, or by one for each class.

    Attributes:
        addresses: of the plans' coders.
    """

    def __init__(self, plans: Sequence[BitPlan]):
        self._keepalive = [PackedCoder(plan) for plan in plans]
        self.addresses = (ctypes.c_int64 * len(plans))(*(coder.address for coder in self._keepalive))


class CompiledPlan:
    """Writes what :class:`BitPlan` writes, in compiled code."""

    def __init__(self, plan: BitPlan):
        self._plan, self._coders = plan, _Coders([plan])

    def __reduce__(self) -> tuple[Any, ...]:
        return _writer_of, (self._plan,)  # a copy has addresses of its own

    def encode(self, rows_NR: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`BitPlan.encode`; rows (…, N, R) of all coefficients."""
        *lead, rank = rows_NR.shape
        count, size = math.prod(lead), self._plan.row_bytes(rank)
        row_NR, start_N = contiguous_fp32(rows_NR.reshape(count, rank)), torch.arange(count, device=CPU) * size
        byte_Y = torch.empty(count * size, dtype=torch.uint8, device=CPU)
        failed = library().pack_rows(
            self._coders.addresses,
            row_NR.data_ptr(),
            rank,
            count,
            0,  # all are of one class
            start_N.data_ptr(),
            torch.get_num_threads(),
            byte_Y.data_ptr(),
        )
        if failed:
            raise MemoryError(_NO_MEMORY)
        return byte_Y.view(*lead, size), rows_NR.new_empty(*lead, 0)


class CompiledTokenPlans:
    """Tells classes and writes rows as :class:`TokenPlans` does, in compiled code."""

    def __init__(self, plans: TokenPlans):
        self._plans, self._gate = plans, PackedGate(plans.gate, plans.bounds_K)
        self._coders = _Coders(plans.plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return _writer_of, (self._plans,)

    def classes(self, coef_NC: Tensor) -> Tensor:
        """See :meth:`TokenPlans.classes`."""
        coef_NC = contiguous_fp32(coef_NC)
        class_N = torch.empty(len(coef_NC), dtype=torch.int64, device=CPU)
        library().classify_rows(
            self._gate.address, coef_NC.data_ptr(), *coef_NC.shape[::-1], torch.get_num_threads(), class_N.data_ptr()
        )
        return class_N

    def nbytes_of(self, class_N: Tensor) -> int:
        """See :meth:`TokenPlans.nbytes_of`."""
        return library().bytes_of_rows(self._coders.addresses, class_N.data_ptr(), len(class_N))

    def write(self, row_NR: Tensor, class_N: Tensor, into: RowsOfClasses) -> None:
        """See :meth:`TokenPlans.write`."""
        row_NR = contiguous_fp32(row_NR)
        stored, classes, marks, *counts = into
        failed = library().append_rows(
            self._coders.addresses,
            row_NR.data_ptr(),
            *row_NR.shape[::-1],
            class_N.data_ptr(),
            torch.get_num_threads(),
            _ROWS.pack(stored.data_ptr(), classes.data_ptr(), marks.data_ptr(), *counts),
        )
        if failed:
            raise MemoryError(_NO_MEMORY)


def compiled_writer(plans: Any, device: torch.device) -> CompiledPlan | CompiledTokenPlans | None:
    """Compiled code that writes rows in place of plans of bits; None where there is none for them."""
    if not isinstance(plans, (BitPlan, TokenPlans)) or device.type != "cpu" or library() is None:
        return None
    return CompiledPlan(plans) if isinstance(plans, BitPlan) else CompiledTokenPlans(plans)


def _writer_of(plans: BitPlan | TokenPlans) -> CompiledPlan | CompiledTokenPlans | BitPlan | TokenPlans:
    """The writer of plans for rows on the CPU: compiled code, or where there is none, the plans."""
    return compiled_writer(plans, CPU) or plans
