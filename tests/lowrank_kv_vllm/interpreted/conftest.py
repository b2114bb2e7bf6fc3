"""These tests need vLLM and Triton's interpreter, for which tests/lowrank_kv_vllm/test_kernels.py starts a process."""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("vllm"):
    collect_ignore_glob = ["test_*.py"]
