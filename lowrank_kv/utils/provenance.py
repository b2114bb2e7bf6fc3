"""What a measurement can prove of itself: the code, the machine, and the content of the files it read."""

import getpass
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.paths import files_of, name_of, path_of

if TYPE_CHECKING:  # a record is read without loading torch
    from torch import Tensor
    from transformers import PreTrainedModel

DISTRIBUTION = "lowrank-kv"
RUN_FILE = "run.json"
"""In a checkpoint's directory: names the run that trained it."""

_CHUNK = 1 << 20
_HASHED_NUMBERS = 1 << 14  # about, of each of a model's tensors
_PATH = re.compile(r"(?<![\w.\-/\\}])(?:~\w*|\.\.|[A-Za-z]:)?[/\\](?=[\w.~$/\\])[^\s,;=:'\"\[\](){}]*")
_ADDRESS = re.compile(r"\b(?!file:)[A-Za-z][\w+.\-]+://[^\s,'\"]*")
_NOT_OF_MODEL = {"_name_or_path", "transformers_version", "dtype"}
_NOT_SOURCES = (":(exclude)results", ":(exclude)docs", ":(exclude)*.md")


def digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes, or of a directory's files with their names relative to it.

    A directory's digest does not depend on where it lies, on the order of its files or on their dates. Links count as what
    they point to.

    Raises:
        FileNotFoundError: there is nothing at `path`.
    """
    path = path_of(path)
    if not path.is_dir():
        return _file_digest(path)
    found = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        found.update(f"{file.relative_to(path).as_posix()}\0{_file_digest(file)}\n".encode())
    return found.hexdigest()


def path_input(role: str, path: str | Path) -> dict[str, Any]:
    """A record's entry for a file or directory that was read (or written): role, name, SHA-256 and, of a checkpoint, the run
    that trained it."""
    path = path_of(path)
    return {"role": role, "name": path.resolve().name, "sha256": digest(path), "run_id": trained_by(path)}


def content_input(role: str, name: str, content: str | bytes) -> dict[str, Any]:
    """The same of content that has no file of its own: a model's configuration as JSON, the bytes of a text's token ids."""
    content = content.encode("utf-8") if isinstance(content, str) else content
    return {"role": role, "name": without_paths(name), "sha256": hashlib.sha256(content).hexdigest(), "run_id": None}


def file_inputs(role: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """The entries of the files that data sets' names stand for: one for a file, several for a pattern, none for a hub id or
    an address."""
    return [path_input(role, path) for name in names for path in files_of(name)]


def token_input(role: str, name: str, ids: "Tensor") -> dict[str, Any]:
    """The entry of a text by its token ids, int64, whatever file or data set they are from."""
    return content_input(role, name, ids.cpu().numpy().tobytes())


def model_input(model: "PreTrainedModel", *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The entry of an uncompressed model by its configuration, without the directory, version and dtype it was loaded with,
    and without the keys to `leave_out`.

    A model and one that was fine-tuned from it have one configuration: :func:`weights_input` tells them apart.
    """
    left_out = _NOT_OF_MODEL.union(leave_out)
    values = {key: value for key, value in model.config.to_diff_dict().items() if key not in left_out}
    return content_input("model", name_of(model.config._name_or_path), json.dumps(values, sort_keys=True))


def weights_input(model: "PreTrainedModel") -> dict[str, Any]:
    """The entry of an uncompressed model by some numbers of each parameter and buffer that it saves, evenly spaced.

    All of them are gigabytes. Training moves nearly every number, so that these tell models apart, on any device alike. In
    another dtype the same weights are other ones.
    """
    import torch  # here, as a record is read without it

    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # An odd step: one that divides the width of a matrix would see a few of its columns only.
        some_N = tensor.flatten()[:: tensor.numel() // _HASHED_NUMBERS | 1]
        found.update(some_N.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content_input("weights", name_of(model.config._name_or_path), found.digest())


def name_trainer(directory: str | Path, run_id: str) -> None:
    """Write into a checkpoint's directory which run trained it."""
    write_text(Path(directory, RUN_FILE), json.dumps({"run_id": run_id}) + "\n")


def trained_by(path: str | Path) -> str | None:
    """The run that trained the checkpoint in `path`; None where it does not say."""
    file = Path(path, RUN_FILE)
    return json.loads(file.read_text(encoding="utf-8"))["run_id"] if file.is_file() else None


def code_state(source: str | Path = __file__) -> dict[str, Any]:
    """Commit and whether the checkout differs from it (documents and results aside), or the installed version.

    Args:
        source: a file of the code that runs; a checkout counts only if it tracks this file.
    """
    source = Path(source).resolve()
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is not None:
        root = _git(source.parent, "rev-parse", "--show-toplevel")
        commit = _git(source.parent, "rev-parse", "HEAD")
        changes = _git(Path(root), "status", "--porcelain", "--", ".", *_NOT_SOURCES) if root else None
        if commit and changes is not None:
            return {"commit": commit, "dirty": bool(changes), "version": version_of(DISTRIBUTION)}
    return {"commit": None, "dirty": None, "version": version_of(DISTRIBUTION) or "unknown"}


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions and hardware. `device` is what computed; a GPU is named only where it is one."""
    torch = sys.modules.get("torch")  # whoever measures has imported it; nothing else needs it here
    gpu = device is not None and device.startswith("cuda") and torch is not None and torch.cuda.is_available()
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "transformers", "accelerate")},
        "cpu": _processor(),
        "vector": torch.backends.cpu.get_cpu_capability() if torch is not None else None,
        "cores": _cores(),
        "threads": torch.get_num_threads() if torch is not None else _cores(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "platform": " ".join(part for part in (platform.system(), platform.machine(), libc) if part),
    }


def without_paths(value: Any) -> Any:
    """The value with every path that belongs to this machine cut to its last part, in mappings and lists, too.

    A path relative to the working directory stays, unless a part of it is the user's name, and so does an address
    (``https://…``), without a user, a password or a query, which may let others in. What JSON has no word for becomes its
    nearest: a path its name, a tuple a list. Keys of a mapping that are alike then are numbered.
    """
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, each in value.items():
            own, number = str(without_paths(key)), 1
            name = own
            while name in found:
                number += 1
                name = f"{own} #{number}"
            found[name] = without_paths(each)
        return found
    if isinstance(value, list | tuple | set | frozenset):
        return [without_paths(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, PurePath):
        return without_paths(str(value))
    if not isinstance(value, str):
        return value
    addresses = [_without_secrets(address) for address in _ADDRESS.findall(value)]
    texts = [_of_any_machine(text) for text in _ADDRESS.split(value)]
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(texts, addresses, fillvalue="")))


def _without_secrets(address: str) -> str:
    found = urllib.parse.urlsplit(address)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}{found.path}"


def _of_any_machine(text: str) -> str:
    text = _PATH.sub(lambda match: _last_part(match.group()), text)
    return _last_part(text) if _user() in re.split(r"[/\\]", text)[:-1] else text


def command(argv: list[str] | None = None) -> list[str]:
    """How this process was started, without paths of this machine; ``python -m package.module`` as such."""
    argv = list(sys.argv if argv is None else argv)
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and argv and Path(argv[0]).stem == main.name.rpartition(".")[2]:
        argv[:1] = ["-m", main.name]
    elif argv and Path(argv[0]).is_absolute():
        here = Path(argv[0])
        argv[0] = str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else here.name
    return ["python", *without_paths(argv)]


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", "..", "~")]
    return parts[-1] if parts else "."


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "\0"


def _file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no checkout, or it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", listing.read_text(encoding="utf-8"), re.M) if listing.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
