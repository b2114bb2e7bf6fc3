"""How far a calibrated basis misses other text, and how much of that an online update mends (OjaKV, section 4, table 1).

Shapes: T tokens, N rows, C joint width, P parts, W width of a part, R rank.
"""

import dataclasses
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.pca import parts_of, pca_basis
from lowrank_kv.calibration.activation_moments import KEY, ROTATED_KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from ojakv import OjaKVConfig, make_plan
from ojakv.online_store import new_store

from .anatomy.shares import states_of
from .reading import check_split
from .subspace_metrics import relative_error, subspace_overlap


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftRow:
    """Means over layers (and heads) for one basis on one text.

    Attributes:
        basis: ``static`` (the calibration's), ``adapted`` (after the prefix) or ``oracle`` (PCA of the very rows measured).
        side: ``keys`` or ``values``.
        rank_share: rank over width.
        relative_error: RER on the rows after the prefix. overlap: SO with the oracle.
    """

    layout: str
    rope: str
    side: str
    basis: str
    update: str
    text: str
    rank_share: float
    relative_error: float
    overlap: float


def measure_shift(
    model: PreTrainedModel,
    calibration: Calibration,
    text: str,
    tokens_T: Tensor,
    *,
    prefix: int,
    configs: dict[str, OjaKVConfig],
) -> list[ShiftRow]:
    """Adapt to the first `prefix` tokens of a text and measure on the rest.

    Args:
        model: uncompressed.
        calibration: of other text.
        text: the text's name in the rows.
        tokens_T: token ids, read at once.
        prefix: how many of them the update sees.
        configs: name of the update → settings; only what concerns bases and steps matters.

    Raises:
        UserError: no prompt, nothing after it, or more than the model's positions.
    """
    check_split(model, len(tokens_T), prefix)
    states = states_of(model, tokens_T, sides=(KEY, ROTATED_KEY, VALUE))
    rows = []
    for update, config in configs.items():
        plan = make_plan(calibration, config)
        key_side = KEY if config.rope == "pre" else ROTATED_KEY
        for position, side, source in ((0, "keys", key_side), (1, "values", VALUE)):
            layers = [
                _of_layer(pair[position], states[index, source], prefix, config, calibration)
                for index, pair in plan.layers.items()
            ]
            for basis in ("static", "adapted", "oracle"):
                error, overlap = torch.tensor([layer[basis] for layer in layers]).mean(dim=0).tolist()
                rows.append(
                    ShiftRow(
                        layout=config.layout,
                        rope=config.rope,
                        side=side,
                        basis=basis,
                        update=update,
                        text=text,
                        rank_share=plan.coefficient_rate,
                        relative_error=error,
                        overlap=overlap,
                    )
                )
    return rows


def _of_layer(
    start: InitialBasis, rows_NC: Tensor, prefix: int, config: OjaKVConfig, calibration: Calibration
) -> dict[str, tuple[float, float]]:
    """Basis → (RER, SO with the oracle), the heads' mean."""
    head_dim, heads = calibration.geometry.head_dim, calibration.geometry.num_kv_heads
    start = start.to(rows_NC.device)
    side = new_store(start, config, head_dim=head_dim, dtype=torch.float32, name="rows")
    parts_PNW = side.parts(rows_NC.unflatten(1, (heads, head_dim)).transpose(0, 1))
    side.follow(parts_PNW[:, :prefix], is_prompt=True)
    rest_PNW = parts_PNW[:, prefix:]
    moment_CC = (rows_NC[prefix:].double().T @ rows_NC[prefix:].double()) / len(rest_PNW[0])
    rank = start.vectors_PWR.shape[2]
    oracle_PWR = pca_basis(parts_of(moment_CC, layout=config.layout, num_heads=heads)).vectors_PWW[:, :, :rank]
    bases = {"static": start.vectors_PWR, "adapted": side.basis_PWR, "oracle": oracle_PWR}

    return {
        name: (
            fmean([relative_error(rows_NW, u_WR) for rows_NW, u_WR in zip(rest_PNW, basis_PWR, strict=True)]),
            fmean([subspace_overlap(u_WR, o_WR) for u_WR, o_WR in zip(basis_PWR, oracle_PWR, strict=True)]),
        )
        for name, basis_PWR in bases.items()
    }
