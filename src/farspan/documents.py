"""Reads what people, other programs and other ranks wrote: all of it is bounded, and every mistake is named by its key.

    read_text              a regular file of UTF-8, at most MAX_BYTES
    parse_json, _toml      at most MAX_DEPTH, MAX_VALUES, MAX_DIGITS; no key twice, no NaN, no infinity
    as_name, as_count, ..  one value of it: its type and its range

`where` is what an error calls the value: the file's path, and the keys down to it.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any, cast

from farspan.errors import PlanError, quoted
from farspan.units import MAX_COUNT

__all__ = [
    "MAX_AMOUNT",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIGITS",
    "MAX_TOML_BYTES",
    "MAX_VALUES",
    "as_count",
    "as_flag",
    "as_list",
    "as_name",
    "as_number",
    "as_object",
    "as_text",
    "check_keys",
    "is_name",
    "parse_json",
    "parse_toml",
    "read_text",
]

MAX_BYTES = 64 * 2**20
MAX_TOML_BYTES = 2**18
"""A cluster is short, and the parser of the standard library is slow."""
MAX_DEPTH = 32
MAX_VALUES = 2_000_000
MAX_DIGITS = 40
MAX_AMOUNT = 1e24
"""The most seconds, bytes or operations: sums and products of a search stay finite."""

_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TOML_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+"""' + r"|'''(?:[^']|'(?!''))*+'''"  # of several lines
    r'|"(?:[^"\\\n]|\\.)*+"' + r"|'[^'\n]*+'|#[^\n]*+",
    re.DOTALL,
)
_TOML_PATH = re.compile(r"(?:\.[^.,=\[\]{}\n]*+)" + f"{{{MAX_DEPTH},}}")
_BRACKET = re.compile(r"[][{}]")
_LONG_NUMBER = re.compile(r"[0-9][0-9A-Za-z_.]" + f"{{{MAX_DIGITS},}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: str | os.PathLike[str], *, hint: str) -> str:
    """Returns the text of a regular file, without a byte order mark.

    Raises:
        PlanError: It cannot be read, is no regular file, too large or not UTF-8; with `hint` as what to try.
    """
    try:
        return _read(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: a path with a null character, and UnicodeDecodeError
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", "")
        raise PlanError(f"{os.fspath(path)} cannot be read.", why=f"{why or error}.", hint=hint) from None


def parse_json(text: str | bytes, source: str) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: JSON.
        source: What to call the text in errors: a file's path.

    Raises:
        PlanError: It is no JSON, has a key twice, or is too large, too deep or too long somewhere; names the place.

    >>> parse_json('{"a": [1, 2.5]}', "plan.json")
    {'a': [1, 2.5]}
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{source} is not JSON.", why="it is not UTF-8 text.", hint="write it again") from None
    _check_size(text, source, MAX_BYTES)
    _check_bounds(_JSON_STRING.sub('""', text), source)
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _object(pairs, source),
            parse_float=lambda digits: _finite(digits, source),
            parse_constant=lambda digits: _finite(digits, source),
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source} is not JSON: line {error.lineno}, column {error.colno}.",
            why=f"{error.msg}.",
            hint="look for a missing or a trailing comma there; JSON has no comments",
        ) from None
    except UnicodeEncodeError:
        raise PlanError(
            f"{source}: a text has half a character.", why="\\ud800 to \\udfff come in pairs.", hint="take it out"
        ) from None
    return value


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Returns the table of a TOML text; the same bounds as for JSON, but MAX_TOML_BYTES.

    Raises:
        PlanError: It is no TOML, has a key twice, or is too large, too deep or too long somewhere.
    """
    _check_size(text, source, MAX_TOML_BYTES)
    bare = _TOML_STRING.sub('""', text)
    _check_bounds(bare, source)
    if _TOML_PATH.search(bare):
        raise _too_deep(source)
    try:
        return tomllib.loads(text, parse_float=lambda digits: _finite(digits, source))
    except ValueError as error:
        raise PlanError(f"{source} is not TOML.", why=f"{error}.", hint='[[hosts]]\nkind = "A100"') from None


def check_keys(keys: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise if a key is not known.

    Raises:
        PlanError: It names the nearest key.
    """
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key[:100], known, n=1, cutoff=0.5)
            raise PlanError(
                f'{where}: unknown key "{key}".',
                why=f"the keys here are {', '.join(known)}.",
                hint=f'"{near[0]}"' if near else "take the key out",
            )


def as_object(
    value: object, where: str, *, known: Sequence[str] | None = None, needed: Sequence[str] = (), hint: str = "{...}"
) -> dict[str, Any]:
    """Returns an object, or a table, with known keys alone; None for any.

    Raises:
        PlanError: It is none, a key is not known, or one that is needed is missing.
    """
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object of keys and values", hint)
    members = cast("dict[str, Any]", value)
    if known is not None:
        check_keys(members, known, where)
    for key in needed:
        if key not in members:
            raise PlanError(f'{where}: the key "{key}" is missing.', why="it is needed.", hint=f'"{key}": ...')
    return members


def as_list(value: object, where: str, *, length: int | None = None) -> list[Any]:
    """Returns an array, of `length` values where that is given.

    Raises:
        PlanError: It is none.
    """
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if length is None or len(items) == length:
            return items
    raise _wrong(where, cast(object, value), "an array" if length is None else f"an array of {length} values", "[...]")


def as_text(value: object, where: str) -> str:
    """Returns a text, which may be empty.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(value, str):
        raise _wrong(where, value, "a text", '"..."')
    return value


def is_name(value: object) -> bool:
    """Returns whether a value can be a name: a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def as_name(value: object, where: str) -> str:
    """Returns a text that is not blank.

    Raises:
        PlanError: It is none.
    """
    if not is_name(value):
        raise _wrong(where, value, "a word", '"..."')
    return cast(str, value)


def as_flag(value: object, where: str) -> bool:
    """True or false.

    Raises:
        PlanError: It is neither.
    """
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false", "true")
    return value


def as_count(value: object, where: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    """Returns a whole number in a range.

    Raises:
        PlanError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(where, value, f"a whole number from {least} to {most}", str(max(least, 1)))
    return value


def as_number(value: object, where: str, *, least: float = 0.0, most: float = MAX_AMOUNT) -> float:
    """Returns a number in a range.

    Raises:
        PlanError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _wrong(where, value, f"a number from {least:g} to {most:g}", f"{max(least, 0.001):g}")
    return float(value)


def _read(path: str | os.PathLike[str]) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would be waited for
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(file, "rb", closefd=False) as stream:
            data = stream.read(MAX_BYTES + 1)
    finally:
        os.close(file)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES >> 20} MiB")
    return data


def _wrong(where: str, value: object, what: str, hint: str) -> PlanError:
    return PlanError(f"{where} is {quoted(value)}.", why=f"it is {what}.", hint=hint)


def _too_deep(source: str) -> PlanError:
    return PlanError(f"{source} is nested too deeply.", why=f"at most {MAX_DEPTH} levels are read.", hint="flatten it")


def _check_size(text: str, source: str, most: int) -> None:
    if len(text) > most:
        raise PlanError(f"{source} is too large.", why=f"at most {most >> 10} KiB are read.", hint="a smaller one")


def _check_bounds(bare: str, source: str) -> None:
    """Raise before a parser reads what would take it without bound: a text without its strings and comments."""
    if sum(bare.count(sign) for sign in ",[{:=") > MAX_VALUES:
        raise PlanError(f"{source} has too many values.", why=f"at most {MAX_VALUES} are read.", hint="a smaller one")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise _too_deep(source)
    number = _LONG_NUMBER.search(bare)
    if number:
        raise PlanError(
            f"{source}: {number[0][:20]}... is too long.",
            why=f"a number has at most {MAX_DIGITS} digits.",
            hint="0.001",
        )


def _finite(digits: str, source: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise PlanError(f"{source}: {quoted(digits)} is no number.", why="numbers are finite.", hint="0.001")
    return value


def _object(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    """Returns a JSON object; json itself would silently keep the last of two equal keys."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise PlanError(
                    f'{source}: the key "{key}" is there twice.',
                    why=f"once with {quoted(seen[key])} and once with {quoted(value)}.",
                    hint="take one of them out",
                )
            seen[key] = value
    return members
