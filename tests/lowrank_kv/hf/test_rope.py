"""Rotation and its inverse with each family's own function, for every rotary kind."""

import copy
import importlib
import itertools

import pytest
import torch
from methods import METHODS, tiny_model
from transformers import AutoConfig, GPTNeoXConfig, GPTNeoXForCausalLM

from lowrank_kv.hf.rope import Rope, RopeHistory
from lowrank_kv.hf.rotary import Rotary, family_rotates_neighbours, rotates_halves
from lowrank_kv.ops import native
from lowrank_kv.ops.native.library import library
from lowrank_kv.stores.growable_tensor import GROWTH

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "rope_theta": 10000.0,
    },
}
# The methods that store keys before rotation.
ROTATING = [method for method in METHODS if method.name in ("dynakv", "ojakv-joint")]


def model_of(kind: str):
    return tiny_model(rope_parameters=KINDS[kind], max_position_embeddings=64 if kind == "dynamic" else 256)


def rope_of(model, positions: torch.Tensor) -> Rope:
    rotary = Rotary.from_model(model)
    return Rope(rotary.function, *rotary.cos_sin(positions, torch.float32), position_BT=positions)


def history_of(model) -> RopeHistory:
    return RopeHistory(Rotary.from_model(model))


@pytest.mark.parametrize("kind", KINDS)
def test_unrotate_inverts_rotate(kind):
    rope = rope_of(model_of(kind), torch.arange(100)[None])
    key = torch.randn(2, 2, 100, 16)
    torch.testing.assert_close(rope.unrotate(rope.rotate(key)), key, atol=2e-6, rtol=0)
    torch.testing.assert_close(rope.rotate(rope.unrotate(key)), key, atol=2e-6, rtol=0)


def test_a_rotation_that_cannot_be_tried_is_not_taken_for_the_usual_one():
    def refuses(query, key, cos, sin):
        raise RuntimeError

    assert not rotates_halves(refuses)


@pytest.mark.parametrize(
    ("family", "rotates_neighbours"),
    [
        *(("cohere", True), ("glm4", True), ("ernie4_5", True), ("helium", True)),
        *(("llama", False), ("gpt_neox", False), ("gemma3n_text", False)),
        ("nanochat", False),  # which turns halves the other way
        ("gpt_oss", False),  # whose cos and sin are half as wide
        ("gptj", False),  # which has a function of another form
        ("gpt2", False),  # and none
    ],
)
def test_families_that_rotate_neighbouring_dims_are_known_without_a_model(family, rotates_neighbours):
    assert family_rotates_neighbours(AutoConfig.for_model(family)) == rotates_neighbours


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "cohere"])
def test_the_fast_rotation_is_the_familys(family):
    function = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    # Cohere rotates neighbouring pairs, so the fast form must not be taken for it.
    assert rotates_halves(function) == (family != "cohere")
    angle = torch.rand(1, 30, 8 if family != "cohere" else 4) * 6
    angle = torch.cat([angle, angle], dim=-1) if family != "cohere" else angle.repeat_interleave(2, dim=-1)
    rope = Rope(function, angle.cos(), angle.sin())
    key = torch.randn(1, 2, 30, angle.shape[-1])
    expected = function(key, key, rope.cos_BTE, rope.sin_BTE)[1]
    torch.testing.assert_close(rope.rotate(key), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(rope.unrotate(expected), key, atol=2e-6, rtol=0)


def test_keys_are_rotated_at_any_positions():
    model = tiny_model()
    history = history_of(model)
    history.extend(rope_of(model, torch.arange(50)[None]), 50)
    key = torch.randn(2, 50, 16)
    full = history.rope().rotate(key[None])[0]
    for positions in (
        torch.arange(7, 30),
        torch.tensor([3, 4, 9]),
        torch.tensor([5, 9, 3, 8]),
        torch.tensor([49]),
        torch.arange(0),
    ):
        rotated = history.rotation(0, key.device).rotate(key[:, positions], positions)
        torch.testing.assert_close(rotated, full[:, positions], atol=1e-6, rtol=0)
        torch.testing.assert_close(history.unrotation_of(0)(rotated, positions), key[:, positions], atol=2e-6, rtol=0)


def test_partial_rotary_leaves_the_rest_alone():
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=50))
    rope = rope_of(model, torch.arange(30)[None])
    key = torch.randn(1, 4, 30, 16)
    torch.testing.assert_close(rope.unrotate(rope.rotate(key)), key, atol=2e-6, rtol=0)
    assert torch.equal(rope.rotate(key)[..., 8:], key[..., 8:])


