"""The layers whose keys and values are coded together.

Shapes: P parts, N tokens, R rank.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from lowrank_kv.hf.cache.windowed.changes import make_changes
from lowrank_kv.hf.cache.windowed.retention import CompressionStep
from lowrank_kv.hf.cache.windowed.sequence import WindowedSequence
from lowrank_kv.ops.rotation import Rotate
from lowrank_kv.utils.errors import UserError


class Member(Protocol):
    """A layer of a group; it has a device once it has sequences."""

    index: int
    device: torch.device
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

    def check_device(self, layer: Member) -> None:
        """To be asked when a layer starts, which those before it have done.

        Raises:
            UserError: it is on another device than the first, so that one of them could not read the rows of both.
        """
        first = self.layers[0]
        if layer.device != first.device:
            raise UserError(
                f"layers {first.index} and {layer.index} are coded together (`joint_layers`), and they are on "
                f"{first.device} and {layer.device}; load the model on one device, with a `device_map` that keeps such "
                f"layers together, or take one that codes layers by themselves, such as the preset `adaptive-mixed`"
            )

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
            # Bases are fp32, whatever the model computes in.
            with torch.autocast(holder.device.type, enabled=False):
                row_PNR = sum(
                    sequence.rows.coefficients(*sequence.states_due(step, unrotate))
                    for sequence, unrotate in zip(sequences, unrotates, strict=True)
                )
                holder.look_at(row_PNR)
                if not step.keeps_all:
                    holder.append(row_PNR)
            for sequence in sequences:
                sequence.rows.read(holder)
            changes = [change for sequence in sequences for change in sequence.changes_by(step, step.keeps_all)]
        except BaseException:  # an interrupt, too
            holder.crop(length)
            raise
        make_changes(changes)
