"""A token's keys and values in several layers as one row of coefficients."""

import copy
import dataclasses
import hashlib
import json
import signal
import sys
import warnings

import pytest
import torch
from families import SIZES
from methods import calibration_of, tiny_model
from safetensors.torch import load_file, save_file
from tensors_held import found_tensors
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE, observe
from lowrank_kv.calibration.bit_plans import coded_bases, coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan
from ojakv.planned_bytes import planned_rate

SHORT = {"update_period": 4, "recent_window": 3, "num_sink_tokens": 2}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def calibrations(model):
    """By how many of the three layers are coded together; with two the last one is by itself."""
    return {layers: calibration_of(model, read=True, joint_layers=layers) for layers in (1, 2, 3)}


@pytest.fixture(scope="module")
def calibration(calibrations):
    return calibrations[3]


def cache_of(model, calibration, name="joint-mixed", **overrides) -> OjaKVCache:
    if name == "joint-mixed":
        overrides = {"joint_layers": calibration.joint_layers, "own_directions_from": 8, **overrides}
    return OjaKVCache(model, make_plan(calibration, OjaKVConfig.preset(name, rate=0.25, **SHORT, **overrides)))


def read(model, cache, count=48, batch=1, seed=5):
    ids = torch.randint(1, 97, (batch, count), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model(input_ids=ids[:, : count - 8], past_key_values=cache)
        return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in ids[:, -8:].split(1, 1)], 1)


def stores_of(cache, sequence=0):
    """The stores that read rows in each group of layers, the one that holds them first."""
    groups = {id(layer.row_group): layer.row_group.layers for layer in cache.compressed_layers()}
    for layers in groups.values():
        sequences = [layer.sequences[sequence] for layer in layers]
        stores = [store for each in sequences for store in (each.key, each.value)]
        holder = sequences[-1].key
        yield [holder, *(store for store in stores if store is not holder)]


def test_moments_of_all_are_those_of_their_rows(model, calibrations):
    blocks = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(3))
    settings = {"read_gradients": True, "joint_layers": 2, "progress": False, "self_check": False}
    found = Calibration.from_text(model, blocks, **settings).joint_read_states(2)
    assert list(found) == [(0, 1), (2,)]
    part = ExactTokens().read_by_some(160)
    rows: dict[tuple[int, str], list[torch.Tensor]] = {(i, side): [] for i in range(3) for side in (KEY, VALUE)}
    for block in blocks:
        observe(
            model, block[None], lambda i, side, x: rows[i, side].append(x[part]), sides=(KEY, VALUE), progress=False
        )
    for group, states in found.items():
        sides = [torch.cat(rows[i, side]) for i in group for side in (KEY, VALUE)]
        all_of_them = torch.cat(sides, dim=1).double()
        wanted = all_of_them.mT @ all_of_them / len(all_of_them)
        torch.testing.assert_close(states.state_CC.double(), wanted, rtol=1e-4, atol=1e-6)
        width = sides[0].shape[1]
        assert float(states.gradient_CC[:width, width:].abs().max()) > 0


def test_a_calibration_says_it_again_from_a_disk(tmp_path, calibrations):
    for layers, calibration in calibrations.items():
        calibration.save(tmp_path / "bases", model="tiny", text=["made up"])
        found = Calibration.load(tmp_path / "bases").joint_read_states(layers)
        for group, states in calibration.joint_read_states(layers).items():
            for name in ("state_CC", "gradient_CC"):
                upper, again = (getattr(each, name).triu() for each in (states, found[group]))
                assert torch.equal(upper, again)
                assert torch.equal(getattr(found[group], name), getattr(found[group], name).mT)
            assert torch.equal(found[group].sample_NC, states.sample_NC)
            assert torch.equal(found[group].fit.gate.linear_C, states.fit.gate.linear_C)


