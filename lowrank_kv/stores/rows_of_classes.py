"""Where rows of several sizes are written: their bytes one after another, and what tells where each begins.

Shapes: N rows, M bytes of classes, Y bytes of all rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CLASSES_PER_BYTE = 4  # a class has two bits
ROWS_BETWEEN_MARKS = 32  # from one whose first byte is noted to the next


class RowsOfClasses(NamedTuple):
    """Buffers with room for the next rows, behind those that are there.

    Attributes:
        stored: bytes of all rows, uint8.
        classes: of four rows to a byte, the first in its low bits, uint8.
        marks: the first byte of every 32nd row, int32.
        num_rows, num_bytes: that are there.
    """

    stored: Tensor
    classes: Tensor
    marks: Tensor
    num_rows: int
    num_bytes: int

    def put(self, byte_Y: Tensor, class_N: Tensor, start_N: Tensor) -> None:
        """Write rows of these classes, which begin at `start_N` of `byte_Y`."""
        self.stored[self.num_bytes : self.num_bytes + len(byte_Y)] = byte_Y
        first = -self.num_rows % ROWS_BETWEEN_MARKS
        mark_M = start_N[first::ROWS_BETWEEN_MARKS] + self.num_bytes
        place = -(-self.num_rows // ROWS_BETWEEN_MARKS)
        self.marks[place : place + len(mark_M)] = mark_M
        # The last byte of classes may have room, and is written again with those that it has.
        full = self.num_rows // CLASSES_PER_BYTE
        begun_M = unpacked_classes(self.classes[full : full + 1], self.num_rows - full * CLASSES_PER_BYTE)
        packed_M = packed_classes(torch.cat([begun_M, class_N]))
        self.classes[full : full + len(packed_M)] = packed_M


def packed_classes(class_N: Tensor) -> Tensor:
    """Classes four to a byte, the last ones filled up with zeros, (M,) uint8."""
    full_N = torch.nn.functional.pad(class_N, (0, -len(class_N) % CLASSES_PER_BYTE)).view(-1, CLASSES_PER_BYTE)
    shift_4 = 2 * torch.arange(CLASSES_PER_BYTE, device=class_N.device)
    return (full_N << shift_4).sum(dim=1).to(torch.uint8)


def set_class(byte_M: Tensor, row: int, row_class: int) -> None:
    """Write the class of one row among those of others."""
    place, shift = row // CLASSES_PER_BYTE, 2 * (row % CLASSES_PER_BYTE)
    byte_M[place] = int(byte_M[place]) & ~(3 << shift) & 255 | row_class << shift


def unpacked_classes(byte_M: Tensor, count: int) -> Tensor:
    """The first `count` classes, int64."""
    shift_4 = 2 * torch.arange(CLASSES_PER_BYTE, device=byte_M.device)
    return ((byte_M.long()[:, None] >> shift_4) & 3).flatten()[:count]
