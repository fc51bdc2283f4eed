"""The random generators of a program, as JSON: those that all code draws from, and those that it has made itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from farspan.call.draws.generators import GENERATORS
from farspan.devices import accelerators, get_generator_state, set_generator_state
from farspan.documents import as_object
from farspan.errors import CheckpointError

__all__ = ["generators_from_json", "generators_to_json", "is_generator", "one_from_json", "one_to_json"]

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def generators_to_json(generator: torch.Generator) -> dict[str, Any]:
    """Returns the states of Python's, numpy's and torch's generators, those of devices too; torch's own is
    `generator`."""
    with GENERATORS:
        found = {
            "torch": _torch_to_json(generator),
            "python": _python_to_json(random.getstate()),
            "numpy": _numpy_to_json(np.random.get_state(legacy=False)),
        }
    for device in accelerators():
        found[str(device)] = get_generator_state(device).numpy().tobytes().hex()
    return found


def generators_from_json(generator: torch.Generator, value: Any, where: str) -> None:
    """Set them to what `generators_to_json` gave.

    Raises:
        CheckpointError: It gave something else.
    """
    found = as_object(value, where, needed=("torch", "python", "numpy"))
    with _checked(where), GENERATORS:
        random.setstate(_python_from_json(found["python"]))
        np.random.set_state(_numpy_from_json(found["numpy"]))
        generator.set_state(_bytes_to_tensor(found["torch"]))
        for device in accelerators():
            if str(device) in found:
                set_generator_state(device, _bytes_to_tensor(found[str(device)]))


# Generators that the program has made itself.


def is_generator(value: Any) -> bool:
    return isinstance(value, _KINDS)


def one_to_json(value: Any) -> Any:
    """Returns the state of a generator of the program's own."""
    if isinstance(value, torch.Generator):
        return _torch_to_json(value)
    if isinstance(value, random.Random):
        return _python_to_json(value.getstate())
    state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)
    return _numpy_to_json(state)


def one_from_json(value: Any, saved: Any, where: str) -> None:
    """Set it to what `one_to_json` gave for a generator of its kind."""
    with _checked(where):
        if isinstance(value, torch.Generator):
            value.set_state(_bytes_to_tensor(saved))
        elif isinstance(value, random.Random):
            value.setstate(_python_from_json(saved))
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = _numpy_from_json(saved)
        else:
            value.set_state(_numpy_from_json(saved))


class _checked:  # noqa: N801 - reads as a verb
    """Turns the error of a generator that does not take a state into an error about the checkpoint."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError)):
            raise CheckpointError(
                f"{self.where}: this is no state of such a generator.", why=str(error)[:200], hint="another checkpoint"
            ) from None


def _torch_to_json(generator: torch.Generator) -> str:
    return generator.get_state().numpy().tobytes().hex()


def _bytes_to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def _python_to_json(state: Any) -> list[Any]:
    version, table, gauss = state
    return [version, np.asarray(table, dtype=np.uint32).tobytes().hex(), gauss]


def _python_from_json(value: Any) -> Any:
    version, table, gauss = value
    return version, tuple(np.frombuffer(bytes.fromhex(table), dtype=np.uint32).tolist()), gauss


def _numpy_to_json(state: Any) -> Any:
    """Returns a bit generator's state: a dictionary of texts, whole numbers, arrays and such dictionaries."""
    if isinstance(state, dict):
        return {key: _numpy_to_json(item) for key, item in state.items()}
    if isinstance(state, np.ndarray):
        return {"$array": [state.dtype.name, state.tobytes().hex()]}
    return state.item() if isinstance(state, np.generic) else state


def _numpy_from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        name, data = value["$array"]
        if name not in ("uint32", "uint64"):
            raise ValueError(name)
        return np.frombuffer(bytes.fromhex(data), dtype=name)
    if "bit_generator" in value and value["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(str(value["bit_generator"])[:40])
    return {key: _numpy_from_json(item) for key, item in value.items()}
