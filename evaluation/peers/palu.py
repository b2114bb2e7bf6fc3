"""Palu: low-rank factors of the key and value projections, whose latents are the cache (arXiv 2407.21118, section 3).

A group of heads has W = U Σ Vᵀ S⁻¹, where S is a root of the second moment of the projection's inputs x. The product of the
leading factors gives U_r U_rᵀ W x: the projection of the group's own keys on their principal components, since the second
moment of W x is U Σ² Uᵀ. So a calibration's moments of keys and values are all that is needed (a test compares with the
factors of the weights), and no weight has to change: keys before rotation are read through U_r.

Ranks follow the Fisher information of each projection, split evenly over its groups. It is taken as mean δ² · mean x², from
the gradients δ of what is read compressed; after a normalisation mean x² is the mean square of its weights. The paper
averages (δ xᵀ)² itself.

Shapes: C = G·D joint width, R rank, M modules (keys and values of all layers).
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.bases.pca import pca_basis
from lowrank_kv.calibration.activation_moments import KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from lowrank_kv.hf.geometry import KVGeometry, attention_modules
from lowrank_kv.stores.quantization import SCALE_DTYPE, IntegerQuantization
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache

from .peer import MakeCache, TextLength, fixed_config, token_share

# Heads of a group, at most; all of a layer where None is given.
GROUPED_HEADS = 4
# Ranks are multiples of it. Palu's own is 32, for widths of a thousand and more.
_RANK_MULTIPLE = 4
_HALVINGS = 200
_LEAST_SCORE = 1e-12  # of the largest


def palu_maker(
    model: PreTrainedModel,
    calibration: Calibration,
    share: float,
    text: TextLength | None = None,
    *,
    grouped_heads: int | None = None,
    bits: int | None = None,
    prefill: str = "reconstructed",
) -> MakeCache:
    """Caches of the latents of all tokens.

    Args:
        grouped_heads: KV heads that are factored together at most (G-LRD 4, M-LRD 1); None for all of a layer (J-LRD).
        bits: 8 or 4 to round latents to integers, with a scale and an offset for each token; None to leave them.
        prefill: whether a prompt attends to rebuilt states, as a model with factored weights does, or to exact ones.
    """
    geometry = calibration.geometry
    config = fixed_config(
        layout="joint",
        rope="pre",
        num_sink_tokens=0,
        recent_window=0,
        update_period=1,
        prefill=prefill,
    )
    rate = min(1.0, token_share(config, model, share, text))
    integers = None if bits is None else IntegerQuantization(bits=bits)
    names = [(index, side) for index in geometry.layers for side in (KEY, VALUE)]
    row_bytes = rate * geometry.width * model.dtype.itemsize
    if integers is None:
        mean_rank = row_bytes / model.dtype.itemsize
    else:
        mean_rank = max(0.0, row_bytes - integers.scales_per_row(1) * SCALE_DTYPE.itemsize) * 8 / bits
    heads = _heads_of_a_group(geometry, grouped_heads)
    ranks = fisher_ranks(
        fisher_scores(model, calibration),
        min(1.0, mean_rank / geometry.width),
        width=geometry.width,
        multiple=_RANK_MULTIPLE * geometry.num_kv_heads // heads,
    )
    bases = {
        name: _initial_basis(calibration.moments[name[0]][name[1]], geometry, heads, rank, integers)
        for name, rank in zip(names, ranks, strict=True)
    }
    layers = {index: (bases[index, KEY], bases[index, VALUE]) for index in geometry.layers}
    plan = Plan(config=config, geometry=geometry, layers=layers)
    return lambda: OjaKVCache(model, plan)


def fisher_scores(model: PreTrainedModel, calibration: Calibration) -> list[float]:
    """The root of the Fisher information of each projection's weights, of keys and values layer by layer.

    Raises:
        UserError: the calibration has no gradients, or the model normalises behind attention alone.
    """
    if calibration.by_energy:
        raise UserError(
            f"{calibration.origin} was made with `read_energy`, and Palu's ranks are by gradients; make it anew with "
            "`read_gradients: true`"
        )
    read, modules = calibration.read_states(), attention_modules(model)
    scores = []
    for index in calibration.geometry.layers:
        layer = _parent_of(model, modules[index])
        norms = {name: m for name, m in layer.named_children() if "norm" in name or name.startswith("ln")}
        before = [norm for name, norm in norms.items() if "post" not in name]
        if norms and not before:
            raise UserError(
                f"Palu's ranks ask for the scale of what projections read, which the norms of this model do not say: "
                f"they all stand behind ({', '.join(norms)}); leave `palu` out"
            )
        input_square = _output_square(before[0], model) if before else 1.0
        for side in (KEY, VALUE):
            gradient_square = float(read[index][side].gradient_CC.double().diagonal().mean())
            scores.append((gradient_square * input_square) ** 0.5)
    return scores


@torch.no_grad()
def _output_square(norm: nn.Module, model: PreTrainedModel) -> float:
    """The mean square of what a norm gives, whether it multiplies by its weight or by one more (Gemma)."""
    options = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    sign_E = torch.randn(model.config.get_text_config(decoder=True).hidden_size, **options).sign()
    weight = next(norm.parameters(), sign_E)
    return float(norm(sign_E.to(weight)).double().square().mean())


def fisher_ranks(scores: list[float], rate: float, *, width: int, multiple: int) -> list[int]:
    """A rank for each module, in proportion to its score as far as its width allows, `rate · M · width` in all.

    Args:
        scores: one for each of M modules.
        rate: in (0, 1].
        width: C, the most that a rank can be.
        multiple: ranks are multiples of it, or the whole width, and at least one of it.

    Raises:
        UserError: the budget does not hold one multiple for each module.
    """
    score_M = torch.tensor(scores, dtype=torch.float64)
    # A module that nothing reads has none; ranks over scores must be finite.
    score_M = score_M.clamp(min=_LEAST_SCORE * (float(score_M.max()) or 1.0))
    least, total = min(multiple, width), rate * width * len(scores)
    if least * len(scores) > total + multiple:
        raise UserError(
            f"ranks in multiples of {multiple} keep at least {least / width:.2f} of a width of {width}, more than the rate "
            f"{rate:.3f}; take a larger share"
        )
    low, high = 0.0, float(width / score_M.min())  # of ranks over scores; at the highest all have their whole width
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_within = float((middle * score_M).clamp(least, width).sum()) <= total
        low, high = (middle, high) if is_within else (low, middle)
    wanted_M = (high * score_M).clamp(least, width)
    rank_M = (wanted_M / multiple + 1e-9).floor().mul(multiple).clamp(min=least)
    rank_M[wanted_M >= width] = width
    # What rounding left goes to those that lost most by it.
    for module in (wanted_M - rank_M).argsort(descending=True).tolist():
        step = min(multiple, width - int(rank_M[module]))
        if step and float(rank_M.sum()) + step <= total + 1e-6:
            rank_M[module] += step
    return rank_M.long().tolist()


def _heads_of_a_group(geometry: KVGeometry, most: int | None) -> int:
    """The largest divisor of the number of KV heads that is not above `most`."""
    heads = geometry.num_kv_heads
    most = heads if most is None else most
    return max(size for size in range(1, heads + 1) if heads % size == 0 and size <= most)


def _initial_basis(
    moment_CC: Tensor, geometry: KVGeometry, heads: int, rank: int, integers: IntegerQuantization | None
) -> InitialBasis:
    """The components of all groups side by side, each zero outside its group."""
    groups, width = geometry.num_kv_heads // heads, heads * geometry.head_dim
    vectors_CR, energies = torch.zeros(geometry.width, rank), []
    for group in range(groups):
        rows = slice(group * width, (group + 1) * width)
        basis = pca_basis(moment_CC[rows, rows][None].double())
        columns = slice(group * (rank // groups), (group + 1) * (rank // groups))
        vectors_CR[rows, columns] = basis.vectors_PWW[0, :, : rank // groups]
        energies.append(basis.energy_PW[0, : rank // groups])
    return InitialBasis(
        vectors_PWR=by_columns(vectors_CR[None]), energy_PR=torch.cat(energies)[None], quantization=integers
    )


def _parent_of(model: PreTrainedModel, module: torch.nn.Module) -> torch.nn.Module:
    """The module in which another stands."""
    return next(parent for parent in model.modules() if any(child is module for child in parent.children()))
