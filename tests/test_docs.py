"""What README.md, CONTRIBUTING.md and docs/*.md show is there: names, arguments, command lines, options, files, links.

Nothing of it is run. A block of code is to be pasted, so each of its lines of the command `farspan` has to be whole; a
command line in the text may leave out what does not matter there: `farspan run --files all`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import farspan
from farspan import settings
from farspan.cli import plan_command, run_command
from farspan.cli.main import make_parser, parse
from farspan.errors import FarspanError

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"(?<![\w/.])(?:benchmarks|docs|examples|src|tests)/[\w./-]*\w")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
_FUNCTIONS = [name for name in farspan.__all__ if name.islower()]
_SOURCE = {path: path.read_text() for path in ROOT.glob("src/farspan/**/*.py")}
_ERRORS = set(re.findall(r"^class (\w+Error)\b", "\n".join(_SOURCE.values()), re.MULTILINE))


def test_documents_are_about_what_is_there() -> None:
    found = [f"{path.relative_to(ROOT)}: {each}" for path in DOCUMENTS for each in wrong_in(path.read_text(), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```python\nfor x in\n```", "is no Python"),
        ("```python\nfarspan.distribut(model)\n```", "farspan.distribut"),
        ("`farspan.save(path, modle=model)`", "save(modle=)"),
        ("`distribute(model, stage=2)`", "distribute(stage=)"),
        ("`with farspan.deferred():`", "farspan.deferred"),
        ("```python\nfrom farspan.plan import Plann\n```", "farspan.plan.Plann"),
        ("```\nfarspan run train.py\n```", "how many processes?"),
        ("    farspan plan --stage 2 train.py\n", "unrecognized arguments: --stage"),
        ("```\nfarspan ckpt ls checkpoints    what is there\n```", "unrecognized arguments: what"),
        ("`farspan top`, `farspan show`", "no command farspan show"),
        ("`farspan run -n 2 --keep-on train.py`", "unrecognized arguments: --keep-on"),
        ("`farspan run --keep-on`", "no option --keep-on"),
        ("leave out `--max-restart`", "no option --max-restart"),
        ("`FARSPAN_DEADLIN`", "no variable FARSPAN_DEADLIN"),
        ("a RecordingError", "no error RecordingError"),
        ("tests/nowhere.py says", "no file tests/nowhere.py"),
        ("[here](docs/nowhere.md)", "no file docs/nowhere.md"),
        ("[here](docs/start.md#nowhere)", "no heading docs/start.md#nowhere"),
    ],
)
def test_what_is_not_there_is_found(text: str, what: str) -> None:
    found = list(wrong_in(text, ROOT / "README.md"))
    assert any(what in each for each in found), found


def test_examples_in_the_help_of_commands_can_be_pasted() -> None:
    lines = [
        line for command in _COMMANDS.values() for line in re.findall(r"^  (farspan .*)", command.epilog or "", re.M)
    ]
    assert len(lines) > 20
    assert not [wrong for line in lines for wrong in _wrong_in_command(line, is_whole=True)]


def wrong_in(text: str, path: Path) -> Iterator[str]:
    """Says what in a document is not there."""
    prose = _BLOCK.sub("", text)
    spans = [" ".join(span.split()) for span in _SPAN.findall(prose)]
    for language, block in _BLOCK.findall(text):
        if language == "python":
            yield from _wrong_in_python(block)
        for line in re.findall(r"^farspan .*$", block, re.MULTILINE) if not language else ():
            yield from _wrong_in_command(line, is_whole=True)
    for line in re.findall(r"(?:^|\n\n|\n    .*\n)    (farspan .*)", prose, re.MULTILINE):
        yield from _wrong_in_command(line, is_whole=True)
    for span in spans:
        if span.startswith("farspan "):
            yield from _wrong_in_command(span, is_whole=False)
        elif span.startswith("--"):
            name = re.split(r"[ =]", span)[0]
            if name not in _OPTIONS:
                yield f"no option {name}"
        elif re.search(rf"\bfarspan\.\w|^(?:{'|'.join(_FUNCTIONS)})\(", span):
            yield from _wrong_in_python(span, is_part=True)
    yield from (f"no variable {name}" for name in re.findall(r"\bFARSPAN_\w+", text) if settings.unknown_names([name]))
    yield from (
        f"no error {name}"
        for name in re.findall(r"\b[A-Z]\w+Error\b", text)
        if name not in _ERRORS and not hasattr(builtins, name)
    )
    yield from (f"no file {name}" for name in _PATH.findall(text) if not (ROOT / name).exists())
    for target, heading in _LINK.findall(prose):
        file = path.parent / target if target else path
        if "://" in target:
            continue
        if not file.exists():
            yield f"no file {target}"
        elif heading and heading not in _headings(file / "README.md" if file.is_dir() else file):
            yield f"no heading {target}#{heading}"


def _wrong_in_python(text: str, *, is_part: bool = False) -> Iterator[str]:
    """Says which names of farspan, and which arguments of its functions, a piece of Python uses that there are not."""
    whole = [
        text,
        re.sub(r"^ +\.\.\.\n", "", text, flags=re.MULTILINE),
    ]  # what a line of dots stands for, in a dictionary
    for each in [text, f"{text}\n    pass", f"{text} pass"] if is_part else whole:
        with contextlib.suppress(SyntaxError):
            tree = ast.parse(textwrap.dedent(each))
            break
    else:
        if not is_part:
            yield f"is no Python: {text}"
        yield from (f"farspan.{name}" for name in re.findall(r"\bfarspan\.(\w+)", text) if not _has("farspan", name))
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "farspan":
            if not _has("farspan", node.attr):
                yield f"farspan.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "farspan":
            yield from (f"{node.module}.{a.name}" for a in node.names if not _has(node.module or "", a.name))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("farspan.")
            known = _arguments(name) if name in _FUNCTIONS else None
            if known is not None and known.kwarg is None:
                names = {each.arg for each in (*known.args, *known.kwonlyargs)}
                yield from (f"{name}({each.arg}=)" for each in node.keywords if each.arg not in {*names, None})


@functools.cache
def _arguments(name: str, module: str = "farspan") -> ast.arguments | None:
    """Returns the arguments of a function of farspan, from its source: torch is not imported for it."""
    files = [
        ROOT.joinpath("src", *module.split(".")).with_suffix(".py"),
        ROOT.joinpath("src", *module.split("."), "__init__.py"),
    ]
    for node in ast.walk(ast.parse(next(_SOURCE[file] for file in files if file in _SOURCE))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node.args
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return _arguments(name, node.module or "")
    return None


def _has(module: str, name: str) -> bool:
    """Returns whether a module has this name, be it a module of its own."""
    try:
        return name in dir(importlib.import_module(module)) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ImportError:
        return False


def _wrong_in_command(line: str, *, is_whole: bool) -> Iterator[str]:
    """Says why farspan would not take a command line; of a part of one, which of its words there are not."""
    try:
        words = shlex.split(line, comments=True)[1:]
        if is_whole or any(word.endswith(".py") for word in words):
            arguments = parse(words)
            if words[0] in _CHECKS:
                _CHECKS[words[0]](arguments)
        elif words[0] not in _COMMANDS:
            yield f"no command {line}"
        else:
            known = set(_options(_COMMANDS[words[0]]))
            options = [word.partition("=")[0] for word in words if word.startswith("-")]
            yield from (f"no option {each} in {line}" for each in options if each not in known)
    except (ValueError, FarspanError) as error:
        yield f"{line}: {str(error).splitlines()[0]}"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(choices[0]) if choices else {}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Gives the options of a parser and of those of its commands."""
    for action in parser._actions:
        yield from action.option_strings
    for command in _commands(parser).values():
        yield from _options(command)


def _headings(path: Path) -> set[str]:
    """Returns the anchors of a document, as GitHub makes them."""
    lines = re.findall(r"^#+ +(.*)$", _BLOCK.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


_PARSER = make_parser()[0]
_COMMANDS = _commands(_PARSER)
_OPTIONS = set(_options(_PARSER))
_CHECKS = {"run": run_command.check_use, "plan": plan_command.check_use}
