"""The gated reconstruction of training: its values and gradients against plain operations, and what it keeps of a pass."""

import pytest
import torch
from methods import dynakv_model, tiny_model
from torch import Tensor

import dynakv
from dynakv.fused_reconstruction import gated_reconstruction
from dynakv.mask import Truncation, soft_mask
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.codec import prefix_mask
from lowrank_kv.hf.rope import Rope


def inputs(width: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    """States, U, V, W and b."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, width), (width, width), (width, width), (width, width), (width,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plain(states: Tensor, basis: Tensor, decoder: Tensor, weight: Tensor, bias: Tensor, truncation: Truncation):
    """The same by single operations, differentiated by autograd."""
    coef = states @ basis
    cumulative = (coef @ weight + bias).softmax(-1, dtype=torch.promote_types(coef.dtype, torch.float32)).cumsum(-1)
    rank = hard_rank(cumulative, truncation.threshold, truncation.granularity)
    mask = soft_mask(cumulative)
    soft = mask.mean()
    if truncation.on_hard_mask:
        mask = mask + (prefix_mask(rank, states.shape[-1]).to(mask) - mask).detach()
    return (coef * mask.to(coef.dtype)) @ decoder, soft, rank.to(soft.dtype).mean() / states.shape[-1]


def truncation(on_hard_mask: bool, granularity: int = 1) -> Truncation:
    return Truncation(threshold=0.1, granularity=granularity, on_hard_mask=on_hard_mask)


def test_gradients_are_those_of_finite_differences():
    def smooth(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return gated_reconstruction(*tensors, truncation(False))[:2]

    assert torch.autograd.gradcheck(smooth, inputs(7, torch.float64))


@pytest.mark.parametrize("on_hard_mask", [False, True])
@pytest.mark.parametrize(
    ("width", "shape", "dtype", "tolerance"),
    [
        (1, (1, 1), torch.float64, 1e-12),
        (33, (2, 63), torch.float64, 1e-11),
        (33, (2, 63), torch.float32, 1e-4),
        (64, (1, 100), torch.bfloat16, 0.05),
    ],
)
def test_values_and_gradients_equal_single_operations(width, shape, dtype, tolerance, on_hard_mask):
    results = []
    for operation in (gated_reconstruction, plain):
        tensors = inputs(width, dtype, shape)
        rebuilt, soft, hard = operation(*tensors, truncation(on_hard_mask, granularity=min(4, width)))
        weights = torch.linspace(-1, 1, rebuilt.numel()).view_as(rebuilt).to(dtype)
        ((rebuilt * weights).sum() + 30 * soft).backward()
        results.append([rebuilt.detach(), soft.detach(), hard, *(tensor.grad for tensor in tensors)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance * float(theirs.abs().max() + 1e-30), rtol=0)


def test_states_without_gradients_need_none():
    tensors = inputs(6, torch.float32)
    tensors[0].requires_grad_(False)
    gated_reconstruction(*tensors, truncation(False))[0].sum().backward()
    assert tensors[0].grad is None
    assert all(tensor.grad is not None for tensor in tensors[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoder", dynakv.DECODERS)
def test_a_compressor_keeps_three_tensors_of_the_states_size(decoder, dtype):
    # States, coefficients and the gate's logits; the rest is as large as the weights, whatever the number of tokens.
    model = tiny_model()
    dynakv_model(model, 0.4, decoder=decoder)
    side = dynakv.compressors(model)[0].key.train()
    tokens = 4096
    states = torch.randn(1, tokens, side.width, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        side(states)
    of_weights = sum(size for size in kept.values() if size < states.nbytes)
    assert sum(kept.values()) - of_weights == 3 * states.nbytes
    assert of_weights <= 24 * 4 * side.width**2


@pytest.mark.parametrize("rotary", [8, 6])
def test_rotation_s_short_backward_is_its_transpose(rotary):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    # Both halves need not turn by one angle for the transpose to be right.
    cos, sin = torch.randn(2, 1, 5, rotary, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    rope = Rope(apply_rotary_pos_emb, cos, sin)
    assert torch.autograd.gradcheck(rope.rotate, [key])


def test_passes_share_an_inversion_until_the_projection_changes(monkeypatch):
    from dynakv.projection import Projection

    calls = []
    invert = torch.linalg.inv
    monkeypatch.setattr(torch.linalg, "inv", lambda matrix: calls.append(1) or invert(matrix))
    projection = Projection(8, decoder="exact", name="layer 0 keys")
    for _ in range(2):
        basis, decoder = projection.matrices()
        torch.testing.assert_close(basis @ decoder, torch.eye(8))
    assert len(calls) == 1
    # Sharded training changes parameters behind autograd's back.
    projection.weight.data = 2 * torch.eye(8)
    torch.testing.assert_close(projection.matrices()[1], torch.eye(8) / 2)
    assert len(calls) == 2


def test_the_shared_inverse_has_the_gradient_of_inversion():
    from dynakv.projection import Projection

    generator = torch.Generator().manual_seed(0)
    projection = Projection(6, decoder="exact", name="layer 0 keys")
    projection.weight.data += 0.1 * torch.randn(6, 6, generator=generator)
    weight = projection.weight.detach().clone().requires_grad_()
    target = torch.randn(6, 6, generator=generator)
    for _ in range(2):  # the second pass reads what the first one inverted
        projection.zero_grad()
        (projection.matrices()[1] * target).sum().backward()
    (torch.linalg.inv(weight) * target).sum().backward()
    torch.testing.assert_close(projection.weight.grad, weight.grad, atol=1e-4, rtol=1e-4)
