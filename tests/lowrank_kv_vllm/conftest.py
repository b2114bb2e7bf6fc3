"""A tiny model to serve. Without vLLM, which has an environment of its own (`make test-vllm`), nothing here is collected."""

import importlib.util

import pytest
from served_engines import Files

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("served"))
