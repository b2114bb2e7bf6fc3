"""The compiled kernels: built from the C files here for the processor at hand when they are first needed, and kept.

Only a C compiler with OpenMP is needed (``$CC``, or ``cc`` where that is unset or blank). The shared object lies in the user
cache directory under a name that says of what source, by what command and for what processor it was made.
"""

import ctypes
import errno
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from lowrank_kv.utils.paths import home

CPU = torch.device("cpu")  # made once: by name it is looked up at every call

# Set to 0 to do without compiled code.
SWITCH = "LOWRANK_KV_NATIVE"
# What to do where something needs the kernels and there are none.
WITHOUT_IT = f"install a C compiler, and unset ${SWITCH} if it is 0"
# Why there is no library, in short; how it came about is warned of once.
ABSENT = f"there is no compiled code (no C compiler that serves, or {SWITCH}=0)"
_OF_OTHERS = 0o022  # the right to write, of group and others
_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# Sums may be reordered only where the source says so: the exponential depends on the order of its terms.
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
_FLAGS_OF_X86 = ["-mprefer-vector-width=512"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None (after one warning) where they cannot be compiled or ``$LOWRANK_KV_NATIVE`` is 0."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        return _without(f"there is no C compiler `{compiler[0]}`; install one (e.g. gcc) or name yours in $CC")
    command = [*compiler, *_FLAGS, *(_FLAGS_OF_X86 if platform.machine() == "x86_64" else []), "-shared", "-fPIC"]
    try:
        macros = subprocess.run([*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True)
    except OSError as error:  # such as a program for another processor
        return _without(f"the C compiler `{compiler[0]}` cannot be run ({error}); name another in $CC")
    if macros.returncode:
        return _without(f"`{shlex.join(command)}` fails: {macros.stderr.strip()}")
    made_of = "\n".join([shlex.join(command), macros.stdout, *(path.read_text(encoding="utf-8") for path in _SOURCES)])
    target = home() / "native" / f"kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        _make_private(target.parent)
        if not _is_private(target):
            with tempfile.TemporaryDirectory(dir=target.parent) as directory:
                built = Path(directory) / target.name
                files = [str(path) for path in _SOURCES if path.suffix == ".c"]
                result = subprocess.run([*command, "-o", str(built), *files, "-lm"], capture_output=True, text=True)
                if result.returncode:
                    return _without(f"compiling them fails: {result.stderr.strip()}")
                built.chmod(built.stat().st_mode & ~_OF_OTHERS)  # the user's umask may let a group write
                os.replace(built, target)
        return _declared(ctypes.CDLL(str(target)))
    except OSError as error:
        return _without(f"they cannot be kept at {target.parent} ({error}); name another place in $LOWRANK_KV_HOME")


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The same, with the types of its functions."""
    address, number = ctypes.c_void_p, ctypes.c_int64
    kernels.append.argtypes = [address, address, number]
    kernels.append_full_rank.argtypes = [address]
    kernels.encode.restype = number
    kernels.multiplies_pairs.argtypes = [number, number]
    kernels.angles.argtypes = [address, number, address, number, ctypes.c_float, number, number, address, address]
    kernels.angles.restype = None
    kernels.project_states.argtypes = [address]
    kernels.classify_rows.argtypes = [address, address, number, number, number, address]
    kernels.classify_rows.restype = None
    kernels.pack_rows.argtypes = [address, address, number, number, address, address, number, address]
    kernels.bytes_of_rows.argtypes, kernels.bytes_of_rows.restype = [address, address, number], number
    kernels.read_rows_of.argtypes, kernels.read_rows_of.restype = [address, *[number] * 4, address], None
    kernels.append_rows.argtypes = [address, address, number, number, address, number, address]
    kernels.write_pages.argtypes, kernels.write_pages.restype = [address, address], number
    kernels.read_pages.argtypes = [address, number, address, number, number, address]
    kernels.attend_pages.argtypes = [address, address]
    kernels.serve_pages.argtypes, kernels.serve_pages.restype = [address] * 3, number
    kernels.use_tiles.argtypes = [ctypes.c_int]
    kernels.use_tiles(1)  # where the processor has them and the system gives them to this process
    return kernels


def _make_private(directory: Path) -> None:
    """A directory in which nobody else can put code for this user to run. Raises OSError where it is another's."""
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    if directory.stat().st_mode & _OF_OTHERS:
        directory.chmod(directory.stat().st_mode & ~_OF_OTHERS)


def _is_private(path: Path) -> bool:
    """Whether there is a file that nobody else can have written; one that was put there while the directory was open to
    others would run as this user."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & _OF_OTHERS


@functools.cache
def lanes() -> int:
    """Floats of a vector register; sizes of matrices are multiples of it."""
    return library().lanes()


def _without(reason: str) -> None:
    warnings.warn(
        f"decoding on this CPU runs without compiled kernels, two to three times slower: {reason}. "
        f"{SWITCH}=0 silences this.",
        stacklevel=3,
    )


def contiguous_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, on the CPU and contiguous, as compiled code reads it; a copy only where it is not so already.

    Checking first takes a tenth of the time in which torch converts nothing.
    """
    if tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.to(CPU, torch.float32).contiguous()


class CStruct:
    """A struct whose bytes compiled code reads where they lie.

    Args:
        memory: its members.
        keepalive: what they are addresses of.

    Attributes:
        address: of the first byte, valid for as long as this object lives.
    """

    def __init__(self, memory: bytes, keepalive: object):
        self._buffer, self._keepalive = ctypes.create_string_buffer(memory, len(memory)), keepalive
        self.address = ctypes.addressof(self._buffer)
