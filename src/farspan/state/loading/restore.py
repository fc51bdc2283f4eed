"""Restoring what the program gives from a checkpoint: first everything is verified, then everything is changed.

plan        each tensor that this rank needs, and each value that is no tensor; names and shapes must fit
verify      tensors that are read in place are verified; others are read, and verified, into memory of their own
(all ranks vote)
apply       in place, verified again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Placed
from farspan.comm.tensor_bytes import buffer_of, overwrite
from farspan.documents import as_list, as_object
from farspan.errors import CheckpointError
from farspan.execute.engine import Engine
from farspan.execute.optimizers.kept_state import raw_state
from farspan.execute.optimizers.states import GivenState
from farspan.record.memory.exchanged import become_plain
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import plainly
from farspan.state.format import Manifest, Reader
from farspan.state.generators import is_generator, one_from_json
from farspan.state.names import named_tensors, touch
from farspan.state.saving.collect import has_plain_state, is_stateful
from farspan.state.values import decode, torch_dtype
from farspan.torch_private import DisableTorchFunction

__all__ = ["Restorer"]


class Restorer:
    """Restores a checkpoint on one rank.

    Args:
        engine: This rank's.
        reader: Of the checkpoint.
        names: By id what parameters are called in optimizers' states.
        folder: Of the checkpoint, for people.
    """

    def __init__(self, engine: Engine, reader: Reader, names: Mapping[int, str], folder: str) -> None:
        self.placed: Mapping[int, Placed] = engine.recorder.placed
        self.engine = engine
        self.reader = reader
        self.manifest: Manifest = reader.manifest
        self.names = names
        self.folder = folder
        self.in_place: list[tuple[str, torch.Tensor]] = []
        """By their names in the checkpoint the program's tensors that are overwritten, once all is verified."""
        self.new: list[tuple[str, torch.Tensor]] = []
        """By their names in the checkpoint new tensors, which `verify` fills."""
        self.actions: list[Callable[[], object]] = []
        """What else is done, in this order."""

    # Planning; nothing of the program's is changed.

    def restore(self, value: Any, saved: Any, path: str) -> None:
        """Plan to restore `value` from what was saved at `path`.

        Raises:
            CheckpointError: It was saved from something else, or is damaged.
        """
        kind = self._kind_of(saved, path)
        if isinstance(value, nn.Module) and kind == "module":
            self._module(value, saved, path)
        elif isinstance(value, Optimizer) and has_plain_state(value) and kind == "optimizer":
            self._optimizer(value, saved, path)
        elif is_stateful(value) and kind == "state_dict":
            state = self.decode(saved["value"], path)
            self.actions.append(lambda: value.load_state_dict(state))
        elif is_generator(value) and kind == "generator":
            self.actions.append(lambda: one_from_json(value, saved["value"], path))
        elif isinstance(value, dict) and kind == "mapping":
            for key, item in value.items():
                self.restore(item, self._item(saved, key, path), f"{path}/{key}")
        else:
            raise CheckpointError(
                f"{path} in {self.folder} is not what it is to be loaded into.",
                why=f"it was saved as a {kind}; the program gives a {type(value).__name__}.",
                hint=f"give what was saved as {path}",
            )

    def plain(self, saved: Any, path: str) -> Any:
        """Returns what was saved as plain values: without models, optimizers and others that keep their own state."""
        kind = self._kind_of(saved, path)
        if kind == "mapping":
            items = as_object(saved["items"], path)
            found = {key: self.plain(item, f"{path}/{key}") for key, item in items.items()}
            return {key: item for key, item in found.items() if item is not _NOT_PLAIN}
        return self.decode(saved["value"], path) if kind == "value" else _NOT_PLAIN

    def verify(self) -> None:
        """Raise if anything is damaged; else what was planned to be read into memory of its own has been read."""
        new: list[tuple[str, memoryview | None]] = [(name, buffer_of(tensor)) for name, tensor in self.new]
        self.reader.read_all(new + [(name, None) for name, _ in self.in_place])

    def decode(self, saved: Any, path: str) -> Any:
        return decode(saved, self.read_later, f"{path} in {self.folder}")

    def read_later(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Returns memory for a stored tensor, which `verify` fills: laid out as `like`, if it has the same sizes."""
        stored = self._stored(name)
        if like is not None and _is_laid_out(like, stored.shape):
            with DisableTorchFunction():
                laid_out = torch.empty_like(like, dtype=torch_dtype(stored.dtype), requires_grad=False)
                return laid_out.copy_(self.read_now(name))  # at once: its copy in row-major order is in no one's way
        plain = self._empty(name)
        self.new.append((name, plain))
        return plain

    def read_now(self, name: str) -> torch.Tensor:
        """Returns a stored tensor in memory of its own."""
        plain = self._empty(name)
        self.reader.read(name, buffer_of(plain))
        return plain

    def _empty(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        with DisableTorchFunction():
            return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))

    def _stored(self, name: Any) -> Any:
        stored = self.manifest.tensors.get(name) if isinstance(name, str) else None
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {str(name)[:100]}.", hint="another checkpoint")
        return stored

    def _kind_of(self, saved: Any, path: str) -> str:
        return str(as_object(saved, f"{path} in {self.folder}", needed=("kind",))["kind"])

    def _item(self, saved: Any, key: str, path: str) -> Any:
        items = as_object(saved["items"], path)
        if key not in items:
            raise CheckpointError(
                f"{self.folder} has no {path}/{key}.", why=f"it has {', '.join(items)[:200]}.", hint="leave it out"
            )
        return items[key]

    def _module(self, module: nn.Module, saved: Any, path: str) -> None:
        own = dict(named_tensors(module))
        prefix = f"{path}/"
        there = {name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix)}
        aliases = as_object(saved["aliases"], path)
        there = {name for name in there if "/" not in name or name in own}
        wanted = [(str(aliases.get(name, name)), tensor) for name, tensor in own.items()]  # not tied now: one for two
        names = {name for name, _ in wanted}
        if missing := sorted(names - there):
            raise self._other_model(path, f"it has no {missing[0]}", len(missing))
        if extra := sorted(there - names):
            raise self._other_model(path, f"the program's model has no {extra[0]}", len(extra))
        for name, tensor in wanted:
            stored = self.manifest.tensors[prefix + name]
            if tuple(tensor.shape) != stored.shape:
                words = f"{name} is {list(stored.shape)} there, and {list(tensor.shape)} in the program"
                raise self._other_model(path, words, 1)
            item = self.placed.get(id(tensor))
            if item is None or (item.is_owned and not self._is_away(item)):
                self.in_place.append((prefix + name, tensor))
        parts = dict(module.named_modules())
        for name, value in as_object(saved["extra_state"], path).items():
            if name in parts:
                state = self.decode(value, path)
                self.actions.append(lambda part=parts[name], state=state: part.set_extra_state(state))

    def _is_away(self, item: Placed) -> bool:
        shards = self.engine.groups.shards
        return shards is not None and shards.is_away(item)

    def _other_model(self, path: str, words: str, count: int) -> CheckpointError:
        more = f" (and {count - 1} more like it)" if count > 1 else ""
        return CheckpointError(
            f"{self.folder} is of another {path}.", why=f"{words}{more}.", hint="the model that was saved"
        )

    def _optimizer(self, optimizer: Optimizer, saved: Any, path: str) -> None:
        groups = as_list(saved["groups"], path)
        states = as_object(self.manifest.state["optimizers"], path).get(path, {})
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{path} in {self.folder} has {len(groups)} groups of parameters.",
                why=f"the program's has {len(optimizer.param_groups)}.",
                hint="an optimizer that is made as the one that was saved",
            )
        whole: dict[Any, Any] = {}
        given: dict[str, Any] = {}
        described: list[dict[str, Any]] = []
        parameters: dict[int, torch.Tensor] = {}
        for number, (group, one) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            indices: list[int] = []
            for index, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter), f"group {number}/{index}")
                if name not in one["params"]:
                    raise CheckpointError(
                        f"{path} in {self.folder} does not have {name} in its group {number}.",
                        why=f"it has {len(one['params'])} parameters there: {', '.join(one['params'])[:150]}",
                        hint="an optimizer that is made as the one that was saved, and its model= beside it",
                    )
                indices.append(len(parameters))
                if name in states:
                    whole[len(parameters)] = self._state(states[name], parameter, f"{path}/{name}", given)
                parameters[len(parameters)] = parameter
            if len(indices) != len(one["params"]):
                raise CheckpointError(
                    f"{path} in {self.folder} has {len(one['params'])} parameters in its group {number}.",
                    why=f"the program's has {len(indices)}.",
                    hint="an optimizer that is made as the one that was saved",
                )
            settings = self.decode(one["settings"], path)
            described.append({**settings, "params": indices})
        whole.update(self.decode(saved["other"], path))
        state = GivenState({"state": whole, "param_groups": described})
        state.given = given

        def act() -> None:
            optimizer.load_state_dict(state)
            with plainly(self.engine.recorder):
                _keep_dtypes(optimizer, whole, parameters)

        self.actions.append(act)

    def _state(self, saved: Any, parameter: torch.Tensor, path: str, given: dict[str, Any]) -> Any:
        """Returns what an optimizer keeps for a parameter; for one of another rank, only what every rank has."""
        item = self.placed.get(id(parameter))
        where = f"{path} in {self.folder}"
        if item is None or item.is_owned:
            found = decode(saved, lambda name: self.read_later(name, parameter), where)
            if item is not None:
                given[item.name] = found
            return found

        def is_small(name: str) -> bool:
            stored = self._stored(name)
            size = torch.Size(stored.shape).numel()
            return not stored.shape or size > item.meta.numel

        def without_memory(name: str) -> torch.Tensor:
            if is_small(name):
                return self.read_later(name)
            stored = self._stored(name)
            return torch.zeros((), dtype=torch_dtype(stored.dtype)).expand(stored.shape)

        def with_strides(name: str) -> torch.Tensor:
            stored = self._stored(name)
            is_alike = stored.shape == tuple(item.meta.shape)
            dtype = torch_dtype(stored.dtype)
            if is_alike:
                return torch.empty_strided(item.meta.shape, item.meta.stride, dtype=dtype, device="meta")
            return torch.empty(stored.shape, dtype=dtype, device="meta")

        given[item.name] = decode(saved, with_strides, where)
        return decode(saved, without_memory, where)

    # Changing.

    def apply(self) -> None:
        """Read what is read in place, and do all that was planned."""
        self.engine.slices.come_home("farspan.load")
        self.engine.groups.begin_write("farspan.load")
        with plainly(self.engine.recorder):
            is_direct = [self._is_direct(name, tensor) for name, tensor in self.in_place]
            both = list(zip(self.in_place, is_direct, strict=True))
            direct = [item for item, is_it in both if is_it]
            with torch.no_grad(), DisableTorchFunction():
                self.reader.read_all([(name, buffer_of(tensor.detach())) for name, tensor in direct])
            for _, tensor in direct:
                torch.autograd.graph.increment_version(tensor)
            for (name, tensor), is_it in both:
                if not is_it:
                    self._overwrite(name, tensor)
        self.engine.groups.end_write()
        self.engine.parameters_changed()
        for act in self.actions:
            act()

    def _is_direct(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether what was stored can be read into a tensor's own memory."""
        if id(tensor) not in self.placed:
            touch(tensor)
        if type(tensor) is LazyTensor or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return False
        is_alike = tensor.dtype == torch_dtype(self._stored(name).dtype)
        return is_alike and not tensor.is_conj() and not tensor.is_neg()

    def _overwrite(self, name: str, tensor: torch.Tensor) -> None:
        stored = self.read_now(name)
        if type(tensor) is LazyTensor:
            become_plain(self.engine.recorder, tensor, stored.to(tensor.dtype))
        else:
            with torch.no_grad(), DisableTorchFunction():
                overwrite(tensor, stored)


def _is_laid_out(like: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a new tensor of these sizes shall lie as `like` does, other than in row-major order on the CPU."""
    is_plain = like.is_contiguous() and like.device.type == "cpu"
    return not is_plain and like.device.type != "meta" and tuple(like.shape) == shape


class _NotPlain:
    pass


_NOT_PLAIN: Any = _NotPlain()


def _keep_dtypes(optimizer: Optimizer, whole: Mapping[Any, Any], parameters: Mapping[int, torch.Tensor]) -> None:
    """torch gives what an optimizer keeps the dtype of its parameter; it shall have the one that was saved."""
    state = raw_state(optimizer)
    for number, parameter in parameters.items():
        kept, saved = state.get(parameter), whole.get(number)
        if not isinstance(kept, dict) or not isinstance(saved, dict):
            continue
        for key, tensor in saved.items():
            now = kept.get(key)
            if type(now) is torch.Tensor and type(tensor) is torch.Tensor and now.dtype != tensor.dtype:
                kept[key] = tensor.to(now.device)
