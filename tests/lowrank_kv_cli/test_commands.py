"""The dispatcher of `lowrank-kv`, in a checkout that need not be installed."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from methods import calibration_of, tiny_model
from ready_python import program

from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import __main__ as cli
from lowrank_kv_cli.generate import read_prompt

ROOT = Path(__file__).parents[2]


def test_every_command_is_there_and_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.dispatch(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, (module, summary) in cli.COMMANDS.items():
        assert callable(importlib.import_module(module).main)
        assert f"{name} " in text
        assert summary in text


# Other programs, which accelerate and lm-evaluation-harness explain in their own words.
OF_OTHERS = {"launch", "lm-eval"}


@pytest.mark.parametrize("name", sorted(OF_OTHERS))
def test_commands_of_other_programs_explain_themselves(name):
    """In a process of their own: lm-evaluation-harness takes a model's name once."""
    done = subprocess.run([program(), "-m", "lowrank_kv_cli", name, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    assert f"    lowrank-kv {name} " in done.stdout, "an example"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS.keys() - OF_OTHERS))
def test_every_command_explains_itself(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowrank-kv", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.dispatch([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lowrank-kv {name} ")
    assert f"    lowrank-kv {name} " in text, "an example"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command `trian`; did you mean `train`?"),
        (["x"], f"unknown command `x`; valid commands: {', '.join(sorted(cli.COMMANDS))}"),
        (["--model", "m"], "unknown argument `--model`; a command comes first: calibrate, train"),
    ],
)
def test_an_unknown_command_names_the_nearest(argv, message):
    with pytest.raises(UserError) as error:
        cli.dispatch(argv)
    assert message in str(error.value)


@pytest.mark.parametrize("command", ["serve", "inspect", "generate", "calibrate"])
def test_a_model_that_is_not_there_is_named(command, tmp_path):
    needed = {"serve": ["--bases", "b"], "generate": ["--bases", str(tmp_path), "--prompt", "x"]}
    needed["calibrate"] = ["--output", str(tmp_path / "new"), "--name", "t.txt"]
    (tmp_path / "moments.safetensors").touch()  # looks like a calibration
    with pytest.raises(UserError, match=r"the model directory `\./nowhere` does not exist"):
        cli.dispatch([command, "--model", "./nowhere", *needed.get(command, [])])


@pytest.mark.parametrize(
    "command", [["calibrate", "--name"], ["train", "--dataset.sequence_length", "64", "--dataset.name"]]
)
def test_a_trailing_comma_names_no_text(command, tiny_dir, text_file, tmp_path):
    words = [*command, f"{text_file},", "--model", str(tiny_dir), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match="^`name` of a data set is ''; name a file or a hub id, or leave out the comma"):
        cli.dispatch(words)


def test_a_place_that_is_none_is_refused_before_the_work(text_file):
    words = ["--model", "./nowhere", "--name", str(text_file), "--output", f"{text_file}/in/bases"]
    with pytest.raises(UserError, match=f"`{text_file}/in` cannot be a directory"):
        cli.dispatch(["calibrate", *words])


def test_serve_says_why_it_has_not_every_preset(tiny_dir):
    command = ["serve", "--model", str(tiny_dir), "--bases", "b", "--preset", "adaptive-mixed"]
    with pytest.raises(
        UserError, match="`preset` must be one of .*tokenwise-mixed: those have nothing of a sequence's"
    ):
        cli.dispatch(command)


def test_help_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from lowrank_kv_cli.__main__ import dispatch
dispatch([])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "commands:" in done.stdout


def test_a_checkout_has_the_names_of_a_wheel():
    """`lowrank_kv_cli` extends its path by the checkout: no copies, no links, no hook of an editable installation."""
    import evaluation.sweep
    import training.command
    from lowrank_kv_cli.evaluation import sweep
    from lowrank_kv_cli.training import command

    assert command.__file__ == training.command.__file__
    assert sweep.__file__ == evaluation.sweep.__file__


# Those that are started as files; the others are started as modules from the checkout's root.
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "sys.path.insert" in path.read_text()]


def test_scripts_import_the_checkout_they_stand_in(tmp_path):
    """In one process, which imports torch once: before each script the checkout is taken off the path."""
    code = f"""
import runpy, sys
root, scripts = {str(ROOT)!r}, {[str(path) for path in SCRIPTS]}
sys.argv = ["x"]
for script in scripts:
    sys.path[:] = [entry for entry in sys.path if entry != root]
    runpy.run_path(script)
    assert sys.path[0] == root, script
import lowrank_kv
print(lowrank_kv.__file__)
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [program(), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.split()[-1]).parents[1] == ROOT


def test_every_script_says_how_it_is_started():
    called_by_others = {
        ROOT / "scripts/import_graph.py",
        ROOT / "scripts/packed_models.py",
        ROOT / "scripts/docs_site.py",
        ROOT / "scripts/text_measurements.py",
        ROOT / "scripts/tiny_families.py",
    }
    for path in {*(ROOT / "scripts").glob("*.py")} - {*SCRIPTS, *called_by_others}:
        assert f"python -m scripts.{path.stem}" in path.read_text(), f"{path.name} does not say how it is started"


def test_training_is_launched_as_a_module(four_steps, tmp_path):
    """The form that the help and the documents name, from another directory than the checkout."""
    values = {**yaml.safe_load(four_steps.read_text()), "output": str(tmp_path / "launched")}
    four_steps.write_text(yaml.safe_dump(values))
    flags = [
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--cpu",
    ]
    command = [program(), "-m", "accelerate.commands.launch", *flags, "-m", "lowrank_kv_cli", "train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": program()}
    done = subprocess.run(
        [*command, "--config", str(four_steps)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"checkpoint: {tmp_path}/launched/checkpoint" in done.stdout


def test_a_command_whose_reader_leaves_ends_without_a_word(tmp_path):
    """As behind `| head -1`."""
    calibration_of(tiny_model()).save(tmp_path / "bases", model="", text=[])
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        words = [program(), "-m", "lowrank_kv_cli", "inspect", str(tmp_path / "bases")]
        done = subprocess.run(words, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_or_lacks_letters_ends_no_command(closed):
    shell = {"stdout": ">&-", "stderr": "2>&-"}[closed]
    command = f"{shlex.quote(sys.executable)} -m lowrank_kv_cli --version {shell}"
    assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode == 0
    script = "from lowrank_kv.utils import cli; cli.run(lambda argv: print('SHA-256 …'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"SHA-256 ?\n")


def test_a_prompt_file_s_byte_order_mark_is_no_part_of_the_prompt(tmp_path):
    (tmp_path / "prompt.txt").write_text("a prompt", encoding="utf-8-sig")
    assert read_prompt(f"@{tmp_path / 'prompt.txt'}") == "a prompt"
