"""Files are written whole, over nothing but files, and looked at before; a terminal gets nothing that controls it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.errors import FarspanError, PlanError, printable, quoted
from farspan.outputs import check_outputs, keep_text, marked, write_json, write_line, write_output, write_text


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    file.chmod(0o640)
    write_text(file, "new")
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_a_link_leads_to_is_left_alone(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    link.symlink_to(target)
    with pytest.raises(FarspanError, match="symbolic link"):
        write_text(link, "new")
    assert target.read_text() == "kept" and link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FarspanError, match="cannot be written"):
            write_text(tmp_path / name, "new")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(FarspanError, match="/dev/full cannot be written"):
        write_text("/dev/full", "text")
    assert not os.path.isfile("/dev/full")
    write_text(os.devnull, "text")
    assert not os.path.isfile(os.devnull)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(FarspanError, match="No space left on device"):
        write_text(file, "new")
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_what_is_only_of_use_later_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    logging.getLogger("farspan").propagate = True
    with caplog.at_level(logging.WARNING, logger="farspan"):
        keep_text(tmp_path / "file" / "report.html", "text", "the report")
    assert "the report is not kept" in caplog.text
    keep_text(tmp_path / "new" / "report.html", "text", "the report")
    assert (tmp_path / "new" / "report.html").read_text() == "text"


def test_a_line_that_nobody_can_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    write_line("text")


def test_texts_of_others_do_not_control_the_terminal() -> None:
    assert printable("a\x1b]0;b\x07\r\u202ec\td\ne") == "a\\x1b]0;b\\x07\\r\\u202ec\td\ne"
    assert "\x1b" not in str(FarspanError("\x1b[2J", why="\x9b", hint="\x00"))


def test_outputs_that_cannot_be_written_are_refused_before(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "train.py")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("folder", "a folder"),
        ("link", "a symbolic link"),
        ("pipe", "no regular file"),
        ("no/such/file", "No such file"),
        ("x" * 300, "too long"),
        ("a\0b", "null"),
    ):
        with pytest.raises(FarspanError, match=why) as caught:
            check_outputs({"--html": str(tmp_path / name)})
        assert caught.value.what.startswith("--html ") and caught.value.hint
    with pytest.raises(FarspanError, match="empty"):
        check_outputs({"--html": ""})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_looking_leaves_nothing_behind_and_nothing_changed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    check_outputs({"--output": str(tmp_path / "there"), "--html": str(tmp_path / "new"), "--json": None})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "before"


def test_one_file_is_not_written_twice_and_none_that_is_read(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    with pytest.raises(FarspanError, match="--output writes it by the same command"):
        check_outputs({"--output": file, "--html": f"{tmp_path}/./file"})
    with pytest.raises(FarspanError, match="it is read by the same command"):
        check_outputs({"--output": file}, [None, file])
    check_outputs({"--output": os.devnull, "--html": os.devnull})


def test_only_regular_files_are_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/full", "/dev/tty"):
        with pytest.raises(FarspanError, match="cannot be written"):
            write_text(path, "text")
    write_text(os.devnull, "text")
    write_text(tmp_path / "file", "half a \udcff")
    assert (tmp_path / "file").read_text() == "half a \\udcff"


def test_half_a_character_is_escaped() -> None:
    assert printable("a\udcffb\x9b") == "a\\udcffb\\x9b"
    assert str(PlanError("a\ud800")) == "a\\ud800"


def test_no_control_character_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write_output("a\x1b[2Jb\x07\n\tc\u202ed\udcff")
    write_line("a\x1b]0;title\x07")
    write_json({"name": "\x1b[2J\x7f\u009b"})
    out, err = capsys.readouterr()
    assert out.startswith("a\\x1b[2Jb\\x07\n\tc\\u202ed\\udcff\n") and err == "a\\x1b]0;title\\x07\n"
    assert not set(out) & {"\x1b", "\x07", "\x7f"}
    assert json.loads(out.splitlines()[-1]) == {"name": "\x1b[2J\x7f\u009b"}


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    write_output("caf\u00e9")
    assert stream.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", None)
    write_output("nobody has a terminal")


def test_a_full_disk_is_an_error_in_three_parts() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and "standard output cannot be written" in done.stderr and "  try  " in done.stderr


def test_errors_stay_short_whatever_they_quote() -> None:
    assert len(quoted("a" * 10_000)) < 80 and len(quoted([["a" * 1000] * 1000] * 1000)) < 120
    error = PlanError("a" * 10_000, why="b\n" + "c" * 10_000, hint="d" * 700)
    assert max(map(len, str(error).splitlines())) < 700 and len(str(error).splitlines()) == 4


def test_a_line_does_not_continue_the_line_of_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    write_line("alone")
    with tqdm.tqdm(range(3), file=sys.stderr):
        write_line("said")
    write_line("after")
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert lines[0] == "alone"
    assert "said" in lines and "after" in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a step is long", "farspan: a step is long"),
        ("farspan: a step is long", "farspan: a step is long"),
        ("farspan run: rank 1 failed", "farspan run: rank 1 failed"),
        ("2 stages\nstage  what\n    0  head", "farspan: 2 stages\n  stage  what\n      0  head"),
        ("farspan: late\n  at a.py:3", "farspan: late\n  at a.py:3"),
        ("farspan is late", "farspan: farspan is late"),
        ("", "farspan: "),
    ],
)
def test_lines_of_farspans_say_so(text: str, said: str) -> None:
    assert marked(text) == said
