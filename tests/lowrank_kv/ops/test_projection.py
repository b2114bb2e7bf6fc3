"""Coefficients by compiled code against fp64 products, keys turned back first."""

import pytest
import torch

from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.ops.native.projection import Projection
from lowrank_kv.ops.rotation import RotaryTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 63, 130])
@pytest.mark.parametrize(("heads", "head_dim", "pairs", "ranks"), [(3, 64, 32, (192, 50)), (2, 20, 6, (7, 40))])
def test_coefficients_are_products_with_states_before_rotation(dtype, tokens, heads, head_dim, pairs, ranks):
    generator = torch.Generator().manual_seed(tokens)
    width = heads * head_dim
    plain_TGD, value_TGD = (torch.randn(tokens, heads, head_dim, generator=generator) for _ in range(2))
    key_CR, value_CR = (torch.randn(width, rank, generator=generator) / width**0.5 for rank in ranks)
    angle_TF = torch.rand(300, pairs, generator=generator) * 6
    table = RotaryTable((1.2 * angle_TF.cos())[None], (1.2 * angle_TF.sin())[None])  # as some kinds scale both
    position_T = torch.randint(0, 300, (tokens,), generator=generator)
    rotated_TGD = table.rotate(plain_TGD[:, :, None], position_T[:, None])[:, :, 0].to(dtype)
    spare_TGX = torch.full((tokens, heads + 2, head_dim), float("nan"), dtype=dtype)  # as a fused product leaves them
    spare_TGX[:, 1:-1] = rotated_TGD
    back = table.inverse
    projection = Projection(key_CR, value_CR, (back.cos_BTF[0], back.sin_BTF[0]), num_kv_heads=heads)
    values_TGD = value_TGD.to(dtype)
    found = projection(NewTokens(spare_TGX[:, 1:-1], values_TGD, position_T, torch.zeros(tokens, dtype=torch.int64)))
    unrotated_TGD = table.inverse.rotate(rotated_TGD.double()[:, :, None], position_T[:, None])[:, :, 0]
    expected = unrotated_TGD.flatten(1) @ key_CR.double(), values_TGD.double().flatten(1) @ value_CR.double()
    for coef_TR, expected_TR in zip(found, expected, strict=True):
        torch.testing.assert_close(coef_TR.double(), expected_TR, atol=1e-5, rtol=1e-5)
