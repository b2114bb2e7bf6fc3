"""The layers whose keys and values are coded together.

Shapes: P parts, N tokens, R rank.
"""

import collections
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lowrank_kv.hf.cache.windowed.retention import CompressionStep
from lowrank_kv.hf.cache.windowed.sequence import WindowedSequence
from lowrank_kv.ops.rotation import Rotate


class Member(Protocol):
    """A layer of a group."""

    sequences: list[WindowedSequence]


class RowGroup:
    """Layers that follow one another and share their sequences' rows
    (:class:`lowrank_kv.hf.cache.windowed.rows.JointRows`).

    The last one holds the rows. It compresses for all: when it is called, all of them have the states of a call's tokens,
    and the others have attended to them. A layer by itself is a group, too.

    Args:
        layers: in the model's order.
    """

    def __init__(self, layers: Sequence[Member]):
        self.layers = tuple(layers)

    def compresses_in(self, layer: Member) -> bool:
        """Whether the group's tokens are compressed when this layer is called."""
        return layer is self.layers[-1]

    def find_rows(self, layer: Member) -> None:
        """Tell a layer's sequences where their rows are. What copies or moves sequences does so layer by layer, so that they
        are told again whenever the layer is about to read. In a text's first call the last layer has no sequences yet."""
        for sequence, last in zip(layer.sequences, self.layers[-1].sequences, strict=False):
            sequence.rows.read(last.key)

    def compress(self, b: int, step: CompressionStep, unrotates: Sequence[Rotate | None]) -> None:
        """Let the tokens of sequence `b` that are due become rows, in all layers. Where this is cut short, all of them wait
        as before.

        Args:
            unrotates: of each layer, see :class:`lowrank_kv.hf.cache.windowed.sequence.CompressionContext`.
        """
        sequences = [layer.sequences[b] for layer in self.layers]
        holder = sequences[-1].rows.key
        length = holder.coef.length
        try:
            if not step.keeps_all:
                # Bases are fp32, whatever the model computes in.
                with torch.autocast(holder.device.type, enabled=False):
                    row_PNR = sum(
                        sequence.rows.coefficients(*sequence.states_due(step, unrotate))
                        for sequence, unrotate in zip(sequences, unrotates, strict=True)
                    )
                    holder.look_at(row_PNR)
                    holder.append(row_PNR)
            for sequence in sequences:
                sequence.rows.read(holder)
            changes = [change for sequence in sequences for change in sequence.changes_by(step)]
        except BaseException:  # an interrupt, too
            holder.crop(length)
            raise
        _make(changes)


def _make(changes: Sequence[tuple[object, dict[str, Any]]]) -> None:
    """Set attributes of several objects, all of them or none: Python looks for interrupts between steps of its own, and this
    is one."""
    attributes, new = [vars(each) for each, _ in changes], [new for _, new in changes]
    collections.deque(map(dict.update, attributes, new), maxlen=0)
