"""Strict configuration: what the YAML says, what the command line overrides, what is refused."""

import ast
import dataclasses
import math
from pathlib import Path

import pytest

from dynakv.rate_config import RateConfig
from dynakv.training_config import DatasetConfig, OptimizerConfig, TrainConfig
from evaluation.compare import CompareConfig
from evaluation.sweep import SweepConfig, Variant
from lowrank_kv.eviction import Eviction
from lowrank_kv.utils.config import build, configuration, option, parse_config, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import expand
from lowrank_kv.utils.text_data import CalibrationText

ROOT = Path(__file__).parents[3]

TEXT = {"name": "t.txt"}
ROOT_YAML = "model: somewhere\ndataset: {name: t.txt}\noptimizer:\n  steps: 7\n  lr_gate: 3e-3\n"


def parse(tmp_path, *arguments: str, text: str = ROOT_YAML) -> TrainConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return parse_config(TrainConfig, ["--config", str(path), *arguments], description="")[0]


def test_file_then_command_line(tmp_path):
    chosen = ["--optimizer.steps", "9", "--rate.target_retain_rate", "0.3"]
    config = parse(tmp_path, *chosen, "--dataset.name", "a.txt,b.txt", "--dataset.weights", "[2, 1]")
    assert (config.optimizer.steps, config.optimizer.lr_gate) == (9, 3e-3)
    assert (config.dataset.name, config.dataset.weights) == (["a.txt", "b.txt"], [2, 1])
    assert config.rate.target_retain_rate == 0.3
    assert parse(tmp_path, "--dataset.heldout", "").dataset.heldout == []
    gates = ["--compressor.rank_policy", "gate"]
    assert parse(tmp_path, *gates, "--rate.target_retain_rate", "null").rate.target_retain_rate is None


@pytest.mark.parametrize("told", ["null,sample-10BT", "[null, sample-10BT]", "none,sample-10BT"])
def test_one_of_several_data_sets_may_need_no_subset(tmp_path, told):
    names = ["--dataset.name", "org/a,org/b"]
    config = parse(tmp_path, *names, "--dataset.subset", told)
    assert config.dataset.subset == [None, "sample-10BT"]
    assert parse(tmp_path, text="model: m\ndataset: {name: [a, b], subset: [null, x]}\n").dataset.subset == [None, "x"]
    assert parse(tmp_path, *names, "--dataset.subset", "null").dataset.subset is None
    with pytest.raises(UserError, match="`dataset.subset.0.` must be of type str, got 7"):
        parse(tmp_path, *names, "--dataset.subset", "[7, null]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\ndataset: {name: t}\noptimizer:\n  stpes: 3\n",
            "unknown key `optimizer.stpes`.*did you mean `steps`",
        ),
        ("model: m\ndataset: {name: t}\nzebra: 3\n", "unknown key `zebra`.*valid keys: average_checkpoints"),
        ("optimizer:\n  steps: 3\n", "`model` is missing"),
        ("model: m\n", "`dataset.name` is missing from .*c.yaml; hub ids or .txt"),
        ("model: m\ndataset:\n  weights: [1]\n", "`dataset.name` is missing"),
        (
            "model: m\ndataset: {name: t}\noptimizer:\n  steps: three\n",
            "`optimizer.steps` must be of type int, got 'three'",
        ),
        ("model: m\ndataset: {name: t}\noptimizer:\n  steps: 0\n", "`optimizer.steps` must be at least 1; got 0"),
        (
            "model: m\ndataset: {name: t}\ncompressor:\n  mask: sideways\n",
            "`compressor.mask` must be one of hard.*got 'sideways'",
        ),
        ("model: m\ndataset: {name: t}\nrate:\n  target_retain_rate: 1.5\n", "target_retain_rate.*got 1.5"),
        (
            "model: m\ndataset: {name: t}\ncompressor:\n  threshold: 2\n",
            "`compressor.threshold` must be between 0 and 1",
        ),
        (
            "model: m\ndataset: {name: t}\ncompressor:\n  rank_policy: gate\n  group_size: 8\n",
            "`compressor.group_size` must be none",
        ),
        (
            "model: m\ndataset: {name: t}\ncompressor:\n  eviction:\n    keep_ratio: 0\n",
            r"`compressor.eviction.keep_ratio` must be in \(0, 1\]",
        ),
        (
            "model: m\ndataset: {name: t}\noptimizer:\n  warmup_ratio: 2\n",
            "`optimizer.warmup_ratio` must be between 0 and 1; got 2.0",
        ),
        ("model: m\ndataset:\n  name: []\n", r"`dataset.name` must be at least one data set; got \[\]"),
        ("model: m\ndataset: {name: t}\nrate:\n  alpha: -1\n", "`rate.alpha` must be zero or positive"),
        ("model: m\ndataset: {name: t}\noptimizer: 3\n", "`optimizer` must be a section"),
        ("model: [", "not valid YAML"),
        ("model: m\ndataset: {name: t}\nmodel: n\n", "not valid YAML: `model` stands there twice"),
        ("model: m\ndataset:\n  name: t\n  name: u\n", "`name` stands there twice"),
        ("model: m\ndataset: {name: t}\noptimizer: {steps: 0100}\n", "`0100` is no decimal number"),
        ("model: m\ndataset: {name: t}\noptimizer: {steps: 1:30}\n", "`1:30` is no decimal number"),
        ("model: 2026-02-30\n", "not valid YAML: day is out of range"),
        ("model: !!bool x\n", "not valid YAML"),
        ("model: " + 5000 * "[", "not valid YAML"),
        ("- 3\n", "must hold keys and values"),
        ("model: ${NO_SUCH_VARIABLE}/m\n", "NO_SUCH_VARIABLE, which is not set"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        parse(tmp_path, text=text)


@pytest.mark.parametrize("value", ["-inf", "nan", "1e999", ".inf", "1" + 400 * "0"])
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("optimizer.max_grad_norm", "0 does not clip"),
        ("max_loss_increase", "0 never does"),
        ("rate.alpha", "by default"),
        ("dataset.weights", "equal by default"),
    ],
)
def test_numbers_are_finite(tmp_path, key, remedy, value):
    with pytest.raises(
        UserError, match=rf"^`{key}` must be finite \(.*{remedy}.*\); got .* in .*c.yaml and the command"
    ):
        parse(tmp_path, f"--{key}={value}")


