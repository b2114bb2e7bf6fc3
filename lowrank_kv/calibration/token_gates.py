"""From gradients of single tokens to a gate that foretells which tokens must be coded finely, and to classes of tokens.

Shapes: N sampled tokens, C width, K classes.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.calibration.spectrum import Spectrum
from lowrank_kv.stores.importance_gate import ImportanceGate, features_of

# Ridge of the regression, and the share of the mean cost that is added before its logarithm is taken: most tokens cost
# next to nothing, and how little does not matter.
_RIDGE, _FLOOR = 200.0, 1e-4
# Classes end at the shares 1 − (1 − i/K)^γ of tokens: the more they cost, the fewer they have.
_CONCENTRATION = 1.7
# What the tokens of a class cost at least, over the mean of all: sampled ones may cost nothing.
_LEAST_WEIGHT = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateFit:
    """A gate, and the costs that it predicts of the tokens it was fitted to.

    Attributes:
        score_N: the prediction, as :meth:`ImportanceGate.scores` gives it.
        cost_N: w_t as sampled.
    """

    gate: ImportanceGate
    score_N: Tensor
    cost_N: Tensor

    def classes(self, count: int) -> "TokenClasses":
        """`count` classes of tokens by their predicted costs, of falling size."""
        place_K = torch.arange(1, count, dtype=self.score_N.dtype, device=self.score_N.device) / count
        bounds_K = torch.quantile(self.score_N, 1 - (1 - place_K) ** _CONCENTRATION)
        class_N = torch.bucketize(self.score_N, bounds_K)
        count_K = torch.bincount(class_N, minlength=count)
        cost_K = self.cost_N.new_zeros(count).index_add_(0, class_N, self.cost_N) / count_K.clamp(min=1)
        mean = self.cost_N.mean().clamp(min=torch.finfo(torch.float32).tiny)
        return TokenClasses(
            bounds_K=bounds_K,
            shares=(count_K / len(class_N)).tolist(),
            weights=(cost_K / mean).clamp(min=_LEAST_WEIGHT).tolist(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenClasses:
    """How tokens are divided into classes by a gate's score, and what each class costs.

    Attributes:
        bounds_K: a token is in the class of the first bound that is not below its score; (K − 1,) fp32.
        shares: of all tokens, in each class.
        weights: mean cost of a class's tokens over that of all.
    """

    bounds_K: Tensor
    shares: list[float]
    weights: list[float]


def fit_gates(spectra: list[Spectrum], rows: list[Tensor], gradients: list[Tensor | None]) -> list[GateFit]:
    """A gate for the keys, or values, of each layer.

    Args:
        spectra: of all of them.
        rows, gradients: sampled states of each, and the loss's gradients with regard to them; (N, C), any floating dtype.
            None for the gradients where the loss answers to all tokens alike: a token then costs by its size.
    """
    # Of all coefficients half are kept, about as at a tenth of the bytes.
    level = float(torch.cat([spectrum.importance_C for spectrum in spectra]).median())
    return [_fit(*each, level) for each in zip(spectra, rows, gradients, strict=True)]


def _fit(spectrum: Spectrum, row_NC: Tensor, gradient_NC: Tensor | None, level: float) -> GateFit:
    coef_NC = row_NC.float() @ spectrum.encoder_CC
    if gradient_NC is None:
        coef_gradient_NC = spectrum.importance_C.sqrt().expand_as(coef_NC)
    else:
        coef_gradient_NC = gradient_NC.float() @ spectrum.decoder_CC.T
    cost_N = token_costs(coef_NC, coef_gradient_NC, spectrum.importance_C, level)
    leading = max(1, int((spectrum.importance_C > level).sum()))
    gate = fit_gate(coef_NC, cost_N, leading=leading)
    return GateFit(gate=gate, score_N=gate.scores(coef_NC), cost_N=cost_N)


def token_costs(coef_NC: Tensor, gradient_NC: Tensor, importance_C: Tensor, level: float) -> Tensor:
    """w_t, (N,): what it costs to code each token so that every kept coefficient costs about as much, `level`, on average.

    Args:
        coef_NC: coefficients of mean square 1, in order of importance.
        gradient_NC: ∂loss/∂coefficient of the same tokens.
        importance_C: their mean squares over tokens; those above `level` are kept.
    """
    is_kept_C = importance_C > level
    energy_N = coef_NC[:, : max(1, int(is_kept_C.sum()))].square().mean(dim=1)
    error_NC = torch.where(is_kept_C, level / importance_C * energy_N[:, None], coef_NC.square())
    return (gradient_NC.square() * error_NC).sum(dim=1)


def fit_gate(coef_NC: Tensor, cost_N: Tensor, *, leading: int) -> ImportanceGate:
    """The least-squares fit of log w_t.

    Args:
        coef_NC: coefficients of mean square 1, in order of importance.
        cost_N: w_t of these tokens; zero or positive.
        leading: coefficients whose mean square is a token's size.
    """
    unit_NC, square_NC, log_N = features_of(coef_NC.double(), leading)
    feature_NF = torch.cat([unit_NC, square_NC, log_N[:, None], log_N.square()[:, None]], dim=1)
    # A single row has no spread.
    spread_F = feature_NF.std(dim=0, correction=min(1, len(feature_NF) - 1)).clamp(min=1e-6)
    mean_F = feature_NF.mean(dim=0)
    standard_NF = torch.cat([(feature_NF - mean_F) / spread_F, torch.ones_like(log_N)[:, None]], dim=1)
    cost_N = cost_N.double()
    target_N = (cost_N + cost_N.mean().clamp(min=torch.finfo(torch.float32).tiny) * _FLOOR).log()
    gram_FF = standard_NF.mT @ standard_NF
    gram_FF.diagonal().add_(_RIDGE)
    solution_F = torch.linalg.solve(gram_FF, standard_NF.mT @ target_N)
    weight_F = solution_F[:-1] / spread_F
    width = coef_NC.shape[1]
    constant = solution_F[-1] - (mean_F * weight_F).sum()
    return ImportanceGate(
        linear_C=weight_F[:width].float(),
        square_C=weight_F[width : 2 * width].float(),
        rest_3=torch.stack([weight_F[-2], weight_F[-1], constant]).float(),
        leading=leading,
    )
