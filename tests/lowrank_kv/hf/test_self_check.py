"""A model that a compressed cache would serve wrongly is found out before it is trained or served."""

import copy

import pytest
import torch
from families import BY_NAME, FAMILIES
from methods import calibration_of, dynakv_model, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

import dynakv
from lowrank_kv.hf import self_check as module_under_test
from lowrank_kv.hf.attention import is_prepared
from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig

every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """A softmax with one more in its denominator, of which no argument tells."""
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.mT * scaling + attention_mask
    weights = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), None


class UnforeseenAttention(LlamaAttention):
    """What a new family might do."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        cache = kwargs.pop(cache_name(kwargs), None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.flatten(2)), weights


def of_an_unknown_family(**overrides):
    model = tiny_model(attn_implementation="eager", **overrides)
    model.model.layers[1].self_attn.__class__ = UnforeseenAttention
    return model


@every_dtype
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_that_is_served_passes(family, dtype):
    model = family.model().to(dtype)
    check_by_itself(model)
    assert is_prepared(model)


@every_dtype
def test_a_family_that_is_served_wrongly_is_refused_with_its_name_and_the_difference(dtype):
    model = of_an_unknown_family().to(dtype)
    attention = model.config._attn_implementation
    with pytest.raises(
        UserError, match=r"a llama model does not compute the same .* differ by up to \d.*self_check=False"
    ):
        check_by_itself(model)
    assert not is_prepared(model)
    assert model.config._attn_implementation == attention


def test_attaching_calibrating_and_making_a_cache_are_checked_unless_told_otherwise(tmp_path):
    stock = tiny_model()
    dynakv_model(stock, 1.0)
    dynakv.save_compressor(stock, tmp_path / "compressor")
    calibration = calibration_of(tiny_model())
    ids = torch.randint(1, 97, (2, 16))

    def make_cache(model, **options):
        OjaKVCache.from_model(model, OjaKVConfig.preset("ojakv"), bases=calibration, **options)

    uses = [
        lambda model, **options: dynakv.attach(model, tmp_path / "compressor", **options),
        lambda model, **options: type(calibration).from_text(model, ids, progress=False, **options),
        make_cache,
    ]
    for use in uses:
        model = of_an_unknown_family()
        with pytest.raises(UserError, match="does not compute the same"):
            use(model)
        assert not dynakv.is_attached(model)
        use(model, self_check=False)


def test_nothing_is_changed_but_the_preparation():
    model = BY_NAME["gemma3"].model().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    states, attributes = copy.deepcopy(model.state_dict()), set(vars(model.model))
    random = torch.get_rng_state()
    check_by_itself(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())
    assert set(vars(model.model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_tried_once(monkeypatch):
    passes = []
    monkeypatch.setattr(module_under_test, "_hidden_states", counted(module_under_test._hidden_states, passes))
    model, calibration = tiny_model(), calibration_of(tiny_model())
    del passes[:]
    for _ in range(3):
        OjaKVCache.from_model(model, OjaKVConfig.preset("ojakv"), bases=calibration)
    assert len(passes) == 2  # by itself, and with a compressed cache


def counted(function, calls):
    def counting(*arguments):
        calls.append(function.__name__)
        return function(*arguments)

    return counting


def test_weights_that_are_elsewhere_and_compressed_models_are_not_tried(monkeypatch):
    def never(*_):
        raise AssertionError("no pass may run")

    monkeypatch.setattr(module_under_test, "_hidden_states", never)
    with torch.device("meta"):
        check_by_itself(tiny_model())
    spread = tiny_model()
    spread.model.layers[0].self_attn.q_proj.weight.ds_id = 3  # as DeepSpeed marks what it partitions
    check_by_itself(spread)
    compressed = tiny_model()
    dynakv.add_compressors(compressed, dynakv.DynaKVConfig())
    check_by_itself(compressed)
    check_by_itself(tiny_model(max_position_embeddings=8))


def test_tokens_that_mean_something_are_not_drawn():
    model = tiny_model()
    model.config.image_token_id, model.config.bos_token_id = 11, 12
    found = {int(each) for each in module_under_test.random_ids(model, 15, model.device).flatten()}
    model.config.image_token_id = next(iter(found - {12}))
    again = {int(each) for each in module_under_test.random_ids(model, 15, model.device).flatten()}
    assert len(found) == 15
    assert model.config.image_token_id not in again