def test_an_older_calibration_serves_other_presets_and_is_refused_for_this_one(tmp_path, model, calibration):
    """One whose file says nothing of layers together, as those that were written before."""
    apart = {i: {side: sides[side] for side in (KEY, VALUE)} for i, sides in calibration.read.items()}
    dataclasses.replace(calibration, read=apart, joint_layers=0).save(tmp_path / "old", model="tiny", text=["made up"])
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["joint_layers"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    older = Calibration.load(tmp_path / "old")
    read(model, cache_of(model, older, "tokenwise-mixed"))
    with pytest.raises(
        UserError, match=r"was made before layers were coded together, and `joint_layers` is 3; make it"
    ):
        cache_of(model, older, joint_layers=3)


def test_a_calibration_of_few_tokens_is_told_of(model, calibration):
    """A row of three layers has 192 numbers here."""
    for tokens in (383, 384):
        known = dataclasses.replace(calibration, tokens=tokens)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache_of(model, known)
            cache_of(model, known, "adaptive-mixed")
        wanted = ["the calibration is of 383 tokens, too few for rows of 192 numbers"] if tokens < 384 else []
        assert [str(each.message).partition(" (")[0] for each in told] == wanted


def test_a_calibration_of_other_layers_is_refused(model, calibrations):
    with pytest.raises(UserError, match=r"was made with `joint_layers: 2`, and `joint_layers` is 3; make it anew with"):
        cache_of(model, calibrations[2], joint_layers=3)


def test_a_file_of_which_a_part_is_missing_is_refused(tmp_path, calibration):
    directory = tmp_path / "bases"
    calibration.save(directory, model="tiny", text=["made up"])
    flat = load_file(directory / "moments.safetensors")
    del flat["layers.2.key_value_read_gate"]
    save_file(flat, directory / "moments.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["sha256"] = hashlib.sha256((directory / "moments.safetensors").read_bytes()).hexdigest()
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"it has no layers\.2\.key_value_read_gate; calibrate again"):
        Calibration.load(directory)


def test_what_they_have_in_common_is_coded_once():
    """Where values are a rotation of keys, a row of both needs far fewer bits for the same loss."""
    model = tiny_model()
    width = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(8))).Q
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.copy_(turn @ layer.self_attn.k_proj.weight.data)
    calibration = calibration_of(model, blocks=16, read=True, joint_layers=1)
    apart, together = (coded_model(calibration, 0.2, joint_layers=count).loss_per_rate for count in (0, 1))
    assert together < 0.5 * apart, (together, apart)
    assert {tuple(sides) for sides in coded_bases(calibration, 0.2, joint_layers=1).values()} == {(KEY_VALUE,)}


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["joint-mixed", "static-mixed"])
def test_all_read_one_row_through_every_change(model, calibrations, name, layers):
    cache = cache_of(model, calibrations[layers], name, joint_layers=layers)
    read(model, cache, batch=2)
    twin = copy.deepcopy(cache)
    following = torch.randint(1, 97, (3, 1), generator=torch.Generator().manual_seed(6))

    def check(each: OjaKVCache, batch: int) -> None:
        """Once it has read on, which tells stores where their rows are."""
        with torch.no_grad():
            model(input_ids=following[:batch], past_key_values=each)
        for b in range(batch):
            for holder, *others in stores_of(each, b):
                assert holder.coef.length > 0
                for store in others:
                    assert store.coef is holder.coef
                    assert getattr(store, "own", None) is getattr(holder, "own", None)

    check(cache, 2)
    cache.crop(-18)
    check(cache, 2)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    check(cache, 3)
    check(twin, 2)
    for (mine, *_), (other, *_) in zip(stores_of(cache), stores_of(twin), strict=True):
        assert mine.coef is not other.coef


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_byte_is_counted_once(model, calibrations, layers):
    cache = cache_of(model, calibrations[layers])
    read(model, cache)
    reported = [tensor for _, tensor in cache.tensors_by_kind() if tensor.numel()]
    assert found_tensors(cache) <= {tensor.untyped_storage().data_ptr() for tensor in reported}
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in reported]
    assert len({place for place, _ in places}) == len(places)
    assert cache.nbytes == sum(nbytes for _, nbytes in places)
    packed = sum(tensor.nbytes for holder, *_ in stores_of(cache) for _, tensor in holder.coef.tensors_by_kind())
    apart = cache_of(model, calibrations[layers], "adaptive-mixed", own_directions_from=8)
    read(model, apart)
    of_both = [store.coef for layer in apart.layers for each in layer.sequences for store in (each.key, each.value)]
    assert packed <= 1.05 * sum(tensor.nbytes for each in of_both for _, tensor in each.tensors_by_kind())


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_copy_holds_nothing_of_the_cache_it_was_made_of(model, calibrations, layers):
    cache = cache_of(model, calibrations[layers])
    read(model, cache, batch=2)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    counted = {tensor.untyped_storage().data_ptr() for _, tensor in twin.tensors_by_kind()}
    assert found_tensors(twin) <= counted


@torch.no_grad()
def test_a_rotation_is_dropped_where_the_last_layer_does_not_rotate():
    """It compresses keys that others have rotated, whose table no cache counts."""
    sizes = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
    model = SmolLM3ForCausalLM(SmolLM3Config(**{**SIZES, **sizes, "max_position_embeddings": 512})).eval()
    cache = cache_of(model, calibration_of(model, read=True, joint_layers=2))
    ids = torch.randint(1, 97, (1, 300), generator=torch.Generator().manual_seed(4))
    for part in (ids, *ids[:, :8].split(1, 1)):
        model(part, past_key_values=cache)
        counted = {tensor.untyped_storage().data_ptr() for _, tensor in cache.tensors_by_kind()}
        assert found_tensors(cache) <= counted


def test_a_prompt_that_stays_at_full_rank_has_directions_of_its_own(model):
    """As where keys and values are coded apart; and as is foretold."""
    cache = cache_of(model, calibration_of(model, read=True, words=6), keep_prompt_full_rank=True)
    read(model, cache)
    [stores] = stores_of(cache)
    assert all(store.own is not None for store in stores)
    planned = planned_rate(cache.layers[0].plan, prompt=40, tokens=48, itemsize=4)
    assert planned == pytest.approx(cache.rate, rel=0.02)


