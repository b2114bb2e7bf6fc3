"""Caches that read a prompt together hold, and answer, to the bit what each holds and answers alone."""

import pytest
import torch
from every_reader import makers_of
from families import BY_NAME
from methods import METHODS, tiny_model

import dynakv
from evaluation.reading import cache_bytes
from evaluation.shared_prompt import can_share, read_prompt_once
from lowrank_kv.hf.attention import has_compressors
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.geometry import geometry_of

PROMPT, AFTER = 192, 24  # hqq packs a multiple of eight rows


@pytest.fixture(scope="module")
def text():
    return torch.randint(1, 97, (1, PROMPT + AFTER), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def answers(model, ids, cache):
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(3, dim=1)], dim=1)


@torch.no_grad()
def check(model, text, makers):
    """Caches that read a prompt together equal those that read it alone."""
    prompt, after = text[:, :PROMPT], text[:, PROMPT:]
    together = [make() for make in makers.values()]
    logits = read_prompt_once(model, prompt, together)
    for (name, make), shared in zip(makers.items(), together, strict=True):
        alone = make()
        expected = model(prompt, past_key_values=alone, logits_to_keep=1).logits
        assert torch.equal(logits, expected), name
        assert shared.get_seq_length() == alone.get_seq_length() == PROMPT
        running = [vars(layer.stored) for layer in shared.layers if isinstance(layer, CompressedLayer)]
        assert not any(states is not None for each in running for states in each.values()), name
        assert torch.equal(answers(model, after, shared), answers(model, after, alone)), name
        layers = geometry_of(model).layers
        assert cache_bytes(shared, layers) == cache_bytes(alone, layers), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_peer_and_preset_that_reads_prompts_exactly(calibration, text, dtype):
    model = tiny_model().to(dtype)
    makers = list(makers_of(model, calibration))
    check(model, text, {name: make for name, make, is_exact in makers if is_exact})
    for _, make, is_exact in makers:
        if not is_exact:
            with pytest.raises(RuntimeError, match="does not attend to a prompt's exact states"):
                read_prompt_once(model, text[:, :PROMPT], [make()])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_reads_alone_where_its_prompts_are_not_exact(method, text):
    model = tiny_model()
    make = method.build(model, 0.5)
    if has_compressors(model):  # as comparisons do, so that one model serves all methods
        make = dynakv.DynaKVCache.maker(model)
        dynakv.detach(model)
    with torch.no_grad():
        alone = model(text[:, :PROMPT], past_key_values=make(), logits_to_keep=1).logits
        uncompressed = model(text[:, :PROMPT], use_cache=False, logits_to_keep=1).logits
    if torch.equal(alone, uncompressed):
        check(model, text, {"it": make})
    else:
        with pytest.raises(RuntimeError, match="does not attend to a prompt's exact states"):
            read_prompt_once(model, text[:, :PROMPT], [make()])


def test_models_with_other_kinds_of_layers_cannot_share():
    assert can_share(tiny_model())
    assert not can_share(BY_NAME["gemma2"].model())
