"""From a calibration to each layer's starting bases and ranks (OjaKV, appendix A.3).

Shapes: C = G·D joint width, G KV heads, D head dim, P parts, W width of a part, R rank.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.bases.pca import parts_of, pca_basis
from lowrank_kv.bases.rank_allocation import energy_rank, uniform_ranks, waterfill_ranks
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, QUERY, ROTATED_KEY, VALUE
from lowrank_kv.calibration.bit_plans import CodedBasis, coded_bases
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.spectrum import Spectrum
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from lowrank_kv.hf.geometry import KVGeometry, layer_groups
from lowrank_kv.hf.rope import POSITION_BYTES
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.torch_defaults import fp32_on_cpu
from lowrank_kv.utils.values import check_type
from ojakv.config import LOSS, OjaKVConfig

# Of what the loss asks of the first coefficient; fp16 holds none that are much smaller.
_LEAST_SHARE = 1e-6


@dataclasses.dataclass(frozen=True)
class _Spectrum:
    vectors_PWW: Tensor
    ranking_PW: Tensor  # by which ranks are chosen: energies, or what the loss asks
    weight: float | None  # how much a lost share of these counts; None where they are counted as they are
    energy_PW: Tensor  # energies of the states themselves
    decoder_PWW: Tensor | None = None  # where vectors are not orthonormal

    def shares(self) -> Tensor:
        """What leaving out each coefficient costs, to be compared between keys, values and layers, (W,)."""
        if self.weight is None:
            return self.ranking_PW.mean(dim=0)
        return self.weight * _unit_rows(self.ranking_PW).mean(dim=0)


@fp32_on_cpu()
def make_plan(calibration: Calibration, config: OjaKVConfig) -> Plan:
    """Bases and ranks of every layer.

    Args:
        calibration: made on the model that the cache will serve (:meth:`Calibration.for_model` checks it).
        config: the cache's settings.

    Raises:
        UserError: coefficients are to be held as integers, and the calibration read too few tokens to know their scale; or
            in mixed widths or weighed by the loss, and it does not say what is read of a cache; or one of the two is none.
    """
    check_arguments(calibration, config)
    geometry = calibration.geometry
    if config.has_plan:
        layers = _coded_layers(calibration, config)
        return Plan(config=config, geometry=geometry, layers=layers, rotation_bytes=calibration.rotation_bytes)
    _, widest = part_shape(geometry, config)
    if config.integers is not None and (calibration.tokens or math.inf) < 2 * widest:
        raise UserError(
            f"{calibration.origin} is of {calibration.tokens} tokens, too few to know how {widest} directions spread, which "
            f"`cache_dtype: {config.cache_dtype}` divides by; "
            f"calibrate on at least {2 * widest}, or better ten times as many"
        )
    spectra_of = _spectra_by_loss if config.weigh_by == LOSS else _spectra
    spectra = [spectrum for index in geometry.layers for spectrum in spectra_of(calibration, index, config)]
    return _plan(spectra, geometry, config, calibration.rotation_bytes)


def check_arguments(calibration: Calibration, config: OjaKVConfig) -> None:
    """Raise :class:`UserError` where what a plan is to be made of is something else."""
    check_type("calibration", calibration, Calibration, "a calibration, such as Calibration.load(DIR)")
    check_type("config", config, OjaKVConfig, "settings, such as OjaKVConfig.preset('ojakv-joint')")


@fp32_on_cpu()
def plan_of_shapes(geometry: KVGeometry, config: OjaKVConfig, *, rotation_bytes: int = POSITION_BYTES) -> Plan:
    """The plan that :func:`make_plan` makes of any calibration where ranks are a fraction, without its numbers (on device
    ``meta``).

    Args:
        rotation_bytes: what a cache keeps of each token's rotation, for all layers.
    """
    parts, width = part_shape(geometry, config)
    energy_PW = torch.empty(parts, width, device="meta")
    vectors_PWW = torch.empty(parts, width, width, device="meta")
    decoder_PWW = vectors_PWW if config.weigh_by == LOSS else None
    any_spectrum = _Spectrum(vectors_PWW, energy_PW, 1.0, energy_PW, decoder_PWW)
    return _plan([any_spectrum] * (2 * len(geometry.layers)), geometry, config, rotation_bytes)


def part_shape(geometry: KVGeometry, config: OjaKVConfig) -> tuple[int, int]:
    """Into how many parts a layer's keys, or values, are divided, and the width of each."""
    return (geometry.num_kv_heads, geometry.head_dim) if config.layout == "per_head" else (1, geometry.width)


def _plan(spectra: list[_Spectrum], geometry: KVGeometry, config: OjaKVConfig, rotation_bytes: int) -> Plan:
    """The plan of the spectra of each layer's keys and values in turn."""
    is_compressed = [config.compress in ("both", name) for _ in geometry.layers for name in ("keys", "values")]
    ranks = iter(_ranks([s for s, chosen in zip(spectra, is_compressed, strict=True) if chosen], config))
    uncompressed = InitialBasis.identity(geometry.num_kv_heads, geometry.head_dim, device=spectra[0].vectors_PWW.device)
    bases = [
        _initial_basis(spectrum, next(ranks), config.integers) if chosen else uncompressed
        for spectrum, chosen in zip(spectra, is_compressed, strict=True)
    ]
    return Plan.of_bases(config, geometry, bases, rotation_bytes=rotation_bytes)


