"""Where methods put their bytes: shares of tokens are those of the caches, residuals those of the bases."""

import pytest
import torch
from methods import calibration_of, dynakv_model, tiny_model

import dynakv
from evaluation.anatomy.measure import _described, _words
from evaluation.anatomy.residuals import STATE_SIDES, follows_text, residuals
from evaluation.anatomy.shares import states_of, token_shares
from evaluation.anatomy.spectra import spectra
from evaluation.page.sentence import in_words
from evaluation.peers.rotated import rotated_maker
from evaluation.reading import full_cache
from evaluation.subspace_metrics import relative_error
from lowrank_kv.calibration.activation_moments import KEY, VALUE
from ojakv import OjaKVCache, OjaKVConfig, make_plan


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 97, (96,), generator=torch.Generator().manual_seed(5))


def cache_of(model, calibration, name, **settings):
    plan = make_plan(calibration, OjaKVConfig.preset(name, **settings))
    return lambda: OjaKVCache(model, plan)


def test_shares_of_planned_tokens_are_the_bytes_a_cache_holds_of_them(model, calibration, ids):
    make = cache_of(
        model, calibration, "tokenwise-mixed", rate=0.3, num_sink_tokens=0, recent_window=0, update_period=1
    )
    states = states_of(model, ids)
    share_L2T = token_shares(make, states, 4)
    assert share_L2T.shape == (3, 2, len(ids))
    assert float(share_L2T.std(dim=2).max()) > 0
    cache = make()
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
    for index, layer in enumerate(cache.layers[:1]):  # its states are the uncompressed model's
        [sequence] = layer.sequences
        for side, store in enumerate((sequence.key, sequence.value)):
            held = store.coef.quantization.size_K[store.coef.class_of_rows()]
            torch.testing.assert_close(share_L2T[index, side] * 32 * 4, held.float())


def test_shares_of_a_row_of_several_layers_add_up_to_its_bytes(model, calibration, ids):
    settings = {"rate": 0.3, "num_sink_tokens": 0, "recent_window": 0, "update_period": 1}
    make = cache_of(model, calibration, "joint-mixed", own_directions=0, **settings)
    share_L2T = token_shares(make, states_of(model, ids), 4)
    cache = make()
    with torch.no_grad():
        model(ids[None], past_key_values=cache)  # a prompt, which all layers read exactly
    coef = cache.layers[-1].sequences[0].key.coef
    held_T = coef.quantization.size_K[coef.class_of_rows()].float()
    assert float(held_T.std()) > 0
    torch.testing.assert_close(share_L2T.sum(dim=(0, 1)) * 32 * 4, held_T)


def test_shares_of_learned_ranks_are_those_of_the_gates(ids):
    model = tiny_model()
    states = states_of(model, ids)
    dynakv_model(model, 0.5)
    maker, layers = dynakv.DynaKVCache.maker(model), dynakv.compressors(model)
    wanted = torch.stack(
        [
            torch.stack(
                [
                    each.encode(states[index, side][None])[1][0]
                    for each, side in ((layer.key, KEY), (layer.value, VALUE))
                ]
            )
            for index, layer in layers.items()
        ]
    )
    torch.testing.assert_close(token_shares(maker, states, 4), wanted / 32)
    dynakv.configure(model, cache_dtype="int8")
    rounded = token_shares(dynakv.DynaKVCache.maker(model), states, 4)
    assert float(rounded.max()) < 0.5  # a byte for four, and scales


def test_shares_of_rotated_integers_are_their_bits_and_scales(model, ids):
    make = rotated_maker(model, "rotated-int4")
    # Two heads of 16 numbers of half a byte, and a byte for the scale of each.
    wanted = torch.full((3, 2, len(ids)), 2 * (16 / 2 + 1) / (32 * 4))
    torch.testing.assert_close(token_shares(make, states_of(model, ids), 4), wanted)