def test_every_float_of_every_section_is_finite():
    def floats(cls, prefix=""):
        for field in dataclasses.fields(cls):
            if "section" in field.metadata:
                yield from floats(field.metadata["section"], f"{prefix}{field.name}.")
            elif "float" in str(field.type):
                yield f"{prefix}{field.name}"

    keys = list(floats(TrainConfig))
    assert len(keys) >= 25
    for key in keys:
        values = {"model": "m", "dataset": {**TEXT}}
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = math.inf
        with pytest.raises(UserError, match=f"`{key}` must be finite .*; got .*inf"):
            TrainConfig(**values)


def test_unknown_argument_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="--optimizer.step`; did you mean `--optimizer.steps`"):
        parse(tmp_path, "--optimizer.step", "3")


@pytest.mark.parametrize("words", [["--dataset.heldout-share=0.5"], ["--dataset.heldout-share", "0.5"]])
def test_hyphens_and_underscores_mean_the_same(tmp_path, words):
    assert parse(tmp_path, *words).dataset.heldout_share == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--steps", "did you mean `--optimizer.steps`"),
        ("--target_retain_rate", "did you mean `--rate.target_retain_rate`"),
        ("--rate", "did you mean one of `--rate.alpha`, `--rate.target_retain_rate`, "),
        ("--corpus", "valid arguments: --average_checkpoints, "),
    ],
)
def test_keys_are_known_without_their_sections(tmp_path, given, message):
    with pytest.raises(UserError, match=f"unknown argument `{given}`; {message}"):
        parse(tmp_path, given, "0.1")


def test_a_switch_alone_is_true(tmp_path):
    assert parse(tmp_path, "--dataset.streaming", "--seed", "3").dataset.streaming
    assert not parse(tmp_path, "--dataset.streaming", "false").dataset.streaming


def test_what_argparse_refuses_is_one_paragraph(tmp_path):
    with pytest.raises(UserError, match="--seed: expected one argument; see `.* --help`"):
        parse(tmp_path, "--seed")


