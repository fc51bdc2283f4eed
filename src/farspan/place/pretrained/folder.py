"""The folder that a model was saved to: one safetensors file, or several and an index that says what is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors

from farspan.documents import as_name, as_object, parse_json, read_text
from farspan.errors import CheckpointError, quoted
from farspan.place.pretrained.stored import Stored, stored_in

__all__ = ["stored_at"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HINT = 'farspan.load_pretrained(model, "folder"), where save_pretrained has written'
_open: Any = safetensors.safe_open  # itself, also while another function stands for it


def stored_at(path: Path) -> dict[str, Stored]:
    """Returns all tensors of a saved model, by name.

    Args:
        path: A folder, or a safetensors file.

    Raises:
        CheckpointError: There is no model, or a part of it is missing or damaged.
    """
    if path.is_file():
        return _tensors_in(path)
    index = path / _INDEX
    if index.is_file():
        files = _files_of(index)
        found: dict[str, Stored] = {}
        for name in dict.fromkeys(files.values()):
            found.update(_tensors_in(path / name))
        absent = [name for name in files if name not in found]
        if absent:
            raise CheckpointError(
                f"{index} says that {absent[0]} is in {files[absent[0]]}, which does not have it.",
                why=f"{len(absent)} of {len(files)} tensors are not where the index says.",
                hint="copy the whole folder again",
            )
        return {name: found[name] for name in files}
    if (path / _FILE).is_file():
        return _tensors_in(path / _FILE)
    files_there = sorted(each.name for each in path.glob("*")) if path.is_dir() else []
    raise CheckpointError(
        f"there is no saved model in {path}.",
        why=f"it needs {_FILE} or {_INDEX}; "
        + (f"there are {', '.join(files_there[:5])}." if files_there else "it is empty, or no folder."),
        hint="model.save_pretrained(folder), which writes safetensors, in a program that can load it"
        if any(name.endswith((".bin", ".pt", ".pth")) for name in files_there)
        else _HINT,
    )


def _files_of(index: Path) -> dict[str, str]:
    """Returns the file of each tensor, as the index says."""
    weight_map = as_object(parse_json(read_text(index, hint=_HINT), str(index)), str(index)).get("weight_map")
    files = as_object(weight_map, f"{index}, weight_map")
    names = {name: as_name(file, f"{index}, weight_map, {name}") for name, file in files.items()}
    outside = [file for file in names.values() if file != Path(file).name]
    if outside:
        raise CheckpointError(
            f"{index} names {quoted(outside[0])}.", why="the files of a model lie in its folder.", hint=_HINT
        )
    return names


def _tensors_in(path: Path) -> dict[str, Stored]:
    try:
        with _open(str(path), framework="pt") as file:
            return stored_in(str(path.resolve()), file)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=f"{error}.", hint="copy the whole folder again") from None