def test_shares_of_equal_ranks_are_the_rate_and_other_caches_have_none(model, calibration, ids):
    states = states_of(model, ids)
    make = cache_of(model, calibration, "subspace-g", rate=0.25)
    torch.testing.assert_close(token_shares(make, states, 4), torch.full((3, 2, len(ids)), 0.25))
    assert token_shares(lambda: full_cache(model), states, 4) is None


def test_residuals_are_those_of_the_bases_and_marks_those_of_updates(model, calibration, ids):
    settings = {"rate": 0.25, "update_period": 16, "recent_window": 0, "num_sink_tokens": 0}
    moving, still = (
        cache_of(model, calibration, "ojakv-joint", tracker=tracker, **settings) for tracker in ("oja", "fixed")
    )
    assert follows_text(moving)
    assert not follows_text(still)
    states = states_of(model, ids, sides=STATE_SIDES)
    found = residuals(model, moving, ids, states, prefix=32, step=16)
    assert found["position"] == [32, 48, 64, 80]
    moved = len(calibration.geometry.layers) * 2 * OjaKVConfig.preset("ojakv-joint").prompt_steps
    assert found["updates"][0] == moved  # by the prompt
    assert sum(found["updates"][1:]) > 0
    assert found["keys"] != found["key_starts"]
    unmoved = residuals(model, still, ids, states, prefix=32, step=16)
    assert unmoved["keys"] == unmoved["key_starts"]
    assert unmoved["updates"] == [0] * 4
    plan = make_plan(calibration, OjaKVConfig.preset("ojakv-joint", tracker="fixed", **settings))
    wanted = [relative_error(states[index, KEY][32:48], pair[0].vectors_PWR[0]) for index, pair in plan.layers.items()]
    assert unmoved["keys"][0] == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)
    assert found["key_starts"] == unmoved["key_starts"]


def test_spectra_are_of_layers_and_of_heads():
    found = {each["states"]: each for each in spectra(calibration_of(tiny_model()))}
    joint, single = found["keys, unrotated, all heads of a layer"], found["keys, rotated, single heads"]
    assert (joint["width"], len(joint["parts"])) == (32, 3)
    assert (single["width"], len(single["parts"])) == (16, 6)
    for part in joint["parts"]:
        assert part["captured"] == sorted(part["captured"])
        assert part["captured"][-1] == 1
        assert part["ranks"] == sorted(part["ranks"])


def test_one_layer_has_no_halves():
    class Tokens:
        def decode(self, ids):
            return " just"

        def convert_ids_to_tokens(self, ids):
            return ["Ġjust"] * len(ids)

    described = _described(torch.tensor([[[0.5, 0.25]] * 2]), [1, 2], Tokens())
    assert (described["lower_layers"], described["upper_layers"]) == (None, None)
    assert [words.split(":")[0] for words, _ in in_words(described)] == ["Sinks dominate"]
    two = _described(torch.tensor([[[0.5, 0.25]] * 2, [[0.5, 0.5]] * 2]), [1, 2], Tokens())
    assert in_words(two)[-1] == (
        "Lower layers get more than deeper ones: The lower half of the layers takes 0.375, the upper half 0.500.",
        False,
    )


@pytest.mark.parametrize("loses_spaces", [False, True])
def test_tokens_are_told_their_words(loses_spaces):
    """Also where a token alone is decoded as the beginning of a text, as SentencePiece decodes it."""

    class Tokens:
        texts = ["<s>", "I", " am", " just", " proc", "rast", "ination", "."]

        def decode(self, ids):
            return self.texts[ids[0]].lstrip(" " * loses_spaces)

        def convert_ids_to_tokens(self, ids):
            return [self.texts[i].replace(" ", "▁" if loses_spaces else "Ġ") for i in ids]

    assert _words(range(8), Tokens()) == [
        "<s>",
        "I",
        "am",
        "just",
        "procrastination",
        "procrastination",
        "procrastination",
        "",
    ]
