"""`farspan run --hosts` by the real ssh, to a server that a test starts for itself; skipped where there is no sshd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.hosts.away import LAUNCHER
from tests.support.launcher import SOURCE, TIMEOUT_S, is_running, wait_until
from tests.support.ranks import free_port

ADDRESS = "127.0.0.2"
"""Taken for another host."""
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") or ""
SERVER = """
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
ListenAddress {address}:{port}
"""
CLIENT = """
Host *
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  RequestTTY force
"""
SCRIPT = """
import os, sys, time
print(sys.argv[1:], os.getcwd(), os.isatty(0), flush=True)
open(f"{sys.argv[-1]}.new", "w").write(str(os.getpid()))
os.rename(f"{sys.argv[-1]}.new", sys.argv[-1])
time.sleep(1000)
"""

pytestmark = pytest.mark.skipif(not (SSHD and shutil.which("ssh") and shutil.which("ssh-keygen")), reason="needs sshd")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """The folder of its keys, and of what ssh is told."""
    port = free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    for name, text in (("server", SERVER), ("client", CLIENT)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, address=ADDRESS, port=port))
    command = [SSHD, "-f", str(tmp_path / "server")]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"sshd cannot run here: {tried.stderr.strip()}")
    with (tmp_path / "said").open("w") as said:
        serving = subprocess.Popen([*command, "-D", "-e"], stderr=said)
    wait_until(lambda: serving.poll() is not None or "listening" in (tmp_path / "said").read_text())
    key = " ".join((tmp_path / "host.pub").read_text().split()[:2])
    (tmp_path / "known").write_text(f"[{ADDRESS}]:{port} {key}\n")
    yield tmp_path
    serving.kill()
    serving.wait()


def start(server: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    options = ["--ssh", f"ssh -F {server}/client", "--hosts", f"{ADDRESS}:1", "--log-dir", str(server / "logs")]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "run", *options, "train.py", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_words_reach_the_script_as_they_are_and_its_end_comes_with_that_of_the_launcher(server: Path, end) -> None:
    folder = server / "a b'c $HOME"
    folder.mkdir()
    run = start(server, folder, "x y'z", '"$HOME"', str(folder / "pid"))
    wait_until(lambda: (folder / "pid").exists() or run.poll() is not None)
    assert run.poll() is None, run.communicate()
    pid, began = int((folder / "pid").read_text()), time.monotonic()
    run.send_signal(end)
    said, _ = run.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not is_running(pid))
    assert time.monotonic() - began < 20.0, said
    if end is signal.SIGINT:  # else what it wrote may be on its way
        assert f"""["x y'z", '"$HOME"', "{folder}/pid"] {folder} False""" in said, said
        assert run.returncode == 130 and "KeyboardInterrupt" in said, said


def test_a_host_whose_key_is_not_known_is_an_error_with_what_to_do(server: Path) -> None:
    (server / "known").unlink()
    run = start(server, server)
    said, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 2, said
    assert f"why  Host key verification failed.\n  try  ssh {ADDRESS}     once by hand" in said, said
