"""Bytes of a compressed cache, by kind."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from lowrank_kv.utils.peak_memory import peak_memory

COEFFICIENTS = "coefficients"
SCALES = "scales"  # of quantized coefficients
POSITIONS = "positions"  # of tokens, and their rotations
FULL_RANK = "full-rank tokens"  # that are never compressed
BUFFERS = "buffers"  # tokens that wait to be compressed, and the room for them
BASES = "bases"  # of each sequence, and the state of their trackers
KINDS = (COEFFICIENTS, SCALES, POSITIONS, FULL_RANK, BUFFERS, BASES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of the tensors a cache holds between steps, room to grow included.

    Attributes:
        kinds: kind → bytes; every kind of :data:`KINDS` is there.
        full: bytes of an uncompressed cache of the same tokens, in the same layers and the model's dtype.
        shared: bytes that all caches of one configuration hold together, once: bases, or a compressor's weights, and what
            attention has made of them. They are in no other number; equal reports may differ in it.
        process_peak: the most bytes that the process has held so far, its model included (resident, or of CUDA's
            allocator, of all GPUs with parts of the cache); equal reports may differ in it.
    """

    kinds: dict[str, int]
    full: int
    shared: int = dataclasses.field(compare=False)
    process_peak: int = dataclasses.field(compare=False)

    @classmethod
    def from_tensors(cls, tensors_by_kind: Iterable[tuple[str, Tensor]], full: int, shared: int = 0) -> "MemoryReport":
        """The bytes of (kind, tensor) pairs; `full` and `shared` as above."""
        kinds, devices = dict.fromkeys(KINDS, 0), set()
        for kind, tensor in tensors_by_kind:
            kinds[kind] += tensor.nbytes
            devices.add(tensor.device)
        # Some of a cache on a GPU may be on the CPU.
        asked = {device for device in devices if device.type == "cuda"} or {torch.device("cpu")}
        return cls(kinds=kinds, full=full, shared=shared, process_peak=sum(map(peak_memory, asked)))

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def rate(self) -> float:
        """``total / full``; 1.0 for an empty cache."""
        return self.total / self.full if self.full else 1.0

    def __str__(self) -> str:
        rows = {
            **self.kinds,
            "total": self.total,
            "uncompressed": self.full,
            "shared by caches": self.shared,
            "process, at peak": self.process_peak,
        }
        lines = [f"{kind:>18} {size:>14,}" for kind, size in rows.items()]
        return "\n".join([f"{'':>18} {'bytes':>14}", *lines])
