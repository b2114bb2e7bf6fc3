"""What is served, without a transformers model: a trained compressor, or a calibration's bases.

A server keeps no state of a sequence but its pages. So a token is compressed as soon as it has been read, and of the tokens
that `generate()` would keep at full rank only the first ones stay exact.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch

from dynakv.checkpoint import load_compressors
from dynakv.checkpoint_files import CheckpointConfig, read_config
from dynakv.config import DynaKVConfig
from dynakv.layer_compressor import SingleLayerCompressor
from dynakv.measured_rates import Rates, measured_rates
from dynakv.model_compressors import initial_bases
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.stores.arena import PageLayout
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.torch_defaults import fp32_on_cpu
from lowrank_kv_vllm.settings import ServingConfig
from lowrank_kv_vllm.sides import Side, side_of_basis, side_of_codec
from ojakv import OjaKVConfig, make_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """How a model's layers are compressed.

    Attributes:
        layers: layer index → (keys, values).
        num_sinks: first tokens of a sequence that stay exact.
        margin: room in a page beyond the mean size of its rows, as a share of that.
        reads_prompts_exactly: whether the tokens that a step reads of a prompt see each other exactly; else they see what
            is in pages.
        sees_itself: whether a generated token sees itself exactly; else its row.
    """

    layers: dict[int, tuple[Side, Side]]
    num_sinks: int
    margin: float
    reads_prompts_exactly: bool
    sees_itself: bool

    def layout(self, layer: int, *, block_size: int, sink_bytes: int) -> PageLayout:
        """A page of a layer; arguments as of :meth:`lowrank_kv.stores.arena.PageLayout.of`.

        Raises:
            UserError: blocks have no room for rows.
        """
        key, value = self.layers[layer]
        return PageLayout.of(
            key.row_format,
            value.row_format,
            block_size=block_size,
            num_sinks=self.num_sinks,
            sink_bytes=sink_bytes,
            margin=self.margin,
        )


def retention(settings: ServingConfig) -> dict[str, int]:
    """What is kept at full rank, as overrides of a preset or of a checkpoint's `exact_tokens`: `generate()` with these gives
    what the server does."""
    return {"num_sink_tokens": settings.num_sinks, "recent_window": 0, "update_period": 1}


def rows_differ(settings: ServingConfig) -> bool:
    """Whether tokens take rows of different sizes, so that a page may be full before its end."""
    if settings.checkpoint is None:
        return _differ(preset_of(settings))
    return _differ(read_config(settings.checkpoint).compressor)


def _differ(config: OjaKVConfig | DynaKVConfig) -> bool:
    # A trained compressor without a plan may keep another rank of each token.
    has_ranks = isinstance(config, DynaKVConfig) and not config.has_plan
    return has_ranks or config.token_classes > 1


class Origin(NamedTuple):
    """Where what is served is from: the shape and the name of the model it was made on, what it is, and how another model
    comes to its own."""

    geometry: KVGeometry
    model: str
    what: str
    remedy: str


def origin_of(settings: ServingConfig) -> Origin:
    """Of the settings' files.

    Raises:
        UserError: they are missing or damaged, or hold what cannot be served, or a setting has no effect on it.
    """
    if settings.checkpoint is None:
        calibration = _calibration_of(settings)
        remedy = "make one on this model with `lowrank-kv calibrate`"
        return Origin(calibration.geometry, calibration.model, calibration.origin, remedy)
    saved = _checkpoint_of(settings).saved
    remedy = "serve the model it was trained on, or train one for this"
    return Origin(saved.geometry, saved.base_model, f"the checkpoint `{settings.checkpoint}`", remedy)


@functools.lru_cache(maxsize=2)
def served(settings: ServingConfig, dtype: torch.dtype, device: torch.device) -> Served:
    """How every layer is compressed.

    Args:
        dtype, device: of the model.

    Raises:
        UserError: as :func:`origin_of`, or the rate leaves no bit for every layer.
    """
    return _made(settings, dtype, device, slice(None))


def first_layer(settings: ServingConfig, dtype: torch.dtype) -> Served:
    """The same of a model that had only its first layer, on the CPU: seconds, where a large model's layers take minutes. A
    rate that leaves no bit for every layer leaves none for this one."""
    return _made(settings, dtype, torch.device("cpu"), slice(1))


def _made(settings: ServingConfig, dtype: torch.dtype, device: torch.device, chosen: slice) -> Served:
    """Of the chosen layers."""
    make = _of_bases if settings.checkpoint is None else _of_checkpoint
    with fp32_on_cpu():
        return make(settings, dtype, device, chosen)


def preset_of(settings: ServingConfig) -> OjaKVConfig:
    """The settings with which `generate()` does what a server of bases does."""
    overrides = {**retention(settings), **settings.overrides()}
    return OjaKVConfig.preset(settings.preset_name, rate=settings.rate, **overrides)


def _calibration_of(settings: ServingConfig) -> Calibration:
    calibration, config = Calibration.load(settings.bases), preset_of(settings)
    if config.has_plan and calibration.read is None:
        raise UserError(
            f"`bases` {settings.bases} do not say what is read of a compressed cache, which plans of bits are made "
            f"from; calibrate with `--read_gradients true` (or `--read_energy true`), or serve `--preset static-joint-pf`"
        )
    _check_margin(settings, config)
    return calibration


class _Checkpoint(NamedTuple):
    """A checkpoint that can be served.

    Attributes:
        saved: what it says.
        compressor: its settings, with what the user has replaced of them.
        rates: the shares that it keeps in each layer.
    """

    saved: CheckpointConfig
    compressor: DynaKVConfig
    rates: Rates


def _checkpoint_of(settings: ServingConfig) -> _Checkpoint:
    saved = read_config(settings.checkpoint)
    compressor = saved.compressor.overridden(**settings.overrides())
    if compressor.eviction.is_on:
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` evicts tokens of prompts, which pages that sequences share cannot; "
            f"train one without `eviction`"
        )
    if compressor.joint_layers:
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` codes {compressor.joint_layers} layers together, and vLLM has pages of "
            f"each layer by itself; serve one that was trained with `compressor.joint_layers: 0`"
        )
    if compressor.own_directions:
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` gives each sequence {compressor.own_directions} directions of its own, "
            f"for which pages that sequences share have no place; save it with `own_directions: 0`"
        )
    rates = measured_rates(settings.checkpoint, saved)
    if rates is None or rates.is_mean:  # a page of a layer that keeps more than the mean would be full before its end
        what = "how much its gates keep" if rates is None else "how much its gates keep in each layer"
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` does not say {what}, for which pages are made; run "
            f"`lowrank-kv measure --checkpoint {settings.checkpoint} --name TEXT`, which writes it there"
        )
    _check_margin(settings, compressor)
    require(
        compressor.has_plan or not settings.num_sink_tokens,
        "num_sink_tokens",
        settings.num_sink_tokens,
        f"left out with a checkpoint of `rank_policy: {compressor.rank_policy}`, whose pages hold no exact tokens",
    )
    return _Checkpoint(saved, compressor, rates)


def _check_margin(settings: ServingConfig, config: OjaKVConfig | DynaKVConfig) -> None:
    require(
        settings.page_margin is None or _differ(config),
        "page_margin",
        settings.page_margin,
        "left out where one plan, or one rank, holds for all tokens: their rows are of one size, and no page is full before "
        "its end",
    )


def _of_bases(settings: ServingConfig, dtype: torch.dtype, device: torch.device, chosen: slice) -> Served:
    config, calibration = preset_of(settings), _calibration_of(settings)
    layers = calibration.geometry.layers[chosen]
    calibration = dataclasses.replace(
        calibration,
        geometry=dataclasses.replace(calibration.geometry, layers=layers),
        read=None if calibration.read is None else {index: calibration.read[index] for index in layers},
    )
    plan = make_plan(calibration, config)
    return Served(
        layers={
            index: tuple(side_of_basis(side, dtype).to(device) for side in kv) for index, kv in plan.layers.items()
        },
        num_sinks=settings.num_sinks,
        margin=settings.margin,
        reads_prompts_exactly=config.reads_prompts_exactly,
        sees_itself=config.reads_prompts_exactly,
    )


def _of_checkpoint(settings: ServingConfig, dtype: torch.dtype, device: torch.device, chosen: slice) -> Served:
    _, compressor, rates = _checkpoint_of(settings)
    exact = compressor.reads_prompts_exactly
    layers = dict(list(load_compressors(settings.checkpoint, **settings.overrides()).items())[chosen])
    shared = {"margin": settings.margin, "reads_prompts_exactly": exact}
    if compressor.has_plan:
        planned = {
            index: tuple(side_of_basis(side, dtype).to(device) for side in kv)
            for index, kv in initial_bases(layers).items()
        }
        return Served(layers=planned, num_sinks=settings.num_sinks, sees_itself=exact, **shared)
    ranked = {
        index: _ranked_sides(layer.to(device), rates.keys[i], rates.values[i], dtype, device)
        for i, (index, layer) in enumerate(layers.items())
    }
    return Served(layers=ranked, num_sinks=0, sees_itself=False, **shared)


def _ranked_sides(
    layer: SingleLayerCompressor, key_rate: float, value_rate: float, dtype: torch.dtype, device: torch.device
) -> tuple[Side, Side]:
    """Of a layer whose gates keep these shares of the coefficients on average."""
    codec, granularity = layer.codec(), layer.key.config.granularity
    return tuple(
        side_of_codec(
            side,
            granularity=granularity,
            mean_rank=rate * side.width,
            dtype=dtype,
            device=device,
            quantization=codec.quantization,
        )
        for side, rate in ((codec.key, key_rate), (codec.value, value_rate))
    )
