"""KQ-SVD: the best low-rank form of the scores themselves, not of keys alone (arXiv 2512.05916).

Among all maps of rank r, K E Dᵀ with E = L V_r and D = L⁻ᵀ V_r is nearest to K in ‖(K − K E Dᵀ) Qᵀ‖, where L Lᵀ is the
second moment of a head's queries and V_r holds the leading eigenvectors of Lᵀ E[kᵀk] L. The queries of all heads that share
keys count. Values are treated alike, with the output projection in the place of the queries: ‖(V − V̂) W_O‖.

Shapes: G KV heads, D head dim, R rank.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.pca import parts_of
from lowrank_kv.bases.rank_allocation import waterfill_ranks
from lowrank_kv.calibration.activation_moments import QUERY, ROTATED_KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from ojakv import OjaKVCache

from .output_projection import output_moments
from .peer import MakeCache, TextLength, fixed_config, token_share

# Directions that no query has get this share of the mean weight, so that they can be divided by.
_DAMPING = 1e-4


def kq_svd_maker(
    model: PreTrainedModel, calibration: Calibration, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches of each head's rotated keys and values on the bases that scores and outputs ask for; first 4 and latest 16
    tokens stay whole. Ranks are by water-filling on the relative energies of scores and outputs, where the paper takes as
    many as hold a share of it."""
    geometry = calibration.geometry
    config = fixed_config(layout="per_head", rope="post", prefill="exact")
    rate = min(1.0, token_share(config, model, share, text))
    outputs = output_moments(model)
    bases = []
    for index in geometry.layers:
        moments = calibration.moments[index]
        key_GDD, query_GDD, value_GDD = (
            parts_of(moments[side].double(), layout="per_head", num_heads=geometry.num_kv_heads)
            for side in (ROTATED_KEY, QUERY, VALUE)
        )
        bases += [read_basis(key_GDD, query_GDD), read_basis(value_GDD, outputs[index])]
    shares = [(energy_GD / energy_GD.sum(dim=1, keepdim=True)).mean(dim=0) for _, _, energy_GD in bases]
    initial = [
        InitialBasis(
            vectors_PWR=by_columns(encoder_GDD[:, :, :rank].float()),
            energy_PR=energy_GD[:, :rank].float(),
            decoder_PWR=by_columns(decoder_GDD[:, :, :rank].float()),
        )
        for (encoder_GDD, decoder_GDD, energy_GD), rank in zip(bases, waterfill_ranks(shares, rate), strict=True)
    ]
    plan = Plan.of_bases(config, geometry, initial)
    return lambda: OjaKVCache(model, plan)


def read_basis(state_GDD: Tensor, reader_GDD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(encoder, decoder, energies) of each head: the leading r columns are the best of rank r for E‖(x − x E Dᵀ) R‖².

    Args:
        state_GDD: second moments of the states x.
        reader_GDD: R Rᵀ, the second moments of what reads them.

    Returns:
        encoder and decoder, (G, D, D), with D = E⁻ᵀ, and the energies along the columns, (G, D), falling; fp64.
    """
    reader_GDD = reader_GDD.double()
    mean_G = reader_GDD.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    damping_GDD = _DAMPING * mean_G[:, None, None] * torch.eye(reader_GDD.shape[1], dtype=torch.float64)
    root_GDD = torch.linalg.cholesky(reader_GDD + damping_GDD)
    # Scaled so that coefficients are of the states' size.
    root_GDD = root_GDD / mean_G.sqrt()[:, None, None]
    energy_GD, vectors_GDD = torch.linalg.eigh(root_GDD.mT @ state_GDD.double() @ root_GDD)
    vectors_GDD = vectors_GDD.flip(2)
    decoder_GDD = torch.linalg.solve_triangular(root_GDD.mT, vectors_GDD, upper=True)
    return root_GDD @ vectors_GDD, decoder_GDD, energy_GD.flip(1).clamp(min=1e-30)
