"""These tests need Triton's interpreter, for which tests/lowrank_kv_vllm/test_kernels.py starts a process."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
