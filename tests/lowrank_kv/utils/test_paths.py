"""Paths that users give: a leading `~` is their directory, wherever it was not a shell that read it."""

import argparse
from pathlib import Path

import pytest

from lowrank_kv.utils import cli
from lowrank_kv.utils.config import configuration, option, parse_config
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    return tmp_path / "me"


class Entry:
    """An `os.PathLike` of another package."""

    def __fspath__(self):
        return "~/in/it"


def test_a_leading_tilde_is_the_users_directory(home):
    for path in ("~/in/it", Path("~/in/it"), Entry()):
        assert path_of(path) == home / "in/it"
    for path in ("in/~/it", "~nobody-of-this-name/it", "/in/it", "."):
        assert path_of(path) == Path(path)


@pytest.mark.parametrize(("value", "told"), [(None, "None"), (3, "3"), (b"in/it", "'bytes'"), (["in"], "'list'")])
def test_what_is_no_path_is_named(value, told):
    with pytest.raises(UserError, match=f"^`output` must be a path, such as 'runs/mine'; got {told}$"):
        path_of(value, "output")


def test_parsers_of_places_to_write_know_it(home):
    assert cli.output_directory("~/new") == home / "new"
    assert cli.output_file("~/new/page.html") == home / "new/page.html"
    home.mkdir()
    (home / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=f"`{home}.*` cannot be a directory"):
        cli.output_directory("~/file")


@configuration
class Options:
    name: str = option(help="a name")


def test_a_configuration_file_is_found_in_it(home):
    home.mkdir()
    (home / "options.yaml").write_text("name: mine")
    assert parse_config(Options, ["--config=~/options.yaml"], description="")[0].name == "mine"
