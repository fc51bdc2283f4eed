"""Sixty faults as a person makes them in `src/farspan`: each a small replacement of text, and a program that it breaks.

They were written from the code alone, by somebody who had not read the grammar.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        name: For people, and for rows of results.
        file: Below `src/farspan`.
        old: Text that is there once.
        new: What it becomes.
        breaks: A program that a user could write, and that gives something else then.
        when: What holds, where the text is come to, if the fault makes a difference; "" where it always may.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    when: str


def _fault(name: str, file: str, old: str, new: str, breaks: str, *, when: str = "") -> Fault:
    return Fault(name=name, file=file, old=old, new=new, breaks=breaks, when=when)


_RECORD = [
    _fault(
        "autocast left out of a key",
        "record/recorder.py",
        "key = (target, shape, tuple(metas), modes, state)",
        "key = (target, shape, tuple(metas), modes[:2], state)",
        "the same call first without autocast and then in it",
        when="modes[2]",
    ),
    _fault(
        "a buffer is read before the current batch",
        "record/recorder.py",
        "placed.is_written and self.has_pending():",
        "placed.is_written and self.pending:",
        "norm.running_mean is read between a forward and its backward",
        when="placed is not None and placed.is_written and self.has_pending() and not self.pending",
    ),
    _fault(
        "an earlier call sees an attribute that a later one sets",
        "record/recorder.py",
        "if any(call.target is target for graph in (*self.pending, self.current) for call in graph.calls):",
        "if any(call.target is target for graph in self.pending for call in graph.calls):",
        "a module that begins to set an attribute in its second call of a batch",
        when="any(call.target is target for call in self.current.calls)",
    ),
    _fault(
        "what waits sees a later write",
        "record/ops/mutation.py",
        "memory = plain.detach().clone() if memory is None else memory",
        "memory = plain.detach() if memory is None else memory",
        "a mask is used in a loss, and written in place before the loss is read",
    ),
    _fault(
        "versions of a batch are not noted",
        "record/recorder.py",
        "if len(used) < len(arguments) or self.outside.is_used:",
        "if self.outside.is_used:",
        "the batch's own memory is filled anew after the forward, before backward runs",
        when="len(used) < len(arguments) and not self.outside.is_used",
    ),
    _fault(
        "what a checkpoint counts again is forgotten",
        "record/recorder.py",
        "call.is_recounted = is_checkpointed and counts_again(self, call, tensors)",
        "call.is_recounted = False",
        "a batch norm in a checkpoint",
        when="is_checkpointed and counts_again(self, call, tensors)",
    ),
    _fault(
        "a write is missed by views",
        "record/ops/views.py",
        "return lazy._view is not None or any(member() is not None for member in lazy._family or ())",
        "return lazy._view is not None",
        "v = h[:, :2]; h.mul_(2); v is used",
        when="lazy._view is None and any(member() is not None for member in lazy._family or ())",
    ),
    _fault(
        "a write goes into the root itself",
        "record/ops/views.py",
        "                root = root.clone()\n",
        "                root = root.view_as(root)\n",
        "a view of an activation that autograd has saved, or others read, is written",
    ),
    _fault(
        "a view of a buffer is old",
        "record/ops/views.py",
        "return any(placed in leaf.placed for leaf in leaves)",
        "return False",
        "v = norm.running_mean[:2]; model(x); v is read",
        when="any(placed in leaf.placed for leaf in leaves)",
    ),
    _fault(
        "gradients are cleared before the backward has run",
        "record/parameters/gradients.py",
        "recorder.hooks.are_there or recorder.hooks.are_running or recorder.num_pending_backwards:",
        "recorder.hooks.are_there or recorder.hooks.are_running:",
        "a batch is thrown away: backward, zero_grad, and the next batch",
        when="recorder.num_pending_backwards",
    ),
    _fault(
        "a retained gradient is not added up",
        "record/nodes/tensor_hooks.py",
        "lazy.grad = now[number].clone() if lazy.grad is None else lazy.grad + now[number]",
        "lazy.grad = now[number].clone()",
        "h.retain_grad(), and two backwards through h",
        when="lazy.grad is not None",
    ),
    _fault(
        "the result of a parameter's hook is dropped",
        "record/parameters/parameter_hooks.py",
        "gradient = changed(hook, gradient, hook(gradient))",
        "changed(hook, gradient, hook(gradient))",
        "weight.register_hook(lambda gradient: gradient * 0.5)",
    ),
    _fault(
        "an input's gradient is read too early",
        "record/parameters/outside_tensors.py",
        "outside.is_used and recorder.num_pending_backwards > 0",
        "outside.is_used and recorder.num_pending_backwards > 1",
        "x.requires_grad_(); backward; x.grad is read",
        when="outside.is_used and recorder.num_pending_backwards == 1",
    ),
    _fault(
        "a buffer used outside its module is not fixed",
        "record/parameters/parameter_values.py",
        "placed.tensor.detach().clone() if is_fixed else placed.tensor",
        "placed.tensor.detach() if is_fixed else placed.tensor",
        "x - norm.running_mean is recorded, and then norm is called, in one batch",
        when="is_fixed",
    ),
    _fault(
        "an old cast is not noticed",
        "record/stale_casts.py",
        "for each in cast if engine.has_gradient(each))",
        "for each in cast if not engine.has_gradient(each))",
        "autocast around several steps: torch goes on with the old cast of a weight",
        when="cast",
    ),
    _fault(
        "a part of a tensor that a module holds is written",
        "record/held_objects.py",
        "if is_known or (tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._memory):",
        "if is_known:",
        "model.a.scale, a plain tensor, is changed by scale[:2].mul_(2) between two batches",
        when="not is_known and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._memory",
    ),
    _fault(
        "the present is not put back",
        "record/held_objects.py",
        "            present.go_to()\n",
        "",
        "a global that modules read is set anew before each batch, and read after the step",
        when="self.moments.present is not present",
    ),
    _fault(
        "ignored targets are counted",
        "record/lanes/losses.py",
        'is_counted = target != others["ignore_index"]',
        "is_counted = target == target",
        "cross_entropy with ignore_index under micro_batches=",
        when='bool((target == others["ignore_index"]).any())',
    ),
    _fault(
        "a held state dictionary is old",
        "record/memory/parameter_copies.py",
        "        self.refresh(used)\n        for copy, storage in written:",
        "        for copy, storage in written:",
        "kept = model.state_dict() before the loop is read after a step",
        when="any(copy.epoch != self.epoch for tensor in used for copy in self._of(tensor))",
    ),
    _fault(
        "an old norm of slices is kept",
        "record/team/slices/gradient.py",
        "if values == tuple(part._value for part in gradient._parts):",
        "if values is not None:",
        "tensor_parallel: norms of gradients are read, gradients scaled, and norms read again",
        when="values is not None and values != tuple(part._value for part in gradient._parts)",
    ),
    _fault(
        "a write into a whole gradient is not in its slices",
        "record/team/slices/gradient.py",
        "    for item in written:\n        _write_back(item, wholes[id(item)])\n",
        "",
        "tensor_parallel: p.grad[0] = 0, or p.grad.clamp_(...) with a tensor",
        when="written",
    ),
]

_CALL = [
    _fault(
        "what is in a global is not put back",
        "call/surroundings/around.py",
        "                _put(place, name, ABSENT)\n        self._state.put_back(self._state.changed())\n",
        "                _put(place, name, ABSENT)\n",
        'CONFIG["scale"] = 2 between two batches of one step',
        when="self._state.changed()",
    ),
    _fault(
        "calls write into one version of a buffer",
        "call/buffer_versions.py",
        "items = versioned(leaf) if is_known else _held(leaf)",
        "items = [] if is_known else _held(leaf)",
        "x * self.scale with a buffer that each call writes, several batches a step",
        when="is_known and versioned(leaf)",
    ),
    _fault(
        "autocast around the reader leaks in",
        "call/modes.py",
        "            elif torch.is_autocast_enabled(kind):\n"
        "                stack.enter_context(torch.autocast(kind, enabled=False))\n",
        "",
        "a forward without autocast, of which a value is read in an autocast region",
    ),
    _fault(
        "remat draws again",
        "call/draws/scope.py",
        "                generator.set_state(state)\n            if scope is None",
        "                pass\n            if scope is None",
        "dropout under remat=",
    ),
    _fault(
        "remat counts statistics twice",
        "call/remat/modules.py",
        "                buffers.put_back(),\n",
        "",
        "batch norm, or a counter in a buffer, under remat=",
        when="buffers.copies",
    ),
    _fault(
        "remat loses autocast",
        "call/remat/modules.py",
        "                apply_modes(modes),\n",
        "",
        "autocast around the forward only, under remat=",
        when="modes != current_modes()",
    ),
    _fault(
        "remat does not check versions",
        "call/remat/unit.py",
        "if any(_version_of(tensor) != version for tensor, version in inputs):",
        "if any(_version_of(tensor) < version for tensor, version in inputs):",
        "x + block(x) written as x.add_(block(x).detach()) under remat=: an error, or other gradients",
        when="any(_version_of(tensor) != version for tensor, version in inputs)",
    ),
    _fault(
        "attributes of a run stay",
        "call/side_effects/attributes.py",
        "    finally:\n        put_attributes(modules, keys, before)\n\n\n@contextlib.contextmanager\ndef watched",
        "    finally:\n        pass\n\n\n@contextlib.contextmanager\ndef watched",
        "a counter in an attribute, several batches a step: the first one runs after the last one is recorded",
        when="any(attributes_of(modules, keys).get(key) is not before.get(key) for key in keys)",
    ),
    _fault(
        "a context variable is not seen",
        "call/side_effects/rehearsal.py",
        'raise TraceError(f"it sets the context variable {variable.name}")',
        "continue",
        "a module that sets a ContextVar which another one, or the loop, reads",
    ),
    _fault(
        "a list among globals grows twice",
        "call/surroundings/around.py",
        "    inside = state.changed()\n    state.put_back(inside)\n",
        "    inside = state.changed()\n",
        "SEEN.append(1) in a module's forward",
        when="inside",
    ),
    _fault(
        "freezing inside of a forward is not seen",
        "call/side_effects/registered.py",
        "if any(tensor.requires_grad != flag for tensor, flag in self._flags):",
        "if False:",
        "self.first.weight.requires_grad_(False) in a forward, from the third call on",
        when="any(tensor.requires_grad != flag for tensor, flag in self._flags)",
    ),
    _fault(
        "settings are left out of a key",
        "call/leaf.py",
        "                tuple(self.settings.items()),\n",
        "",
        "model.block.returns_both = True between two batches",
        when="self.settings",
    ),
    _fault(
        "the result of a forward hook is lost",
        "call/user_hooks.py",
        "            result = result if changed is None else changed\n",
        "",
        "module.register_forward_hook(lambda module, args, result: result * 2)",
        when="changed is not None",
    ),
]

_EXECUTE = [
    _fault(
        "a call sees what is around it now",
        "execute/step/segment.py",
        "    if call.moment.snapshots:\n        call.moment.go_to()\n",
        "",
        "a global that modules read is set anew before each batch of a step",
        when="call.moment._moments.present is not call.moment",
    ),
    _fault(
        "a backward sees what is around it now",
        "execute/step/segment.py",
        "        if part.backward.moment.snapshots:\n            part.backward.moment.go_to()\n",
        "",
        "a global that an autograd function's backward reads is set anew before each batch",
        when="part.backward.moment._moments.present is not part.backward.moment",
    ),
    _fault(
        "casts of a region are not shared",
        "execute/step/segment.py",
        "            with in_region(region):\n",
        "            with _NOTHING:\n",
        "a module called twice in one autocast region: gradients are added up in bfloat16",
        when="region",
    ),
    _fault(
        "what has come over a border is written",
        "execute/step/segment.py",
        "            return tensor.clone()  # came over a border: not ours alone, and a leaf of autograd",
        "            return tensor  # came over a border: not ours alone, and a leaf of autograd",
        "F.relu(x, inplace=True) at the beginning of a stage",
    ),
    _fault(
        "hooks on what is saved are lost",
        "execute/step/segment.py",
        "_NOTHING if call.saved_hooks is None else under_saved_hooks(call.saved_hooks),",
        "_NOTHING,",
        "saved_tensors_hooks that round what is saved, around a forward",
        when="call.saved_hooks is not None",
    ),
    _fault(
        "a gradient that was set aside is lost",
        "execute/step/segment.py",
        "    _put_back(aside)\n    if not part.backward.retain_graph:",
        "    if not part.backward.retain_graph:",
        "a weight tied over stages, several batches a step",
        when="aside",
    ),
    _fault(
        "deferred gradients come late",
        "execute/step/executor.py",
        "        for part in parts[: late[-1] + 1] if late else []:\n"
        "            self._run_weights(part)\n\n    def _drop",
        "        for part in parts[: late[-1]] if late else []:\n            self._run_weights(part)\n\n    def _drop",
        'schedule="zero-bubble", a weight that cannot be deferred in some batches: another order of sums',
        when="late",
    ),
    _fault(
        "a gradient that is not there is taken for one",
        "execute/step/executor.py",
        "self.gradients[item] = None if may_be_absent and is_absent(tensor) else tensor",
        "self.gradients[item] = tensor",
        "a tied weight that one of its modules uses only for some data",
        when="may_be_absent and is_absent(tensor)",
    ),
    _fault(
        "a parameter frozen meanwhile gets a gradient",
        "execute/weights/reductions.py",
        "if gradient is None or not tensor.requires_grad:",
        "if gradient is None:",
        "a tied weight is frozen between forward and backward",
        when="gradient is not None and not tensor.requires_grad",
    ),
    _fault(
        "what was read ahead stays",
        "execute/values.py",
        "        self.ahead.forget()\n        with self._progressed:",
        "        with self._progressed:",
        "weights are read after each step",
        when="self.ahead._fetched",
    ),
    _fault(
        "shown state is taken for a step's",
        "execute/optimizers/watched_steps.py",
        "        steps.stepped.discard(optimizer)\n        show_to_all(engine, optimizer, number)",
        "        show_to_all(engine, optimizer, number)",
        "optimizer.state[p] is read, and then the optimizer steps again",
    ),
    _fault(
        "noise for other ranks is not drawn",
        "execute/optimizers/step_view.py",
        "if entry.is_random:  # the rank",
        "if False:  # the rank",
        "an optimizer of the program's own that adds torch.randn_like(p)",
        when="entry.is_random",
    ),
    _fault(
        "generators of the reader are not shared",
        "execute/step/inputs.py",
        "if any(other != digests[rank] for other in digests):",
        "if False:",
        "the rank that reads a batch draws (a shuffle, an augmentation) before from_rank",
        when="any(other != digests[rank] for other in digests)",
    ),
    _fault(
        "a batch may be written after from_rank",
        "execute/step/inputs.py",
        "if known is not None and plain_versions([value.data]) != known[0]:",
        "if known is not None and plain_versions([value.data]) == ():",
        "the reader fills the memory of its batch anew for the next one",
        when="known is not None and plain_versions([value.data]) != known[0]",
    ),
    _fault(
        "groups keep their own statistics",
        "execute/data_axis/reduction.py",
        "                take_from_first(buffers, self.peers, self.wait)\n            else:",
        "            else:",
        "batch norm under data_parallel=, each group with data of its own",
    ),
    _fault(
        "gradients are added and not averaged",
        "execute/data_axis/window.py",
        "flat = bucket.fill(1 / self.num_groups, self._fresh)",
        "flat = bucket.fill(1.0, self._fresh)",
        "any program under data_parallel=",
    ),
    _fault(
        "weights that have come stay after a step",
        "execute/shards/parameters.py",
        "            self._here.clear()\n            self._here_bytes = 0\n",
        "            self._here_bytes = 0\n",
        'shard="parameters", two steps',
    ),
    _fault(
        "copies of a wide stage stay after a step",
        "execute/engine.py",
        "        self.executor.replicas.forget()\n",
        "",
        "a wide stage, and weights that are loaded, or written, between two steps",
        when="self.executor.replicas.known",
    ),
]

_SCHEDULE_AND_PLACE = [
    _fault(
        "messages go in the order of numbers",
        "schedule/messages.py",
        "sorted(users, key=place.__getitem__, reverse=True)",
        "sorted(users, reverse=True)",
        "several batches a step, a schedule that lets a later task send first",
        when="sorted(users, key=place.__getitem__) != sorted(users)",
    ),
    _fault(
        "the measured step adds in another order",
        "place/measure/profiling_executor.py",
        "            self._run_weights_of(part.accumulates_into)\n",
        "            pass\n",
        "several batches in the first step, a module that is called in all of them",
        when="any(not each.accumulates_into.keys().isdisjoint(part.accumulates_into) for each in self.deferred)",
    ),
    _fault(
        "the measured step hands over what the program holds",
        "place/measure/working_memory.py",
        "is_needed = value.is_held or value.num_readers > 0",
        "is_needed = value.num_readers > 0",
        "an activation of the first step is kept, and read after it",
        when="value.is_held",
    ),
    _fault(
        "gradients are left behind",
        "place/repartition/migrate.py",
        "        for each in coming:\n            each.settle(engine)\n",
        "",
        "p.grad is read after the first step, or never cleared",
        when="any(each.gradient is not None for each in coming)",
    ),
    _fault(
        "the optimizer's state is left behind",
        "place/repartition/moved_states.py",
        "        if not self._goes(number, item, place, tensor):\n            return tensor\n",
        "        if not self._goes(number, item, place, tensor) or item.is_owned:\n            return tensor\n",
        "Adam, and a plan after the first step that moves parameters",
        when="self._goes(number, item, place, tensor) and item.is_owned",
    ),
    _fault(
        "parameters with hooks move",
        "place/repartition/migrate.py",
        "if any(item.hooked_at is not None for item in engine.parameters.values()):",
        "if False:",
        "weight.register_hook(hook) before the first step, and a plan that moves it",
        when="any(item.hooked_at is not None for item in engine.parameters.values())",
    ),
    _fault(
        "a hook inside a unit is lost in another plan",
        "place/owners.py",
        "    open_leaves(recorder.leaves.values())\n",
        "",
        "model.block.lin.register_forward_hook(hook) before distribute, or before the plan changes",
        when="any(part._forward_hooks for leaf in leaves for part in leaf.modules[1:])",
    ),
    _fault(
        "what is written on a parameter is lost",
        "place/owners.py",
        "    vars(tensor).update(vars(stub))  # what the program has written on the parameter",
        "",
        "p.decay = 0.1 on parameters, which the loop reads",
        when="vars(stub)",
    ),
]

FAULTS = [*_RECORD, *_CALL, *_EXECUTE, *_SCHEDULE_AND_PLACE]
