"""`lowrank-kv serve` with versions of vLLM that are not the tested one."""

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


def test_a_version_that_is_not_tested_is_refused_before_its_server_is_looked_for(vllm, tiny_dir, tmp_path):
    calibration_of(load_model(str(tiny_dir)), read=True).save(tmp_path / "bases", model="tiny", text=["random"])
    words = ["serve", "--model", str(tiny_dir), "--bases", str(tmp_path / "bases")]
    with pytest.raises(UserError, match=r"vLLM 0\.99\.1 is not tested with compressed pages.*install one of 0\.32\.\*"):
        cli.dispatch(words)
    vllm.__version__ = "0.32.7"
    with pytest.raises(ModuleNotFoundError, match="vllm.entrypoints"):
        cli.dispatch(words)
