"""KVTC: transform coding of keys and values, with bits by the energy of each principal component (arXiv 2511.01815).

The paper's section 3: keys before rotation, and values, in their principal components; each gets the bits that leave the
least squared error Σ λ_i ε(b_i) for the budget; first and latest tokens stay whole; DEFLATE packs what is stored. Here the
components are those of one layer's keys, and of its values, or of keys and values of three layers together (`kvtc-joint`),
not of all layers', and not centred; codes are Lloyd–Max levels, not integers;
the budget is spent exactly on the lower convex hull of ε, which the paper's dynamic program need not be on; and there is no
DEFLATE, since attention reads the rows where they lie.

Shapes: C width of a row, P parts of it, each a layer's keys or its values, W width of a part.
"""

import dataclasses

import torch
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.energy_weights import relative_weights
from ojakv import OjaKVCache, OjaKVConfig, make_plan

from .peer import MakeCache, TextLength, token_share

_ITEMSIZE = 2  # a plan's rate is of numbers of so many bytes


def kvtc_maker(
    model: PreTrainedModel,
    calibration: Calibration,
    share: float,
    text: TextLength | None = None,
    *,
    recent_window: int = 16,
    joint_layers: int = 0,
) -> MakeCache:
    """Caches of principal components with bits by their energy.

    Args:
        recent_window: latest tokens that stay whole; 128 in the paper, which leaves them out of its ratios.
        joint_layers: of how many layers that follow one another keys and values have components together; 0 for none.
    """
    settings = {"recent_window": recent_window, "prefill": "exact", "joint_layers": joint_layers}
    config = OjaKVConfig.preset("static-mixed", **settings)
    rate = token_share(config, model, share, text) * model.dtype.itemsize / _ITEMSIZE
    config = dataclasses.replace(config, rate=min(rate, 1.0))
    plan = make_plan(by_energy(calibration), config)
    return lambda: OjaKVCache(model, plan)


def by_energy(calibration: Calibration, *, is_relative: bool = True) -> Calibration:
    """The calibration of a loss that is the squared error of what is rebuilt: its gradients' moment is the identity, its
    loss-weighted basis the principal components, and what it asks of each their energy.

    Args:
        is_relative: the loss is the squared error over the energy of each layer's keys, and of its values, which at few
            bytes loses much less than the sum of all as they are (docs/log/peers-and-eviction.md).
    """
    width = calibration.geometry.width
    read = {
        index: {
            side: dataclasses.replace(
                states,
                gradient_CC=(
                    relative_weights(states.state_CC, width)
                    if is_relative
                    else torch.ones_like(states.state_CC.diagonal())
                ).diag(),
            )
            for side, states in sides.items()
        }
        for index, sides in calibration.read_states().items()
    }
    return dataclasses.replace(calibration, read=read, by_energy=True)