@pytest.mark.parametrize("kind", KINDS)
def test_history_gives_back_each_token_s_rotation(kind):
    model = model_of(kind)
    history = history_of(model)
    cos = []
    for start, end in [(0, 50), (50, 51), (51, 100)]:
        rope = rope_of(model, torch.arange(start, end)[None])
        history.extend(rope, end)
        history.extend(rope, end)  # every layer reports the same tokens; only the first counts
        cos.append(rope.cos_BTE)
    assert torch.equal(history.rope().cos_BTE, torch.cat(cos, dim=1))
    history.crop(60)
    assert history.rope().cos_BTE.shape[1] == 60


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_a_token_is_written_into_room_to_grow(kind):
    model = model_of(kind)
    history = history_of(model)
    history.extend(rope_of(model, torch.arange(100)[None]), 100)
    addresses = []
    for position in range(100, 200):
        history.extend(rope_of(model, torch.tensor([[position]])), position + 1)
        addresses.append([tensor.data_ptr() for tensor in history.tensors()])
    moves = sum(before != after for before, after in itertools.pairwise(addresses))
    assert moves <= 100 / (100 * GROWTH)
    row_bytes = sum(held.rows.nbytes for held in history._kept)
    assert row_bytes <= sum(held.nbytes for held in history.tensors()) <= row_bytes * (1 + GROWTH)
    assert torch.equal(history.rope().cos_BTE, rope_of(model, torch.arange(200)[None]).cos_BTE)


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_history_is_that_of_what_generate_left_of_the_tokens(kind):
    """Cropped, copied, widened to a batch, reordered, forgotten."""
    model = model_of(kind)

    def extend(history: RopeHistory, first: list[int], count: int) -> None:
        history.extend(rope_of(model, torch.tensor(first)[:, None] + torch.arange(count)), history.length + count)

    def check(history: RopeHistory, positions: list[list[int]]) -> None:
        expected = rope_of(model, torch.tensor(positions))
        assert history.length == len(positions[0])
        for found, rows in ((history.rope().cos_BTE, expected.cos_BTE), (history.rope().sin_BTE, expected.sin_BTE)):
            assert torch.equal(found.contiguous(), rows)

    history = history_of(model)
    extend(history, [0], 20)
    extend(history, [20], 1)
    history.crop(15)
    extend(history, [40], 1)  # over what was cropped
    check(history, [[*range(15), 40]])
    twin = copy.deepcopy(history)
    history.crop(10)
    extend(history, [60], 3)
    check(twin, [[*range(15), 40]])
    extend(twin, [0, 7], 2)  # sequences that agreed so far
    check(twin, [[*range(15), 40, 0, 1], [*range(15), 40, 7, 8]])
    extend(twin, [3], 1)  # of all sequences
    twin.select(torch.tensor([1, 0, 1]))
    twin.crop(17)
    extend(twin, [1, 2, 3], 1)
    first, second = [*range(15), 40, 0], [*range(15), 40, 7]
    check(twin, [[*second, 1], [*first, 2], [*second, 3]])
    history.select(torch.tensor([0, 0]))  # one stands for all
    check(history, [[*range(10), 60, 61, 62]])
    history.clear()
    assert history.length == 0
    assert not history.tensors()
    extend(history, [5, 6], 4)
    check(history, [[5, 6, 7, 8], [6, 7, 8, 9]])


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_history_goes_on_outside_inference_mode(kind):
    model = model_of(kind)
    history = history_of(model)
    with torch.inference_mode():
        history.extend(rope_of(model, torch.arange(20)[None]), 20)
        history.extend(rope_of(model, torch.tensor([[20]])), 21)
    history.extend(rope_of(model, torch.tensor([[21]])), 22)
    with torch.inference_mode():
        history.extend(rope_of(model, torch.tensor([[22]])), 23)
    assert torch.equal(history.rope().cos_BTE, rope_of(model, torch.arange(23)[None]).cos_BTE)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ROTATING, ids=lambda method: method.name)
