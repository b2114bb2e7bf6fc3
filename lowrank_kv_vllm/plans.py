"""The bases and plans of bits that are served, without a transformers model.

A server keeps no state of a sequence but its pages. So a token is compressed as soon as it has been read, and of the tokens
that `generate()` would keep at full rank only the first ones stay exact.
"""

import functools
from pathlib import Path

import torch

from dynakv.checkpoint import WEIGHTS, read_config, read_state
from dynakv.compressor import LayerCompressor
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.settings import PRESETS, ServingConfig
from ojakv import OjaKVConfig, make_plan


def retention(settings: ServingConfig) -> dict[str, int]:
    """What is kept at full rank, as overrides of a preset or of a checkpoint's `exact_tokens`: `generate()` with these gives
    what the server does."""
    return {"num_sink_tokens": settings.num_sink_tokens, "recent_window": 0, "update_period": 1}


def served_geometry(settings: ServingConfig) -> tuple[KVGeometry, str]:
    """The shape that the settings' files are for, and where they are from, without reading all of them.

    Raises:
        UserError: they are missing or damaged, or hold what cannot be served.
    """
    if settings.checkpoint is None:
        calibration = Calibration.load(settings.bases)
        return calibration.geometry, calibration.origin
    config = read_config(settings.checkpoint)
    if not config.compressor.has_plan:
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` has `rank_policy: {config.compressor.rank_policy}`, and pages hold "
            f"plans of bits; serve one that was trained with `rank_policy: plan`, or bases with a preset"
        )
    if config.compressor.eviction.is_on:
        raise UserError(
            f"the checkpoint `{settings.checkpoint}` evicts tokens of prompts, which pages that sequences share cannot; "
            f"train one without `eviction`"
        )
    return config.geometry, f"the checkpoint `{settings.checkpoint}`"


@functools.lru_cache(maxsize=2)
def plan_of(settings: ServingConfig) -> Plan:
    """Bases and plans of every layer.

    Raises:
        UserError: as :func:`served_geometry`, or the rate leaves no bit for every layer.
    """
    served_geometry(settings)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM builds a model with that of its weights
    try:
        return _made_plan(settings)
    finally:
        torch.set_default_dtype(default)


def _made_plan(settings: ServingConfig) -> Plan:
    if settings.checkpoint is not None:
        return _plan_of_checkpoint(Path(settings.checkpoint), settings)
    rate = {} if settings.rate is None else {"rate": settings.rate}
    config = OjaKVConfig.preset(settings.preset or PRESETS[-1], **rate, **retention(settings))
    return make_plan(Calibration.load(settings.bases), config)


def _plan_of_checkpoint(directory: Path, settings: ServingConfig) -> Plan:
    config = read_config(directory)
    geometry, state, layers = config.geometry, read_state(directory / WEIGHTS), {}
    for index in geometry.layers:
        layer = LayerCompressor(geometry.width, geometry.head_dim, config.compressor, index).eval()
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        try:
            layer.load_state_dict(own)
        except RuntimeError as error:
            raise UserError(f"{directory / WEIGHTS} does not fit its configuration: {error}; copy it again") from error
        layers[index] = layer.key.initial_basis(), layer.value.initial_basis()
    return Plan(config=WindowedConfig(**retention(settings)), geometry=geometry, layers=layers)
