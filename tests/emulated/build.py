"""Builds the emulated accelerator, once for each version of torch and of its sources.

python tests/emulated/build.py          builds it where it is not built yet, and prints where it is
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["NotBuiltError", "built", "extension_path"]

_NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-sign-compare", "-fvisibility=hidden")
_LIMIT_S = 600


class NotBuiltError(Exception):
    """There is no compiler, or the compiler does not take the sources; the message is one line."""


def _folder() -> Path:
    """Returns where what is built is kept: outside of what git tracks."""
    return Path(os.environ.get("EMULATED_BUILD") or Path(__file__).parents[2] / "build" / "emulated")


def extension_path() -> Path:
    """Returns where the extension for this Python, this torch and these sources is, or will be."""
    return _folder() / _digest(*sorted(_NATIVE.iterdir())) / "emulated_accelerator.so"


def _digest(*paths: Path) -> str:
    """Returns a name for what these sources become with this Python and this torch."""
    digest = hashlib.sha256()
    for part in (version("torch"), sys.version, *_FLAGS):
        digest.update(part.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def built() -> Path:
    """Returns the path of the extension, which is built first where it is not there yet.

    Raises:
        NotBuiltError: It cannot be built here.
    """
    target = extension_path()
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise NotBuiltError("there is no C++ compiler, or there are no headers of Python")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others who want it wait, for about a minute
        if not target.exists():
            _build(compiler, target)
    return target


def _build(compiler: str, target: Path) -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    kept = _folder() / "objects"
    kept.mkdir(exist_ok=True)
    headers = sorted(_NATIVE.glob("*.h"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for source in sorted(_NATIVE.glob("*.cpp")):
            objects.append(kept / f"{source.stem}-{_digest(source, *headers)}.o")
            if not objects[-1].exists():
                made = Path(folder, source.stem + ".o")
                _run(compiler, *_FLAGS, *(f"-I{path}" for path in includes), "-c", source, "-o", made)
                made.replace(objects[-1])
        libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
        linked = Path(folder, target.name)
        _run(compiler, "-shared", *objects, "-o", linked, f"-L{torch / 'lib'}", *libraries, "-lpthread")
        linked.replace(target)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotBuiltError(f"the compiler says: {lines[0] if lines else done.returncode}")


if __name__ == "__main__":
    began = time.monotonic()
    print(built(), f"{time.monotonic() - began:.1f} s")
