"""`lowrank-kv serve` with versions of vLLM that are not the tested one, or that have not let the plugin in."""

import importlib
import importlib.machinery
import sys
import types

import pytest
from methods import calibration_of

from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import __main__ as cli

PLUGIN = "lowrank_kv_vllm.plugin"


class EngineArgs:
    def create_engine_config(self):
        raise NotImplementedError


@pytest.fixture
def vllm(monkeypatch):
    """What the plugin and this command need of any version; its server is elsewhere."""
    found = types.ModuleType("vllm")
    found.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    found.__version__ = "0.99.1"
    plugins = types.ModuleType("vllm.plugins")
    plugins.load_general_plugins = lambda: importlib.import_module(PLUGIN).register()
    arguments = types.ModuleType("vllm.engine.arg_utils")
    arguments.EngineArgs = type("EngineArgs", (EngineArgs,), {})
    modules = {"vllm": found, "vllm.plugins": plugins, "vllm.engine.arg_utils": arguments}
    modules["vllm.engine"] = types.ModuleType("vllm.engine")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, PLUGIN, None)  # so that it is as before in the end
    del sys.modules[PLUGIN]
    monkeypatch.setattr(sys, "argv", ["lowrank-kv"])
    return found


@pytest.fixture
def words(tiny_dir, tmp_path):
    calibration_of(load_model(str(tiny_dir)), read=True).save(tmp_path / "bases", model="tiny", text=["random"])
    return ["serve", "--model", str(tiny_dir), "--bases", str(tmp_path / "bases")]


def test_a_version_that_is_not_tested_is_refused_before_its_server_is_looked_for(vllm, words):
    with pytest.raises(UserError, match=r"vLLM 0\.99\.1 is not tested with compressed pages.*install one of 0\.32\.\*"):
        cli.dispatch(words)
    vllm.__version__ = "0.32.7"
    with pytest.raises(ModuleNotFoundError, match="vllm.utils"):  # whose parser reads the words
        cli.dispatch(words)


def test_a_plugin_that_vllm_did_not_call_is_told_from_one_that_found_something_lacking(vllm, words, monkeypatch):
    load = sys.modules["vllm.plugins"].load_general_plugins
    vllm.__version__ = "0.32.7"
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setattr(sys.modules["vllm.plugins"], "load_general_plugins", lambda: None)
    with pytest.raises(UserError, match="vLLM has not loaded the plugin.*which is 'another'"):
        cli.dispatch(words)
    monkeypatch.setattr(sys.modules["vllm.plugins"], "load_general_plugins", load)
    with pytest.raises(UserError, match=r"vLLM 0\.32\.7 lacks something .*\(No module named 'vllm.model_executor'"):
        cli.dispatch(words)
    for name in ("vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.model_executor.layers.attention"].Attention = types.SimpleNamespace(__init__=len)
    with pytest.raises(
        UserError, match=r"lacks something .*\(.*get_kv_cache_spec.*pip install -c constraints-vllm.txt"
    ):
        cli.dispatch(words)


def test_what_vllm_lacks_ends_only_who_asks_for_compressed_pages(vllm):
    vllm.__version__ = "0.32.7"
    sys.modules["vllm.plugins"].load_general_plugins()
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs()
    arguments.additional_config = {}
    with pytest.raises(NotImplementedError):
        arguments.create_engine_config()
    arguments.additional_config = {"lowrank_kv": {"bases": "DIR"}}
    with pytest.raises(UserError, match="lacks something"):
        arguments.create_engine_config()
