"""The files of checkpoints: what is written is read, damage is named, a crash leaves the last one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from farspan.errors import CheckpointError
from farspan.state import format as files
from farspan.state.format import disk, manifest_text
from farspan.state.format.checksum import BLOCK_BYTES
from farspan.state.format.manifest_text import manifest_from_text, manifest_to_text


def part(key: str, array: np.ndarray) -> files.Part:
    return files.Part(
        key=key,
        dtype=str(array.dtype),
        shape=array.shape,
        data=lambda: [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data],
    )


def write(root: Path, step: int, arrays: dict[str, np.ndarray], *, rows: int = 1, keep: int | None = None) -> str:
    """A checkpoint of two files; the tensor "a" lies in both, cut after so many rows."""
    draft = files.begin(str(root), step, f"{step:04x}")
    boxes: list[dict[str, tuple[int, np.ndarray]]] = [{}, {}]
    for name, array in arrays.items():
        if name == "a":
            boxes[0][name], boxes[1][name] = (0, array[:rows]), (rows, array[rows:])
        else:
            boxes[0][name] = (0, array)
    stored: list[files.StoredFile] = []
    pieces: dict[str, list[files.Piece]] = {name: [] for name in arrays}
    for number, held in enumerate(boxes):
        file = f"rank-{number:05}.safetensors"
        parts = [part(name, array) for name, (_, array) in held.items()]
        done = files.write_file(f"{draft.path}/{file}", parts, {"save_id": draft.save_id})
        stored.append(
            files.StoredFile(
                name=file,
                size_bytes=done.size_bytes,
                header_bytes=done.header_bytes,
                header_checksum=done.header_checksum,
            )
        )
        for (name, (at, array)), begin, checksums in zip(held.items(), done.begins, done.checksums, strict=True):
            offset = (at, *[0] * (array.ndim - 1)) if array.ndim else ()
            piece = files.Piece(file=number, begin=begin, offset=offset, shape=array.shape, checksums=checksums)
            pieces[name].append(piece)
    tensors = {
        name: files.StoredTensor(dtype=str(array.dtype), shape=array.shape, pieces=tuple(pieces[name]))
        for name, array in arrays.items()
    }
    manifest = files.Manifest(
        save_id=draft.save_id,
        step=step,
        serial=draft.serial,
        files=tuple(stored),
        tensors=tensors,
        state={"lr": 0.1},
        about={},
    )
    path = files.commit(draft, manifest)
    files.point_to(draft, keep=keep)
    return path


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((4, 3)),
        "b": rng.integers(0, 2, 7).astype(bool),
        "scalar": np.array(3.5, dtype=np.float32),
        "empty": np.zeros((0, 5), dtype=np.int16),
    }


def read(path: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    manifest = files.read_manifest(path)
    found: dict[str, np.ndarray] = {}
    with files.Reader(path, manifest) as reader:
        for name in names:
            tensor = manifest.tensors[name]
            memory = bytearray(tensor.size_bytes)
            reader.read(name, memoryview(memory))
            found[name] = np.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape)
    return found


def test_what_is_written_is_read_also_a_slice_of_it(tmp_path: Path) -> None:
    given = arrays()
    path = write(tmp_path, 5, given, rows=3)
    found = read(path, list(given))
    assert all(np.array_equal(found[name], given[name]) for name in given)
    box = np.zeros((3, 2))
    with files.Reader(path, files.read_manifest(path)) as reader:
        reader.read_box("a", (1, 1), (3, 2), box.data.cast("B"))
    assert np.array_equal(box, given["a"][1:4, 1:3])
    assert files.verify(path) == []


def test_each_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    given = arrays()
    path = Path(write(tmp_path, 5, given))
    first = load_file(path / "rank-00000.safetensors")
    assert np.array_equal(first["b"], given["b"])
    assert np.array_equal(first["a"], given["a"][:1])
    assert json.loads((path / "manifest.json").read_text())["manifest"]["step"] == 5


def test_a_tensor_of_several_blocks(tmp_path: Path) -> None:
    large = np.arange(BLOCK_BYTES // 4 + 10, dtype=np.float32)
    path = write(tmp_path, 1, {"large": large})
    assert np.array_equal(read(path, ["large"])["large"], large)
    assert len(files.read_manifest(path).tensors["large"].pieces[0].checksums) == 2


def test_data_in_pieces_of_any_size_have_the_checksums_of_the_whole(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 5).astype(np.uint8)
    cuts = [0, 3, BLOCK_BYTES - 1, BLOCK_BYTES + 7, len(data)]
    views = [data.data[begin:end] for begin, end in itertools.pairwise(cuts)]
    whole = files.write_file(f"{tmp_path}/one", [part("x", data)], {})
    cut = files.Part(key="x", dtype="uint8", shape=data.shape, data=lambda: views)
    assert files.write_file(f"{tmp_path}/two", [cut], {}) == whole
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("what", ["bit", "header", "cut", "hole", "gone", "swapped", "manifest", "no manifest"])
def test_every_damage_is_found_and_the_file_is_named(tmp_path: Path, what: str) -> None:
    given = arrays()
    path = Path(write(tmp_path, 5, given))
    other = Path(write(tmp_path, 6, arrays(1)))
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    begin = files.read_manifest(str(path)).tensors["b"].pieces[0].begin
    if what == "bit":
        data[begin + 3] ^= 4
    elif what == "header":
        data[40] ^= 1
    elif what == "cut":
        del data[-1]
    elif what == "hole":
        data[begin:] = bytes(len(data) - begin)
    file.write_bytes(data)
    if what == "gone":
        file.unlink()
    elif what == "swapped":
        file.write_bytes((other / file.name).read_bytes())
    elif what == "manifest":
        text = bytearray((path / "manifest.json").read_bytes())
        text[-20] ^= 1
        file = path / "manifest.json"
        file.write_bytes(text)
    elif what == "no manifest":
        file = path / "manifest.json"
        file.unlink()
    assert any(damage.file == str(file) for damage in files.verify(str(path)))
    with pytest.raises(CheckpointError, match=file.name):
        read(str(path), list(given))
    assert files.verify(str(other)) == []


def test_the_latest_is_the_last_that_was_saved_and_the_rest_goes(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert files.newest(root) is None
    for step in (10, 20, 30):
        write(tmp_path, step, arrays(), keep=2)
    assert [Path(path).name for path in files.candidates(root)] == ["step-30", "step-20"]
    again = write(tmp_path, 20, arrays(), keep=2)  # a program that has gone back
    assert [Path(path).name for path in files.candidates(root)] == ["step-20.2", "step-30"]
    assert files.newest(root) == again
    (tmp_path / "latest").write_text("step-20.2 0000\n")  # of another save
    assert files.newest(root) == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-20.2", "step-30"]


@pytest.mark.parametrize("has_pointer", [True, False])
def test_a_damaged_manifest_does_not_make_an_older_one_the_latest(tmp_path: Path, has_pointer: bool) -> None:
    for step in (1, 2):
        write(tmp_path, step, arrays())
    (tmp_path / "step-2" / "manifest.json").write_text("{}")
    if not has_pointer:
        (tmp_path / "latest").unlink()
    assert files.newest(str(tmp_path)) == f"{tmp_path}/step-2"
    assert [Path(path).name for path in files.candidates(str(tmp_path))][-1 if not has_pointer else 0] == "step-2"


class Crash(BaseException):
    """The process ends here."""


def test_a_crash_before_any_operation_leaves_a_checkpoint_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["make_folder", "create", "write", "fsync", "rename", "unlink"]
    num_crashes = 0
    for last in range(1000):
        root = tmp_path / str(last)
        write(root, 1, arrays(1), keep=1)
        left = last

        def crashing(function: object) -> object:
            def called(*args: object) -> object:
                nonlocal left
                if left == 0:
                    raise Crash
                left -= 1
                return function(*args)  # type: ignore[operator]

            return called

        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(disk, name, crashing(getattr(disk, name)))
            try:
                write(root, 2, arrays(2), keep=1)
            except Crash:
                num_crashes += 1
            else:
                break
        newest = files.newest(str(root))
        assert newest is not None and files.verify(newest) == []
        seed = int(Path(newest).name.removeprefix("step-"))
        assert np.array_equal(read(newest, ["a"])["a"], arrays(seed)["a"])
        write(root, 3, arrays(3), keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-3"]
    assert num_crashes > 15


def test_torch_is_not_needed() -> None:
    program = "import sys, farspan.state.format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_checkpoint_that_was_moved_away_and_linked_is_only_unlinked(tmp_path: Path) -> None:
    """Removing old ones listed the folder behind the link, and removed what was in it."""
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    first = Path(write(root, 1, arrays(1)))
    first.rename(archive)
    first.symlink_to(archive)
    write(root, 2, arrays(2), keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-2"]
    assert files.verify(str(archive)) == []


def test_what_comes_before_the_data_is_no_longer_than_the_file(tmp_path: Path) -> None:
    """It is read into memory first: a manifest with a right checksum could ask for any amount."""
    manifest = files.read_manifest(write(tmp_path, 1, arrays()))
    first = dataclasses.replace(manifest.files[0], header_bytes=2**60)
    text = manifest_to_text(dataclasses.replace(manifest, files=(first, *manifest.files[1:])))
    with pytest.raises(CheckpointError, match="whole number"):
        manifest_from_text(text, "a test")


def test_a_save_does_not_read_the_tensors_of_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save parsed every manifest in the folder, on the program's time: with 100 of them, of a large model, for
    seconds."""
    for step in (1, 2):
        write(tmp_path, step, arrays())

    def parse_json(text: bytes, source: str) -> None:
        raise AssertionError(source)

    monkeypatch.setattr(manifest_text, "parse_json", parse_json)
    assert files.begin(str(tmp_path), 3, "aa").serial == 2
    assert files.newest(str(tmp_path)) == f"{tmp_path}/step-2"
    assert files.candidates(str(tmp_path)) == [f"{tmp_path}/step-2", f"{tmp_path}/step-1"]
