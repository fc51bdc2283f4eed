"""What is read of a function's instructions, against Python's own disassembler."""

from __future__ import annotations

import argparse
import dis
import inspect
import types

import torch

from farspan.call.surroundings.instructions import global_names_in, has_class_patterns, imports_in


def _codes_in(*modules: types.ModuleType) -> list[types.CodeType]:
    found = [item.__code__ for module in modules for item in vars(module).values() if inspect.isfunction(item)]
    for code in found:
        found += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return found


def _many_names() -> types.CodeType:
    """A function whose last name has an index of more than a byte."""
    text = "def function(x):\n" + "".join(f"    x.a{number}, g{number}(x), h{number}\n" for number in range(200))
    made = compile(text, "made", "exec")
    return next(item for item in made.co_consts if isinstance(item, types.CodeType))


def test_the_names_of_globals_are_those_that_the_disassembler_finds() -> None:
    codes = [*_codes_in(torch.nn.functional, torch.nn.init, argparse, dis, inspect), _many_names()]
    for code in codes:
        found = [each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME"))]
        assert global_names_in(code) == tuple(dict.fromkeys(found)), code
    assert len(codes) > 300 and global_names_in(codes[-1])[-1] == "h199"


def _matches(item: object) -> bool:
    match item:
        case complex(real=0):
            return True
    return False


def _imports() -> object:
    import json.decoder
    from os.path import join

    return json.decoder, join


def test_patterns_of_classes_and_imports_are_found() -> None:
    assert has_class_patterns(_matches.__code__) and not has_class_patterns(_imports.__code__)
    assert imports_in(_imports.__code__, None) == ("json", "json.decoder", "os", "os.path", "os.path.join")
    assert imports_in(_matches.__code__, None) == ()