def test_layers_on_two_devices_have_no_row_together(model, calibration):
    cache, state = cache_of(model, calibration), torch.zeros(1, 2, 4, 16)
    cache.layers[0].lazy_initialization(state, state)
    with pytest.raises(UserError, match="layers 0 and 1 are coded together .* on cpu and meta; load the model on one"):
        cache.layers[1].lazy_initialization(state.to("meta"), state.to("meta"))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_attention_over_shared_rows_is_attention_over_what_they_rebuild(model, calibrations, layers):
    """Both ways to attend read the same rows: their logits differ by rounding alone."""
    found, rebuilt = (
        read(model, cache_of(model, calibrations[layers], attention=attention), batch=2)
        for attention in ("low_rank", "reconstructed")
    )
    torch.testing.assert_close(found, rebuilt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_rows_hold_what_a_plain_computation_says(model, calibrations, layers):
    """Keys and values that are read back are the states, coded by the group's matrices, packed by its plan and decoded."""
    calibration = calibrations[layers]
    config = OjaKVConfig.preset("static-mixed", rate=0.5, joint_layers=layers, num_sink_tokens=0, recent_window=0)
    cache = OjaKVCache(model, make_plan(calibration, config))
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(9))
    states: dict[tuple[int, str], torch.Tensor] = {}
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    observe(model, ids, lambda i, s, x: states.__setitem__((i, s), x.float()), sides=(KEY, VALUE), progress=False)
    coded = coded_bases(calibration, 0.5, joint_layers=layers)
    for layer in cache.layers:
        layer.row_group.find_rows(layer)
    for group in cache.layers[0].plan.row_groups():
        coder = coded[group[-1]][KEY_VALUE]
        row_NC = torch.cat([states[i, side] for i in group for side in (KEY, VALUE)], dim=1)
        kept = coder.plan.num_coefficients
        rebuilt_NC = coder.plan.rounded((row_NC @ coder.encoder_CC)[:, :kept]) @ coder.decoder_CC[:kept]
        parts = iter(rebuilt_NC.split(rebuilt_NC.shape[1] // (2 * len(group)), dim=1))
        for index in group:
            [sequence] = cache.layers[index].sequences
            for store in (sequence.key, sequence.value):
                found_NC = store.operands().rebuild().transpose(0, 1).flatten(1)
                torch.testing.assert_close(found_NC, next(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", range(12))
def test_an_interrupt_while_layers_compress_together_leaves_all_of_them_waiting(
    request, model, calibration, monkeypatch, after
):
    """Ctrl-C at one of the calls of a group's compression; the cache then goes on as one that was never interrupted."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ids = torch.randint(1, 97, (1, 48), generator=torch.Generator().manual_seed(5))
    whole, cut = (cache_of(model, calibration) for _ in range(2))
    group = cut.layers[0].row_group
    compress, calls = group.compress, []

    def interrupted(*arguments):
        def trace(frame, event, _):
            if frame.f_code.co_filename == torch.amp.autocast_mode.__file__:
                return  # interrupted there, torch takes every later test for one under autocast, in its count of them
            calls.append(frame.f_code.co_name)
            if len(calls) == 5 * after + 1:
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(trace)
        try:
            compress(*arguments)
        finally:
            sys.setprofile(None)

    with torch.no_grad():
        for cache in (whole, cut):
            model(input_ids=ids[:, :30], past_key_values=cache)
        monkeypatch.setattr(group, "compress", interrupted)
        length, was_cut = cut.get_seq_length(), False
        for position in range(30, 40):
            model(input_ids=ids[:, position : position + 1], past_key_values=whole)
            length = cut.get_seq_length()
            try:
                model(input_ids=ids[:, position : position + 1], past_key_values=cut)
            except KeyboardInterrupt:
                was_cut = True
                monkeypatch.setattr(group, "compress", compress)
                cut.crop(length - cut.get_seq_length())
                rows = [each.positions.num_low_rank for layer in cut.layers for each in layer.sequences]
                assert len(set(rows)) == 1
                assert all(holder.coef.length == rows[0] for holder, *_ in stores_of(cut))
                model(input_ids=ids[:, position : position + 1], past_key_values=cut)
        found, wanted = (model(input_ids=ids[:, 40:], past_key_values=cache).logits for cache in (cut, whole))
    assert was_cut
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"eviction": {"keep_ratio": 0.5}}, "`eviction.keep_ratio` must be 1 with `joint_layers: 3`"),
        ({"prefill": "reconstructed"}, "`prefill` must be exact with `joint_layers: 3`"),
        ({"full_rank_ratio": 0.1}, "`full_rank_ratio` must be 0 with `joint_layers`"),
        ({"joint_layers": -1}, "`joint_layers` must be zero or positive"),
        (
            {"cache_dtype": "model", "own_directions": 0, "token_classes": 1},
            "`joint_layers` must be 0 with `cache_dtype",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        OjaKVConfig.preset("joint-mixed", **overrides)


def test_one_layer_s_keys_and_values_can_be_evicted(model, calibrations):
    cache = cache_of(model, calibrations[1], eviction={"keep_ratio": 0.5})
    read(model, cache)
    for holder, value in stores_of(cache):
        assert value.coef is holder.coef
        assert 0 < holder.coef.length < 40 - 5
