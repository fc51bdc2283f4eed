"""Files are written whole, over nothing but files; lines go to a terminal without what controls it."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

import pytest

from farspan.errors import FarspanError, printable
from farspan.outputs import keep_text, write_line, write_text


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
    with pytest.raises(FarspanError, match="No space left on device"):
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