def test_an_option_that_is_given_twice_is_refused(tmp_path):
    """The last would count, and the first be lost."""
    for again in (["--seed", "4"], ["--seed=4"]):
        with pytest.raises(UserError, match="`--seed` is given twice"):
            parse(tmp_path, "--seed", "3", *again)
    with pytest.raises(UserError, match="given twice.*a list is one value"):
        parse(tmp_path, "--dataset.name", "a.txt", "--dataset.name", "b.txt")
    with pytest.raises(UserError, match="`--heldout_blocks` is given twice"):
        parse(tmp_path, "--heldout_blocks", "3", "--heldout-blocks", "4")


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["--optimizer.steps", "three"], r".*c.yaml and the command line"),
        ([], r".*c.yaml"),
    ],
)
def test_what_holds_a_wrong_value_is_named(tmp_path, arguments, source):
    with pytest.raises(UserError, match=f"`optimizer.(steps|warmup_ratio)` .* in {source}$"):
        parse(tmp_path, *arguments, text="model: m\ndataset: {name: t}\noptimizer: {warmup_ratio: 2}\n")


def test_every_value_is_checked_once(monkeypatch):
    """Twice would expand what an environment variable says a second time."""
    monkeypatch.setenv("DIRECTORY", "${NOT_EXPANDED}")
    config = build(
        TrainConfig, {"model": "m", "dataset": TEXT, "compressor": {}, "calibration": {"bases": "${DIRECTORY}"}}
    )
    assert config.calibration.bases == "${NOT_EXPANDED}"


def test_a_file_of_another_encoding_is_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("model: caf\xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match="the configuration `.*latin.yaml` is not UTF-8 text: .*; convert it"):
        parse_config(TrainConfig, ["--config", str(tmp_path / "latin.yaml")], description="")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.yaml"):
        parse_config(TrainConfig, ["--config", str(tmp_path / "nowhere.yaml")], description="")


def test_home_expands(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWRANK_KV_HOME", str(tmp_path))
    assert expand("${LOWRANK_KV_HOME}/model") == f"{tmp_path}/model"
    monkeypatch.setenv("LOWRANK_KV_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("${LOWRANK_KV_HOME}/model") == f"{tmp_path}/.cache/lowrank-kv/model"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TrainConfig(model="m", dataset=TEXT, dtype="float8"),
            "`dtype` must be one of float32, bfloat16, auto; got 'float8' in Tr",
        ),
        (lambda: TrainConfig(model=7, dataset=TEXT), "`model` must be of type str, got 7 in TrainConfig"),
        (
            lambda: TrainConfig(model="m", dataset=TEXT, rate={"alpha": -1}),
            "`rate.alpha` must be zero or positive; got -1.0",
        ),
        (
            lambda: TrainConfig(model="m", dataset=TEXT, rate=RateConfig(alpha=-1)),
            "`alpha` must be zero or positive; got -1.0",
        ),
        (
            lambda: TrainConfig(model="m", dataset=TEXT, compressor={"eviction": {"kernel_size": 2}}),
            "`compressor.eviction.kernel_size` must be odd",
        ),
        (lambda: OptimizerConfig(steps="7"), "`steps` must be of type int, got '7' in OptimizerConfig"),
        (lambda: OptimizerConfig(steps=True), "`steps` must be of type int, got True"),
        (lambda: DatasetConfig(name="t.txt", weights=["much"]), r"`weights\[0\]` must be a number, got 'much'"),
        (
            lambda: DatasetConfig(name=["a", "b"], weights=[1e308, 1e308]),
            "`weights` must be positive numbers, of a finite",
        ),
        (
            lambda: OptimizerConfig(max_grad_norm=math.inf),
            "`max_grad_norm` must be finite .*; got inf in OptimizerConfig",
        ),
        (lambda: CalibrationText(tokens=1.5), "`tokens` must be of type int"),
        (lambda: Eviction(keep_ratio=2), r"`keep_ratio` must be in \(0, 1\]"),
        (lambda: Variant(label="a b"), "`label` must be letters, digits"),
        (lambda: sweep(texts=[{"label": "a", "name": "a", "heldout_share": 2}]), r"`texts\[0\].heldout_share` must be"),
        (lambda: sweep(texts=[{"label": "a", "nmae": "a"}]), r"unknown key `texts\[0\].nmae`"),
        (lambda: sweep(calibration={"length": 0}), "`calibration.length` must be at least 1"),
        (lambda: sweep(dtype="float8"), "`dtype` must be one of float32"),
        (
            lambda: CompareConfig(model="m", methods=[{"peer": "rotated-int4"}], texts=[], prefix="many"),
            "`prefix` must be of type int",
        ),
    ],
)
def test_a_configuration_checks_itself_whoever_builds_it(make, message):
    with pytest.raises(UserError, match=f"^{message}"):
        make()


