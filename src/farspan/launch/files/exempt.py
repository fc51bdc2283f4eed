"""Names what is no file of the script's: devices, what Python and libraries keep for all processes of a user."""

from __future__ import annotations

import os
import posix
import sys

__all__ = ["exempt_roots", "temporary_folder"]

_SYSTEM = ("/dev", "/proc", "/sys", "/run")
_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"),
    *("TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "PYTHONPYCACHEPREFIX"),
)


def exempt_roots(run_folder: str) -> tuple[str, ...]:
    """Folders in which every rank reads and writes the disk itself: many processes may, at any time.

    The caches of torch and others are made for that, with locks and names of their own, and compilers that are
    processes of their own use what is in them.
    """
    home, temporary = os.environ.get("HOME", ""), temporary_folder()
    named = [os.environ.get(name, "") for name in _CACHES]
    usual = [f"{home}/.cache", f"{home}/.triton", f"{home}/.nv"] if home else []
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or _name_of_user()
    usual += [f"{temporary}/torchinductor_{user}"]
    usual += [os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))]  # each process of torchrun has one
    packages = [sys.prefix, sys.base_prefix] if sys.prefix not in ("/", "/usr") else []
    packages += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    found = [*_SYSTEM, run_folder, *named, *usual, *packages]
    return tuple(dict.fromkeys(_canonical(path) for path in found if path.startswith("/") and path != "/"))


def temporary_folder() -> str:
    """Returns the folder in which `tempfile` makes what has a name that no other process has."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    found = (path for path in [*named, "/tmp", "/var/tmp", "/usr/tmp"] if path and posix.access(path, posix.W_OK))
    return _canonical(next(found, "/tmp"))


def _canonical(path: str) -> str:
    return os.path.realpath(path)


def _name_of_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(posix.getuid()).pw_name
    except KeyError:
        return str(posix.getuid())
