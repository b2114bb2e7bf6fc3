"""Where the energy of each layer's and each head's states lies.

Shapes: P parts (G KV heads of width D, or one of joint width C), W width of a part.
"""

from typing import Any

from torch import Tensor

from lowrank_kv.bases.pca import parts_of, pca_basis
from lowrank_kv.bases.rank_allocation import energy_curve, energy_rank
from lowrank_kv.calibration.activation_moments import KEY, ROTATED_KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration

POINTS = 24  # of a curve of captured energy, at most
THRESHOLDS = (0.9, 0.95, 0.99)
# Label → which states, and whether heads stand alone.
KINDS = {
    "keys, unrotated, all heads of a layer": (KEY, "joint"),
    "values, all heads of a layer": (VALUE, "joint"),
    "keys, rotated, single heads": (ROTATED_KEY, "per_head"),
    "values, single heads": (VALUE, "per_head"),
}


def spectra(calibration: Calibration) -> list[dict[str, Any]]:
    """For each kind of states: width, and for each layer and head the curve of captured energy and ranks by threshold."""
    heads, found = calibration.geometry.num_kv_heads, []
    for label, (side, layout) in KINDS.items():
        layers = []
        for index, moments in calibration.moments.items():
            energy_PW = pca_basis(parts_of(moments[side].double(), layout=layout, num_heads=heads)).energy_PW
            layers += [{"layer": index, "head": head, **_described(each)} for head, each in enumerate(energy_PW)]
        found.append({"states": label, "width": energy_PW.shape[1], "parts": layers})
    return found


def _described(energy_W: Tensor) -> dict[str, Any]:
    return {
        "captured": [round(share, 4) for share in energy_curve(energy_W, POINTS)],
        "ranks": [energy_rank(energy_W, threshold) for threshold in THRESHOLDS],
    }
