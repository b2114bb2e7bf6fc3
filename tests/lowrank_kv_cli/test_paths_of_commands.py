"""Commands know a leading `~` where no shell has replaced it: behind `=`, in quotes, or in another program's words."""

import json

import pytest
from methods import calibration_of, planned_model

import dynakv
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import __main__ as cli
from lowrank_kv_cli.generate import read_prompt


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's directory; commands run elsewhere, and write nothing there."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    yield home
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate --prompt x --checkpoint ~/nothing", "the checkpoint directory `HOME/nothing` does not exist"),
        (
            "generate --prompt x --model m --bases ~/nothing",
            "a directory that `lowrank-kv calibrate` wrote, got `HOME/nothing`",
        ),
        ("generate --prompt @~/nothing --checkpoint x", "cannot read the prompt file `~/nothing`: No such file"),
        ("inspect --model MODEL --checkpoint ~/nothing", "`HOME/nothing` is no DynaKV checkpoint"),
        ("inspect --model MODEL --preset eigen --bases ~/nothing", "`HOME/nothing` is no calibration"),
        ("report ~/nothing.json", "HOME/nothing.json"),
        ("train --config=~/nothing.yaml", "cannot read the configuration `~/nothing.yaml`"),
    ],
)
def test_what_is_not_there_is_looked_for_in_it(words, message, home, tiny_dir):
    with pytest.raises(UserError, match=message.replace("HOME", str(home))):
        cli.dispatch([str(tiny_dir) if word == "MODEL" else word for word in words.split()])


def test_what_is_there_is_read_and_written(home, tiny_dir, capsys):
    model = load_model(str(tiny_dir))
    calibration_of(model).save(home / "bases", model="tiny", text=["a"])
    planned_model(model, 0.5)
    dynakv.save_compressor(model, home / "checkpoint")
    (home / "prompt.txt").write_text("Once upon a time")
    assert read_prompt("@~/prompt.txt") == "Once upon a time"
    cli.dispatch(["export", "--checkpoint=~/checkpoint", "--output=~/exported"])
    assert capsys.readouterr().out.startswith(f"{home}/exported: ")
    for name in ("bases", "checkpoint", "exported"):
        cli.dispatch(["inspect", f"~/{name}", "--json"])
        assert json.loads(capsys.readouterr().out)["files"]
    cli.dispatch(["inspect", "--model", str(tiny_dir), "--preset=ojakv-joint", "--bases=~/bases"])
