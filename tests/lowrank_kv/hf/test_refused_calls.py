"""A call that a layer refuses leaves its cache as it was."""

import pytest
import torch
from methods import METHODS, tiny_model

from lowrank_kv.utils.errors import UserError

every_method = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name in ("dynakv", "ojakv-joint", "ojakv-pf")], ids=lambda m: m.name
)


@every_method
@torch.no_grad()
def test_a_refused_call_leaves_no_rotations(method, monkeypatch):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    ids = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    cache, untouched = make_cache(), make_cache()
    for each in (cache, untouched):
        model(ids[:, :24], past_key_values=each)

    def refuse(*_):
        raise UserError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(cache.layers[0], "append", refuse)
        with pytest.raises(UserError, match="no room"):
            model(ids[:, 24:27], past_key_values=cache, position_ids=torch.tensor([[50, 51, 52]]))
    with pytest.raises(UserError, match="the cache holds 1 sequences, but 2 were passed"):
        model(ids[:, 24:27].repeat(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 24
    for tokens in (ids[:, 24:25], ids[:, 25:]):
        found, expected = (model(tokens, past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(found, expected)
    assert cache.nbytes == untouched.nbytes
