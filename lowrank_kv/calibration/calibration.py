"""Calibration: the second moments that every basis of every layout and rank is computed from.

Shapes: C = G·D joint width.
"""

import dataclasses
import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, SIDES, VALUE, calibrate
from lowrank_kv.calibration.calibration_files import (
    CONFIG,
    MOMENTS,
    RECORD,
    read_config,
    read_tensors,
    write_calibration,
)
from lowrank_kv.calibration.checked_tensor import checked_tensor
from lowrank_kv.calibration.gradient_moments import gradient_moments
from lowrank_kv.calibration.known_text import KnownText
from lowrank_kv.calibration.read_moments import read_moments
from lowrank_kv.calibration.read_states import ReadStates, read_from, read_states_of, tensors_of
from lowrank_kv.calibration.spectrum import DAMPING
from lowrank_kv.calibration.weight_marks import same_weights, weight_marks
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import KVGeometry, geometry_of, layer_groups, warn_of_another
from lowrank_kv.hf.rope import POSITION_BYTES, RopeHistory
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError, nearest
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.values import check_type, unboxed, whole_number

# Moments that a calibration may have or not.
GRADIENTS = {KEY: "key_gradient", VALUE: "value_gradient"}
# How many layers a calibration can code together, unless it is told: as many as the preset `joint-mixed` does.
JOINT_LAYERS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Second moments of a model's states over calibration text.

    Attributes:
        geometry: the model's shape.
        moments: layer index → side (``key``, ``rotated_key``, ``value``, ``query`` and, where gradients were taken,
            ``key_gradient``, ``value_gradient``) → mean second moment (C, C), fp32.
        read: layer index → ``key``, ``value`` → what is read of it compressed, and of the last of layers that are coded
            together ``key_value``, what is read of all of them; None where that was not taken.
        joint_layers: how many layers are coded together; 0 where `read` says nothing of that.
        exact_tokens: those that a cache keeps at full rank beside what `read` says; None where there is no `read`, and of
            older calibrations.
        by_energy: energy stands in `read` for the loss's gradients.
        origin: where it came from, for errors.
        model: name of the model it was made on, if known.
        weights: marks of that model's weights (:func:`lowrank_kv.calibration.weight_marks.weight_marks`); older calibrations
            have none.
        tokens: how many tokens were read, if known.
        tokens_sha256: of their ids, if known.
        record: what a saved calibration says of the text that was read
            (:data:`lowrank_kv.calibration.calibration_files.RECORD`); older ones say less.
        rotation_bytes: what a cache of the model keeps of each token's rotation; the model says it, no file does.
    """

    geometry: KVGeometry
    moments: dict[int, dict[str, Tensor]]
    read: dict[int, dict[str, ReadStates]] | None = None
    joint_layers: int = 0
    exact_tokens: ExactTokens | None = None
    by_energy: bool = False
    origin: str = "the calibration"
    model: str | None = None
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    tokens: int | None = None
    tokens_sha256: str | None = None
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    rotation_bytes: int = POSITION_BYTES

    @classmethod
    def from_text(
        cls,
        model: PreTrainedModel,
        blocks_NT: Tensor,
        *,
        gradients: bool = False,
        read_gradients: bool = False,
        read_energy: bool = False,
        joint_layers: int = JOINT_LAYERS,
        progress: bool = True,
        self_check: bool = True,
    ) -> "Calibration":
        """Run the uncompressed `model` over blocks of token ids.

        Args:
            gradients: also take the loss's gradients, from which training can start; costs a backward pass.
            read_gradients: also take what is read of a compressed cache, from which plans of bits and
                bases for `weigh_by: loss` are made; costs another.
            read_energy: the same of a model whose backward pass does not fit: energy stands for the gradients.
            joint_layers: with one of these two: for how many layers whose keys and values are coded together; 0 for none.
            self_check: first compare the model with a full-rank compressed cache to the model by itself, once for each
                model; see :func:`lowrank_kv.hf.self_check.check_by_itself`.

        Raises:
            UserError: `blocks_NT` are no token ids, the model is refused, or what is read is to be weighed in two ways.

        See :func:`lowrank_kv.calibration.activation_moments.calibrate`,
        :func:`lowrank_kv.calibration.gradient_moments.gradient_moments` and
        :func:`lowrank_kv.calibration.read_moments.read_moments`.
        """
        _check_blocks(blocks_NT)
        joint_layers = whole_number("joint_layers", joint_layers)
        require(joint_layers >= 0, "joint_layers", joint_layers, "zero or positive")
        check_read(read_gradients, read_energy)
        if self_check:
            check_by_itself(model)
        # First, so that a model without gradients is refused before the other pass.
        taken = gradient_moments(model, blocks_NT, progress=progress) if gradients else {}
        is_read = read_gradients or read_energy
        read_states, exact_tokens = None, ExactTokens() if is_read else None
        if is_read:
            settings = {"exact_tokens": exact_tokens, "joint_layers": joint_layers, "progress": progress}
            read_states = read_states_of(read_moments(model, blocks_NT, by_energy=read_energy, **settings))
        found = calibrate(model, blocks_NT, sides=SIDES, progress=progress)
        for index, sides in taken.items():
            found[index] |= {GRADIENTS[side]: moment for side, moment in sides.items()}
        # On the CPU, wherever the model is: bases and ranks are worked out over all layers.
        moments = {i: {side: m.mean().float().cpu() for side, m in sides.items()} for i, sides in found.items()}
        return cls(
            geometry=geometry_of(model),
            moments=moments,
            read=read_states,
            joint_layers=joint_layers if is_read else 0,
            exact_tokens=exact_tokens,
            by_energy=read_energy,
            weights=weight_marks(model),
            tokens=blocks_NT.numel(),
            tokens_sha256=hashlib.sha256(blocks_NT.cpu().numpy().tobytes()).hexdigest(),
            rotation_bytes=RopeHistory.token_nbytes(model),
        )

    @classmethod
    def given(cls, bases: "str | Path | Calibration") -> "Calibration":
        """The calibration that an argument `bases` is, or is the directory of.

        Raises:
            UserError: it is neither, or the directory holds none.
        """
        what = "a calibration, or the directory to which `lowrank-kv calibrate` wrote one"
        check_type("bases", bases, str | os.PathLike | Calibration, what)
        return bases if isinstance(bases, Calibration) else cls.load(bases)

    @classmethod
    def of_reads(
        cls,
        model: PreTrainedModel,
        blocks_NT: Tensor,
        *,
        exact_tokens: ExactTokens,
        joint_layers: int = 0,
        progress: bool = True,
    ) -> "Calibration":
        """Only what is read of a compressed cache that keeps `exact_tokens` at full rank; see :func:`read_moments`."""
        found = read_moments(model, blocks_NT, exact_tokens=exact_tokens, joint_layers=joint_layers, progress=progress)
        return cls(
            geometry=geometry_of(model),
            moments={},
            read=read_states_of(found),
            tokens=blocks_NT.numel(),
            joint_layers=joint_layers,
            exact_tokens=exact_tokens,
        )

    @property
    def known_text(self) -> KnownText:
        """The text it read, as far as it says."""
        return KnownText(reader=self.origin, record=self.record, make="calibrate", share_option="--heldout_share")

    def save(self, directory: str | Path, *, model: str, text: list[str], **record: Any) -> str:
        """Write the directory atomically and return the hash; an earlier calibration there is replaced.

        Args:
            directory: to write.
            model: the model's name, for the record.
            text: the names of the texts, for the record.
            record: what else says what was read (:meth:`lowrank_kv.utils.text_data.CalibrationText.record`).

        Raises:
            UserError: `directory` holds something else, or a calibration that is loaded has no such record; nothing is
                written.
        """
        for key in record:
            if key not in RECORD:
                raise UserError(f"`{key}` is nothing that a calibration records; {nearest(key, list(RECORD))}")
        directory, record = path_of(directory, "directory"), {key: unboxed(value) for key, value in record.items()}
        check_type("model", model, str, "a name")
        for key, kind in RECORD.items():
            value = {"text": text, **record}.get(key)
            require(isinstance(value, kind), key, value, f"of type {kind}")
        if not self.moments:
            raise UserError(
                f"{self.origin} has only what is read of a compressed cache, and cannot be saved; make one by `from_text`"
            )
        flat = {
            f"layers.{i}.{side}": moment.cpu().contiguous()
            for i, sides in self.moments.items()
            for side, moment in sides.items()
        }
        flat |= tensors_of(self.read or {})
        return write_calibration(
            directory,
            flat,
            model=model,
            geometry=self.geometry,
            weights=self.weights,
            joint_layers=self.joint_layers,
            exact_tokens=self.exact_tokens,
            by_energy=self.by_energy,
            record={"text": text, **record, "tokens": self.tokens, "tokens_sha256": self.tokens_sha256},
        )

    @staticmethod
    def is_in(directory: str | Path) -> bool:
        """Whether :meth:`save` wrote to this directory."""
        return (path_of(directory, "directory") / MOMENTS).is_file()

    @classmethod
    def load(cls, directory: str | Path) -> "Calibration":
        """Read what :meth:`save` wrote.

        Raises:
            UserError: the directory is no calibration, or a damaged one, or one whose gates tell classes of tokens from
                coefficients in the bases of an older version.
        """
        directory = path_of(directory, "directory")
        config = read_config(directory)
        flat, joint_layers = read_tensors(directory, config), config.joint_layers or 0
        read = read_from(flat, config.geometry, joint_layers, directory / MOMENTS)
        if read is not None and config.damping != DAMPING:
            raise UserError(
                f"`{directory}` was made by another version, in whose bases its gates tell classes of tokens "
                f"(`damping: {config.damping}` in {CONFIG}, here {DAMPING}); calibrate again"
            )
        return cls(
            geometry=config.geometry,
            moments=_unflattened(flat, config.geometry, directory / MOMENTS),
            read=read,
            joint_layers=joint_layers,
            exact_tokens=config.exact_tokens,
            by_energy=config.by_energy,
            origin=f"the calibration `{directory}`",
            model=config.model,
            weights=config.weights,
            tokens=config.record.get("tokens"),
            tokens_sha256=config.record.get("tokens_sha256"),
            record=config.record,
        )

    def second_moments(self) -> dict[int, dict[str, SecondMoment]]:
        """The moments as :func:`lowrank_kv.calibration.activation_moments.calibrate` returns them, each as if of one row."""
        return {
            i: {side: SecondMoment.from_mean(moment) for side, moment in sides.items()}
            for i, sides in self.moments.items()
        }

    def gradients(self) -> dict[int, dict[str, SecondMoment]]:
        """The gradients' moments as `gradient_moments` returns them, each as if of one row.

        Raises:
            UserError: there are none.
        """
        if not all(side in sides for sides in self.moments.values() for side in GRADIENTS.values()):
            raise UserError(f"{self.origin} was made without gradients; make it anew with `gradients: true`")
        return {
            i: {side: SecondMoment.from_mean(sides[name]) for side, name in GRADIENTS.items()}
            for i, sides in self.moments.items()
        }

    def read_states(self) -> dict[int, dict[str, ReadStates]]:
        """:attr:`read`.

        Raises:
            UserError: there are none.
        """
        if self.read is None:
            raise UserError(
                f"{self.origin} does not say what is read of a compressed cache; make it anew with `read_gradients: true`, "
                f"or with `read_energy: true` where the model's backward pass does not fit"
            )
        return self.read

    def joint_read_states(self, joint_layers: int) -> dict[tuple[int, ...], ReadStates]:
        """Layers that are coded together → what is read of them, as rows [key before rotation, value, key, value, …].

        Raises:
            UserError: it was not taken of so many layers.
        """
        read = self.read_states()
        if joint_layers != self.joint_layers:
            made = (
                f"with `joint_layers: {self.joint_layers}`"
                if self.joint_layers
                else "before layers were coded together"
            )
            raise UserError(
                f"{self.origin} was made {made}, and `joint_layers` is {joint_layers}; make it anew with "
                f"`joint_layers: {joint_layers}`"
            )
        groups = layer_groups(self.geometry.layers, joint_layers)
        return {group: read[group[-1]][KEY_VALUE] for group in groups}

    def for_model(self, model: PreTrainedModel) -> "Calibration":
        """This calibration as it serves `model`, after a check that it fits.

        Warns where it was made on a model of the same shape but other weights, or, where weights cannot be compared, of
        another name, whose states may be quite different.

        Raises:
            UserError: the shapes differ.
        """
        geometry_of(model).check_equal(self.geometry, self.origin)
        remedy = "make one on this model with `lowrank-kv calibrate`"
        is_same = same_weights(self.weights, model)
        if is_same is False:
            made_on = f"`{Path(self.model).name}`, whose weights are others" if self.model else "other weights"
            warnings.warn(
                f"{self.origin} was made on {made_on} than this model's; unless one was fine-tuned from the other, {remedy}",
                stacklevel=2,
            )
        elif is_same is None:
            warn_of_another(model, self.model, self.origin, remedy)
        return dataclasses.replace(self, rotation_bytes=RopeHistory.token_nbytes(model))


def _unflattened(flat: dict[str, Tensor], geometry: KVGeometry, path: Path) -> dict[int, dict[str, Tensor]]:
    """Layer index → side → moment, from names in the file. Raises :class:`UserError` where one is not what it should be."""
    gradients = [side for side in GRADIENTS.values() if any(name.endswith(f".{side}") for name in flat)]
    width = geometry.width
    return {
        index: {
            side: checked_tensor(flat, f"layers.{index}.{side}", (width, width), torch.float32, path)
            for side in (*SIDES, *gradients)
        }
        for index in geometry.layers
    }


def check_read(read_gradients: bool, read_energy: bool) -> None:
    """Raise :class:`UserError` where what is read of a cache is to be weighed in two ways."""
    require(
        not (read_gradients and read_energy),
        "read_energy",
        read_energy,
        "left out beside `read_gradients`, which weighs what is read by the loss itself",
    )


def _check_blocks(blocks_NT: Tensor) -> None:
    is_ids = isinstance(blocks_NT, Tensor) and blocks_NT.ndim == 2 and not blocks_NT.is_floating_point()
    told = tuple(blocks_NT.shape) if isinstance(blocks_NT, Tensor) else type(blocks_NT).__name__
    what = "token ids, an integer tensor of N ≥ 1 blocks × T tokens, as `tokenizer(text, return_tensors='pt').input_ids` is"
    require(is_ids and blocks_NT.numel() > 0, "blocks_NT", told, what)
