"""Directories made to harm: they are refused before memory is taken, and nothing outside of them is touched."""

import json
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from methods import calibration_of, dynakv_model, planned_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dynakv
from dynakv.checkpoint import compressor_state, write_compressor
from dynakv.checkpoint_files import CONFIG, WEIGHTS, read_config
from dynakv.measured_rates import measured_rates
from dynakv.model_compressors import compressors
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.calibration_files import MOMENTS
from lowrank_kv.ops.native.packing import PackedGate
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.utils.errors import UserError

ROOT = Path(__file__).parents[3]
LITTLE = 200 << 20  # bytes that a refusal may take on top of what is there


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "compressor")
    return tmp_path / "compressor", model


def header(tensors: dict, size: int | None = None) -> bytes:
    """A safetensors file of this header, with no data."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


HUGE = {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}
OVERFLOWING = {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}
OVERLAPPING = {"dtype": "F32", "shape": [4], "data_offsets": [8, 4]}

HOSTILE = {
    "huge": header({"layers.0.key.projection.weight": HUGE}),
    "overflowing": header({"layers.0.key.projection.weight": OVERFLOWING}),
    "overlapping": header({"layers.0.key.projection.weight": OVERLAPPING}),
    "huge-header": header({}, size=1 << 62),
    "path": header({"../../outside": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0\0\0\0",
    "pickle": pickle.dumps({"weights": [1.0]}),
    "empty": b"",
}
# A name that looks like a path is a name like any other, and none that is asked for.
REASON_OF_PATH = {WEIGHTS: "missing .*unexpected .*outside", MOMENTS: "it has no layers"}


@pytest.mark.parametrize("name", [WEIGHTS, MOMENTS])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_tensors_are_refused_with_little_memory(saved, name, what, tmp_path):
    directory, _ = saved
    if name == MOMENTS:
        directory = tmp_path / "calibration"
        calibration_of(tiny_model()).save(directory, model="tiny", text=["random"])
    (directory / name).write_bytes(HOSTILE[what])
    _sign(directory, name)
    model, before, files = tiny_model(), resident(), set(tmp_path.rglob("*"))
    reason = REASON_OF_PATH[name] if what == "path" else "cannot be read"  # and not that its hash is wrong
    with pytest.raises(UserError, match=f"{directory.name}.*{reason}"):
        dynakv.attach(model, directory) if name == WEIGHTS else Calibration.load(directory)
    assert resident() - before < LITTLE
    assert set(tmp_path.rglob("*")) == files
    assert not dynakv.is_attached(model)


def _sign(directory: Path, name: str) -> None:
    """Make the hashes right, as whoever made the directory can."""
    from dynakv.checkpoint_files import SHA256, _hash_of_entries, _hash_of_file

    values = json.loads((directory / CONFIG).read_text())
    if name == MOMENTS:
        values["sha256"] = _hash_of_file(directory / name)
    else:
        values[SHA256] = {WEIGHTS: _hash_of_file(directory / name)}
        values[SHA256][CONFIG] = _hash_of_entries(values)
    (directory / CONFIG).write_text(json.dumps(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_named(saved, bad):
    directory, model = saved
    state = load_file(directory / WEIGHTS)
    name = sorted(state)[0]
    state[name].view(-1)[0] = bad
    shutil.rmtree(directory)
    directory.mkdir()
    write_compressor(model, directory, state)
    with pytest.raises(UserError, match=rf"{name} .*not finite"):
        dynakv.attach(tiny_model(), directory)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64])
def test_other_dtypes_are_refused_and_named(saved, dtype):
    directory, model = saved
    state = load_file(directory / WEIGHTS)
    name = "layers.0.key.projection.weight"
    state[name] = state[name].to(dtype)
    shutil.rmtree(directory)
    directory.mkdir()
    write_compressor(model, directory, state)
    with pytest.raises(UserError, match=rf"{name} .*{str(dtype).removeprefix('torch.')}, needed is float32"):
        dynakv.attach(tiny_model(), directory)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            *("geometry", {"layers": list(range(10**6)), "num_kv_heads": 2, "head_dim": 16}),
            "was made for 1000000 compressed layers of 2 KV heads × 16 dims",
        ),
        (
            *("geometry", {"layers": [0, 1, 2], "num_kv_heads": 2**40, "head_dim": 2**40}),
            f"was made for 3 compressed layers of {2**40} KV heads × {2**40} dims",
        ),
        ("compressor", {"granularity": 10**30}, f"`compressor.granularity` must be in 1..32 .*, got {10**30}"),
        (
            "compressor",
            {"threshold": "__import__('os').system('true')"},
            "`threshold` must be a number, got .*__import__",
        ),
        ("base_model", "../../etc/passwd", "was made on `passwd`"),
    ],
    ids=["layers", "heads", "granularity", "code", "path"],
)
def test_hostile_settings_are_refused_or_harmless(saved, key, value, message, tmp_path):
    directory, _ = saved
    values = json.loads((directory / CONFIG).read_text())
    values[key] = value
    (directory / CONFIG).write_text(json.dumps(values))
    _sign(directory, WEIGHTS)
    before, files = resident(), set(tmp_path.rglob("*"))
    if key == "base_model":
        model = tiny_model()
        model.config._name_or_path = "mine"
        with pytest.warns(UserWarning, match=message):
            dynakv.attach(model, directory)  # a name is compared, never opened
    else:
        with pytest.raises(UserError, match=message):
            dynakv.attach(tiny_model(), directory)
    assert resident() - before < LITTLE
    assert set(tmp_path.rglob("*")) == files


GATE = "layers.1.value.gate."
FAULTS = {
    "leading": (
        "plan",
        "leading",
        lambda tensor: tensor.fill_(50_000_000),
        "leading is 50000000, and must be from 1 to 32",
    ),
    "no leading": ("plan", "leading", lambda tensor: tensor.fill_(0), "leading is 0, and must be from 1 to 32"),
    "negative leading": ("plan", "leading", lambda tensor: tensor.fill_(-3), "leading is -3, and must be from 1 to 32"),
    "falling levels": ("plan", "levels", lambda tensor: tensor.copy_(tensor.flip(0)), r"levels of \d bits fall"),
    "a class without bits": ("plan", "bits", lambda tensor: tensor[1].zero_(), "bits has a class without any"),
    "no bits": (
        "plan",
        "bits",
        lambda tensor: tensor.zero_(),
        r"bits has a class without any .* at all: \[0, 0, 0, 0\]",
    ),
    "rising bits": ("plan", "bits", lambda tensor: tensor.copy_(tensor.flip(1)), "bits rise within a class"),
    "seven bits": ("plan", "bits", lambda tensor: tensor[0].fill_(7), "bits has 7, and a coefficient has 0 or 1, 2,"),
    "negative shares": ("plan", "shares", lambda tensor: tensor.neg_(), r"shares are \[-.* must be zero or positive"),
    "negative rank": ("nested", "rank", lambda tensor: tensor.fill_(-3), "rank is -3, and must be from 1 to 32"),
    "no rank": ("nested", "rank", lambda tensor: tensor.fill_(0), "rank is 0, and must be from 1 to 32"),
    "large rank": ("nested", "rank", lambda tensor: tensor.fill_(10**6), "rank is 1000000, and must be from 1 to 32"),
    "rank above all": (
        "soft_threshold",
        "rank",
        lambda tensor: tensor.fill_(33),
        "rank is 33, and must be from 0 to 32",
    ),
    "no energy": (
        "soft_threshold",
        "energy",
        lambda tensor: tensor.zero_(),
        "energy begins with 0, and must be positive",
    ),
    "no scale": ("gate", "input_scale", lambda tensor: tensor.zero_(), "input_scale has numbers that are not positive"),
}


def compressed(model, policy) -> None:
    """Give a model compressors of that kind."""
    if policy == "plan":
        planned_model(model, 0.3, token_classes=3)
    else:
        dynakv_model(model, 1.0, rank_policy=policy)


@pytest.mark.parametrize("fault", FAULTS)
def test_gates_that_cannot_serve_are_refused_and_named(fault, tmp_path):
    policy, name, change, message = FAULTS[fault]
    model = tiny_model()
    compressed(model, policy)
    state = compressor_state(model)
    change(state[GATE + name])
    write_compressor(model, tmp_path, state)
    stock = tiny_model()
    with pytest.raises(UserError, match=rf"{GATE}{message}.*; `{tmp_path}` is damaged: restore it"):
        dynakv.attach(stock, tmp_path, self_check=False)
    assert not dynakv.is_attached(stock)
    if policy != "gate":  # their rates are read from the weights
        with pytest.raises(UserError, match=GATE + message):
            measured_rates(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize("fault", ["not finite", *FAULTS])
def test_full_checkpoints_are_refused_as_compressors_are(fault, tmp_path):
    policy, name, change, message = FAULTS.get(
        fault, ("gate", "bias", lambda tensor: tensor[3].fill_(torch.nan), ".*has numbers that are not finite")
    )
    model = tiny_model()
    compressed(model, policy)
    with torch.no_grad():
        change(dict(compressors(model)[1].value.gate.state_dict())[name])
    dynakv.save_full(model, tmp_path / "full")
    with pytest.raises(UserError, match=rf"{GATE}({name} of `{tmp_path}/full` )?{message}"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "full")


def test_a_full_checkpoint_that_lacks_a_tensor_of_a_compressor_is_refused(tmp_path):
    """transformers warns, and would serve whatever stands in the memory that it takes for it."""
    model = tiny_model()
    dynakv_model(model, 1.0)
    dynakv.save_full(model, tmp_path / "full")
    path = tmp_path / "full/model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    del state["model.layers.1.self_attn.kv_compressor.value.gate.bias"]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"`{tmp_path}/full` has no {GATE}bias; the checkpoint is incomplete"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "full")


@pytest.fixture
def read_calibration(tmp_path):
    """The directory of a calibration that says what is read of a cache."""
    calibration_of(tiny_model(), read=True).save(tmp_path / "bases", model="tiny", text=["random"])
    return tmp_path / "bases"


def changed_moments(directory: Path, **changes) -> None:
    """Put other tensors in the place of those of these names, and make the hash right."""
    tensors = load_file(directory / MOMENTS)
    for name, change in changes.items():
        tensors[f"layers.1.{name}"] = change(tensors[f"layers.1.{name}"]).contiguous()
    save_file(tensors, directory / MOMENTS)
    _sign(directory, MOMENTS)


@pytest.mark.parametrize("leading", [0, -3, 33, 50_000_000])
def test_a_calibrations_gate_that_reads_beyond_a_row_is_refused_and_named(read_calibration, leading):
    changed_moments(
        read_calibration, value_read_gate=lambda gate: torch.cat([gate[:-1], torch.tensor([float(leading)])])
    )
    message = rf"`layers.1.value_read_gate.leading` must be from 1 to 32.*got {leading} in .*{MOMENTS}"
    with pytest.raises(UserError, match=message):
        Calibration.load(read_calibration)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    ["key", "query", "key_read_state", "value_read_gradient", "key_read_sample", "value_read_gate", "key_read_costs"],
)
def test_a_calibrations_numbers_that_are_not_finite_are_refused_and_named(read_calibration, name, bad):
    changed_moments(
        read_calibration,
        **{name: lambda tensor: tensor.flatten().index_fill(0, torch.tensor(3), bad).view(tensor.shape)},
    )
    with pytest.raises(
        UserError, match=rf"{MOMENTS} .*layers.1.{name} has numbers that are not finite; calibrate again"
    ):
        Calibration.load(read_calibration)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key", lambda tensor: tensor.to(torch.int64), "is of int64, not float32"),
        ("value", lambda tensor: tensor.double(), "is of float64, not float32"),
        ("query", lambda tensor: tensor[:-1], r"is \(31, 32\), not \(32, 32\)"),
        ("key_read_sample", lambda tensor: tensor.float(), "is of float32, not bfloat16"),
        ("key_read_sample", lambda tensor: tensor[:0], r"is \(0, 32\), not \(any, 32\)"),
        ("key_read_state", lambda tensor: tensor[0], r"is \(32,\), not \(32, 32\)"),
        ("value_read_gradient", lambda tensor: tensor[:2], r"is \(2, 32\), not \(32, 32\)"),
        ("value_read_gate", lambda tensor: tensor[None], r"is \(1, 68\), not \(68\)"),
        ("key_read_costs", lambda tensor: tensor[:1], r"is \(1, \d+\), not \(2, any\)"),
    ],
)
def test_a_calibrations_tensors_of_another_kind_are_refused_and_named(read_calibration, name, change, message):
    changed_moments(read_calibration, **{name: change})
    with pytest.raises(UserError, match=rf"layers.1.{name} {message}; calibrate again"):
        Calibration.load(read_calibration)


@pytest.mark.parametrize("leading", [0, 7])
def test_compiled_code_is_given_no_gate_that_reads_beyond_a_row(leading):
    gate = ImportanceGate(linear_C=torch.zeros(6), square_C=torch.zeros(6), rest_3=torch.zeros(3), leading=leading)
    with pytest.raises(UserError, match=f"`leading` must be from 1 to 6.*got {leading}"):
        PackedGate(gate, torch.zeros(1))


OPENED = """
import sys
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        mode, flags = arguments[1], arguments[2]
        if (mode and set(mode) & set("wax+")) or (flags or 0) & 3:
            written.append(arguments[0])
    elif event in ("os.rename", "os.mkdir", "os.symlink", "os.link"):
        written.append(str(arguments[0] if event == "os.mkdir" else arguments[1]))
    elif event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "socket.connect"):
        written.append(event)