def _coded_layers(calibration: Calibration, config: OjaKVConfig) -> dict[int, tuple[InitialBasis, InitialBasis]]:
    settings = {key: getattr(config, key) for key in ("token_classes", "rebuild_cost", "joint_layers")}
    coded = coded_bases(calibration, config.rate, **settings)

    def basis(side: CodedBasis, make: Callable[..., Any], **more: Any) -> Any:
        importance_C = side.importance_C if config.own_directions else None
        return make(side.encoder_CC, side.decoder_CC, side.plan, importance_C=importance_C, **more)

    if not config.joint_layers:
        return {i: tuple(basis(sides[side], InitialBasis.coded) for side in (KEY, VALUE)) for i, sides in coded.items()}
    layers = {}
    for group in layer_groups(calibration.geometry.layers, config.joint_layers):
        bases = basis(coded[group[-1]][KEY_VALUE], InitialBasis.coded_together, layers=len(group))
        layers |= dict(zip(group, bases, strict=True))
    return layers


def _spectra(calibration: Calibration, index: int, config: OjaKVConfig) -> list[_Spectrum]:
    heads = calibration.geometry.num_kv_heads
    moments = calibration.moments[index]

    def parts(kind: str) -> Tensor:
        return parts_of(moments[kind].double(), layout=config.layout, num_heads=heads)

    key_PWW, value_PWW = parts(KEY if config.rope == "pre" else ROTATED_KEY), parts(VALUE)
    ranking_PWW = key_PWW
    if config.query_key:
        # Queries and keys have different scales; stacked as they are, the larger would decide alone.
        ranking_PWW = _unit(key_PWW) + _unit(parts(QUERY))
    spectra = []
    for moment_PWW, chosen_PWW, weight in ((key_PWW, ranking_PWW, config.key_weight), (value_PWW, value_PWW, 1.0)):
        basis = pca_basis(chosen_PWW)
        vectors_PWW = basis.vectors_PWW.double()
        # A direction that no text has shown would come to a little less than nothing.
        energy_PW = (vectors_PWW * (moment_PWW @ vectors_PWW)).sum(dim=1).clamp(min=0).float()
        spectra.append(_Spectrum(basis.vectors_PWW, basis.energy_PW, weight, energy_PW))
    return spectra


def _spectra_by_loss(calibration: Calibration, index: int, config: OjaKVConfig) -> list[_Spectrum]:
    """The same of what later tokens read of a compressed cache, and of how the loss answers to it."""
    if calibration.read is None or calibration.by_energy:
        raise UserError(
            f"{calibration.origin} was made without `read_gradients` and knows no loss; leave `weigh_by` out, or make it "
            f"anew with `read_gradients: true`"
        )
    heads, spectra = calibration.geometry.num_kv_heads, []
    for side in (KEY, VALUE):
        read = calibration.read_states()[index][side]
        of_parts = [read.spectrum]  # found once for all rates
        if config.layout != "joint":
            parts = (
                parts_of(m_CC, layout=config.layout, num_heads=heads) for m_CC in (read.state_CC, read.gradient_CC)
            )
            of_parts = [Spectrum.of_states(state_WW, gradient_WW) for state_WW, gradient_WW in zip(*parts, strict=True)]
        encoder_PWW, decoder_PWW, importance_PW = (
            torch.stack([getattr(each, name) for each in of_parts])
            for name in ("encoder_CC", "decoder_CC", "importance_C")
        )
        # As large as what the loss asks of them, so that integers, which err alike in all, err least where it asks most.
        share_PW = importance_PW / _positive(importance_PW.amax(dim=1, keepdim=True))
        energy_PW = share_PW.clamp(min=_LEAST_SHARE)
        size_PW = energy_PW.sqrt()
        spectra.append(
            _Spectrum(encoder_PWW * size_PW[:, None], importance_PW, None, energy_PW, decoder_PWW / size_PW[..., None])
        )
    return spectra


def _unit(moment_PWW: Tensor) -> Tensor:
    """The moment scaled to a trace of 1 in each part; zero where all states of a part are zero."""
    return moment_PWW / _positive(moment_PWW.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None])


def _ranks(spectra: list[_Spectrum], config: OjaKVConfig) -> list[int]:
    """A rank for each layer's keys and one for its values; heads share the largest rank that any of them needs."""
    if config.ranks == "fraction":
        return uniform_ranks([spectrum.ranking_PW.shape[1] for spectrum in spectra], config.rate, config.rank_multiple)
    if config.ranks == "budget":
        return waterfill_ranks([spectrum.shares() for spectrum in spectra], config.rate, config.rank_multiple)
    return [
        min(-(-rank // config.rank_multiple) * config.rank_multiple, spectrum.ranking_PW.shape[1])
        for spectrum in spectra
        for rank in [max(energy_rank(part_W, config.energy) for part_W in spectrum.ranking_PW)]
    ]


def _unit_rows(energy_PW: Tensor) -> Tensor:
    return energy_PW / _positive(energy_PW.sum(dim=1, keepdim=True))


def _positive(total: Tensor) -> Tensor:
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def _initial_basis(spectrum: _Spectrum, rank: int, integers: IntegerQuantization | None) -> InitialBasis:
    # A copy, because a view would keep all directions in memory.
    vectors_PWR = by_columns(spectrum.vectors_PWW[:, :, :rank].clone())
    energy_PR = spectrum.energy_PW[:, :rank].contiguous()
    decoder_PWR = None if spectrum.decoder_PWW is None else by_columns(spectrum.decoder_PWW[:, :rank].mT.clone())
    return InitialBasis(vectors_PWR=vectors_PWR, energy_PR=energy_PR, decoder_PWR=decoder_PWR, quantization=integers)