def test_full_rank_equals_the_dense_model_past_the_original_length(kind, method):
    model = model_of(kind)
    ids = torch.randint(1, 97, (2, 80), generator=torch.Generator().manual_seed(3))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    dense = model.generate(ids, **settings)
    make_cache = method.build(model, 1.0)
    assert torch.equal(model.generate(ids, past_key_values=make_cache(), **settings), dense)


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dynamic", "longrope")])
def test_compiled_code_rotates_by_the_modules_angles(kind):
    rotary = Rotary.from_model(model_of(kind))
    position = torch.tensor([[0, 5, 700, 1_000_003], [9, 8, 7, 6]], dtype=torch.int32)
    cos, sin = rotary.cos_sin(position, torch.float32)
    found = rotary.compiled_table(position, torch.float32)
    for ours, theirs in ((found.cos_BTF, cos), (found.sin_BTF, sin)):
        torch.testing.assert_close(ours, theirs[..., : cos.shape[-1] // 2], atol=3e-7, rtol=0)


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_compiled_angles_of_a_bf16_model_are_rounded_as_its_module_rounds_them():
    rotary = Rotary.from_model(model_of("default"))
    position = torch.arange(2000, dtype=torch.int32)[None]
    found = rotary.compiled_table(position, torch.bfloat16)
    for ours, theirs in zip((found.cos_BTF, found.sin_BTF), rotary.cos_sin(position, torch.bfloat16), strict=True):
        theirs = theirs[..., : ours.shape[-1]].float()
        assert torch.equal(ours, ours.bfloat16().float())
        assert (ours == theirs).float().mean() > 0.999  # fp32 numbers halfway between two of bf16 may round otherwise
        torch.testing.assert_close(ours, theirs, atol=0, rtol=2**-7)
    assert rotary.compiled_table(position, torch.float16) is None


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_slow_pairs_are_known_where_positions_follow_one_another():
    rotary = Rotary.from_model(model_of("default"))
    slow = native.slow_from(rotary.module.inv_freq)
    assert 0 < slow < len(rotary.module.inv_freq)

    def found(*rows: list[int]) -> int | None:
        return rotary.compiled_table(torch.tensor(rows, dtype=torch.int32), torch.float32).slow_from

    assert found([5, 6, 7], [0, 1, 2]) == slow
    assert found([9]) == slow
    assert found([5, 6, 7], [0, 0, 1]) is None
    assert found([5, 6, 8]) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_few_scattered_tokens_have_the_rotation_that_they_have_among_all(kind, batch):
    model, history = model_of(kind), history_of(model_of(kind))
    history.extend(rope_of(model, torch.arange(50) + 7 * torch.arange(batch)[:, None]), 50)
    places = torch.tensor([3, 40, 41, 8])
    alone = history.rope_at(batch - 1, places)
    rope = history.rope()
    for few, of_all in ((alone.cos_BTE, rope.cos_BTE), (alone.sin_BTE, rope.sin_BTE)):
        torch.testing.assert_close(few[0], of_all[batch - 1, places], atol=1e-6, rtol=0)


def test_a_module_that_does_more_than_its_frequencies_say_is_left_to_itself():
    rotary = Rotary.from_model(model_of("default"))
    rotary.module.register_forward_hook(lambda _, __, tables: tuple(2 * table for table in tables))
    assert not rotary.follows_frequencies
    history, positions = RopeHistory(rotary), torch.arange(7)[None]
    history.extend(Rope(rotary.function, *rotary.cos_sin(positions, torch.float32), position_BT=positions), 7)
    assert not history.keeps_rows
    assert torch.equal(
        history.rotation(0, torch.device("cpu")).table.cos_BTF[0],
        rotary.cos_sin(torch.arange(7)[None], torch.float32)[0][0, :, :8],
    )


def test_one_token_at_position_0_does_not_say_that_halves_agree():
    rotary = Rotary.from_model(tiny_model())
    angle = torch.tensor([[[0.0] * 4, [0.1, 0.2, 0.3, 0.4]]])  # of two positions, and of each dim
    assert rotary.table_of_rows(angle[:, :1].cos(), angle[:, :1].sin()) is not None
    assert rotary.table_of_rows(angle.cos(), angle.sin()) is None
