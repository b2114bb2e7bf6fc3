"""Settings that are asked for have an effect, or are refused; vLLM is not needed to say so."""

import pytest
import torch
from methods import planned_model, tiny_model

import dynakv
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import first_layer, origin_of, retention, rows_differ, served
from lowrank_kv_vllm.settings import ServingConfig


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Checkpoints with a plan for all tokens, and with one for each class of them."""
    found = {}
    for classes in (1, 4):
        model = tiny_model(head_dim=32, vocab_size=257)
        planned_model(model, 0.3, token_classes=classes)
        found[classes] = tmp_path_factory.mktemp("planned") / "checkpoint"
        dynakv.save_compressor(model, found[classes])
    return found


@pytest.mark.parametrize("preset", ["static-mixed", "tokenwise-mixed", None])
@pytest.mark.parametrize("cache_dtype", ["int8", "int4", "model"])
def test_a_plan_says_how_coefficients_are_stored(preset, cache_dtype):
    """It would otherwise be served as static-joint-pf, without a plan."""
    with pytest.raises(UserError, match="`cache_dtype` must be left out with `preset: .*-mixed`.*`static-joint-pf`"):
        ServingConfig(bases="b", preset=preset, cache_dtype=cache_dtype)


def test_coefficients_without_a_plan_may_be_integers():
    assert ServingConfig(bases="b", preset="static-joint-pf", cache_dtype="int8").overrides() == {"cache_dtype": "int8"}
    assert ServingConfig(checkpoint="c", cache_dtype="int4").overrides() == {"cache_dtype": "int4"}


def test_what_is_left_out_has_a_default():
    settings = ServingConfig(bases="b")
    assert (settings.num_sinks, settings.margin) == (1, 0.03)
    settings = ServingConfig(bases="b", num_sink_tokens=0, page_margin=0)
    assert (settings.num_sinks, settings.margin) == (0, 0)
    assert retention(settings)["num_sink_tokens"] == 0
    for key in ("num_sink_tokens", "page_margin"):
        with pytest.raises(UserError, match=f"`{key}` must be zero or positive"):
            ServingConfig(bases="b", **{key: -1})


@pytest.mark.parametrize("preset", ["static-mixed", "static-joint-pf"])
def test_a_margin_needs_rows_that_differ(files, preset):
    settings = {"bases": files.settings["bases"], "preset": preset}
    origin_of(ServingConfig(**settings))
    with pytest.raises(UserError, match=r"`page_margin` must be left out where one plan.*; got 5\.0"):
        origin_of(ServingConfig(**settings, page_margin=5.0))


def test_a_trained_plan_for_all_tokens_has_no_margin(planned):
    origin_of(ServingConfig(checkpoint=str(planned[1])))
    with pytest.raises(UserError, match="`page_margin` must be left out where one plan"):
        origin_of(ServingConfig(checkpoint=str(planned[1]), page_margin=0.1))
    origin_of(ServingConfig(checkpoint=str(planned[4]), page_margin=0.1, num_sink_tokens=4))


def test_gates_keep_no_exact_tokens(gated):
    origin_of(ServingConfig(checkpoint=str(gated), page_margin=0.1, num_sink_tokens=0))
    with pytest.raises(UserError, match="`num_sink_tokens` must be left out .*`rank_policy: gate`.*; got 4"):
        origin_of(ServingConfig(checkpoint=str(gated), num_sink_tokens=4))


def test_rows_differ_where_pages_note_their_levels(files, gated, planned):
    bases = {"bases": files.settings["bases"], "rate": 0.3}
    every = [{**bases, "preset": preset} for preset in ("tokenwise-mixed", "static-mixed", "static-joint-pf")]
    every += [{"checkpoint": str(each)} for each in (gated, planned[1], planned[4])]
    found = []
    for settings in (ServingConfig(**each) for each in every):
        pages = served(settings, torch.float32, torch.device("cpu"))
        layout = pages.layout(0, block_size=32, sink_bytes=256)
        assert layout.keys.rows.differ == layout.values.rows.differ == rows_differ(settings)
        assert pages.margin == 0.03
        found.append(rows_differ(settings))
    assert found == [True, False, False, True, False, True]


@pytest.mark.parametrize("preset", ["tokenwise-mixed", "static-mixed"])
def test_a_rate_leaves_no_bit_for_the_first_layer_where_it_leaves_none_for_all(files, preset):
    settings = {"bases": files.settings["bases"], "preset": preset}
    with pytest.raises(UserError, match="give at least") as error:
        served(ServingConfig(**settings, rate=0.001), torch.float32, torch.device("cpu"))
    least = float(str(error.value).rsplit(" ", 1)[1])
    with pytest.raises(UserError, match=f"the rate 0.001 leaves no bit .* give at least {least}"):
        first_layer(ServingConfig(**settings, rate=0.001), torch.float32)
    found = first_layer(ServingConfig(**settings, rate=least), torch.float32)
    assert list(found.layers) == [0]


def test_the_first_layer_of_a_checkpoint_is_that_of_all(gated):
    settings = ServingConfig(checkpoint=str(gated))
    [found] = first_layer(settings, torch.float32).layers.values()
    expected = served(settings, torch.float32, torch.device("cpu")).layers[0]
    for one, other in zip(found, expected, strict=True):
        assert one.row_format == other.row_format
        assert torch.equal(one.decoder_RC, other.decoder_RC)


def test_pages_have_room_for_rows(files):
    pages = first_layer(ServingConfig(**files.settings, num_sink_tokens=32), torch.float32)
    with pytest.raises(UserError, match="`num_sink_tokens` must be below the block size, 32 tokens; got 32"):
        pages.layout(0, block_size=32, sink_bytes=256)