import torch
sys.path.insert(0, "tests")
from methods import dynakv_model, tiny_model
import dynakv, ojakv
from methods import calibration_of
model = tiny_model()
dynakv_model(model, 0.4)
ids = torch.randint(1, 97, (1, 20))
model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)  # compiles what is compiled once
calibration = calibration_of(tiny_model())
sys.addaudithook(watch)
target = sys.argv[1]
dynakv.save_compressor(model, target + "/compressor")
calibration.save(target + "/bases", model="tiny", text=["random"])
stock = dynakv.attach(tiny_model(), target + "/compressor")
stock.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
other = tiny_model()
cache = ojakv.OjaKVCache.from_model(other, ojakv.OjaKVConfig.preset("ojakv"), bases=target + "/bases")
other.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, past_key_values=cache)
outside = [name for name in written if not name.startswith(target) and not name.startswith("/dev/null")]
assert not outside, outside
assert any(name.startswith(target) for name in written), "the hook must see something"
"""


def test_nothing_is_written_outside_of_the_directory_nor_unpickled_nor_started(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path / "given")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_tensors_are_never_read_by_pickle_and_no_code_of_a_model_is_trusted():
    parts = ("lowrank_kv", "dynakv", "ojakv", "training", "evaluation")
    for path in (each for part in parts for each in (ROOT / part).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for forbidden in ("torch.load", "pickle.load", "trust_remote_code=True", "shell=True", "os.system"):
            assert forbidden not in text, f"{path.relative_to(ROOT)} has {forbidden}"
        assert not re.search(r"(?<![\w.])eval\(", text), f"{path.relative_to(ROOT)} calls eval()"


def test_a_tensor_of_another_file_is_not_taken(saved, tmp_path):
    """A link to what is elsewhere is read as what it is: the hash decides."""
    directory, _ = saved
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(3)}, other)
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(other)
    with pytest.raises(UserError, match="SHA-256"):
        dynakv.attach(tiny_model(), directory)