def sweep(**values) -> SweepConfig:
    return SweepConfig(**{"train": "t.yaml", "targets": [0.5], "texts": [{"label": "a", "name": "a.txt"}], **values})


def test_a_configuration_made_by_hand_takes_what_a_file_would():
    assert CalibrationText(name="abc").name == ["abc"]
    assert sweep().texts[0].split == "test"
    config = TrainConfig(model="m", dataset=TEXT, optimizer={"steps": 3, "max_grad_norm": 2})
    assert config == build(TrainConfig, {"model": "m", "dataset": TEXT, "optimizer": {"steps": 3, "max_grad_norm": 2}})
    assert isinstance(config.optimizer.max_grad_norm, float)


def test_what_a_subclass_adds_is_checked_beside_what_it_has():
    @configuration
    class Longer(CalibrationText):
        times: int = option(1, help="")

        def __post_init__(self):
            super().__post_init__()
            require(self.times >= 1, "times", self.times, "at least 1")

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Plain(Longer):
        places: int = option(1, help="")

    for key, wrong, message in (
        ("times", 0, "`times` must be at least 1"),
        ("times", "2", "`times` must be of type int"),
        ("tokens", 0, "`tokens` must be at least 1"),
        ("places", "2", "`places` must be of type int"),
    ):
        for cls in (Longer, Plain) if key != "places" else (Plain,):
            with pytest.raises(UserError, match=message):
                cls(**{key: wrong})


def test_every_class_of_options_is_a_configuration():
    """One made a plain dataclass would check nothing where it is built by hand."""
    roots = ("lowrank_kv", "dynakv", "ojakv", "training", "evaluation", "lowrank_kv_cli", "benchmarks")
    found = {}
    for path in (path for root in roots for path in (ROOT / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(map(_is_option, node.body)):
                found[node.name] = [ast.unparse(decorator) for decorator in node.decorator_list]
    assert len(found) >= 16
    # These inherit their checks.
    del found["CalibrateConfig"], found["MeasureConfig"]
    assert {name for name, decorators in found.items() if decorators != ["configuration"]} == set()


def _is_option(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node.target).startswith("option(")


def test_configurations_are_frozen():
    config = build(TrainConfig, {"model": "m", "dataset": TEXT})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_help_lists_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainConfig, ["--help"], description="")
    text = " ".join(capsys.readouterr().out.split())

    def leaves(cls, prefix=""):
        for field in dataclasses.fields(cls):
            if field.metadata.get("section"):
                yield from leaves(field.metadata["section"], f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}"

    for key in leaves(TrainConfig):
        assert f"--{key} " in text
    assert "in tokens [default 1024]" in text


def test_help_names_the_keys_of_the_items_of_a_list(capsys):
    with pytest.raises(SystemExit):
        parse_config(CompareConfig, ["--help"], description="")
    text = " ".join(capsys.readouterr().out.split())
    assert "--texts LIST texts to measure on; the keys of each entry stand below [required]" in text
    assert "keys of each entry of `methods`, in the YAML file: preset STR " in text
    assert "rates FLOAT of a preset: its own `rate`, one row each bytes FLOAT of a preset or peer: shares of" in text
    assert "keys of `calibration`, in the YAML file: name STR hub ids, or .txt" in text
    assert (
        "optional BOOL leave the text out, with a notice, where the local file does not exist [default false]" in text
    )
    assert text.startswith("usage: ")
    assert len(text.partition("options:")[0]) < 120
