"""Makes what the user's code gets back from a call that has been recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import Entry
from farspan.call.leaf import Leaf
from farspan.call.pytree.template import rebuild
from farspan.call.side_effects.attributes import put_attributes
from farspan.call.side_effects.changes import ATTRIBUTES, apply_result, objects_given
from farspan.graph import Call
from farspan.record.memory.twins import main_of, put_value
from farspan.record.ops.views import join_family
from farspan.record.tensor import LazyTensor
from farspan.torch_private import tree_leaves

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["answer"]


def answer(recorder: Recording, call: Call, entry: Entry, tensors: list[torch.Tensor], given: tuple[Any, ...]) -> Any:
    """Returns lazy tensors in the result's structure, for the user's code; applies the changes of arguments."""
    if entry.is_one_new_tensor:
        return LazyTensor.make(call.outputs[0], recorder)
    for number, argument in enumerate(entry.mutated):
        tensor = tensors[argument]
        if type(tensor) is not LazyTensor:
            continue  # a parameter, which stays what it is
        old, new = tensor._value, call.outputs[entry.num_results + number]
        new.gradient_of, new.gradient_number = old.gradient_of, old.gradient_number  # still the same memory
        put_value(tensor, new)
        if new.gradient_of or main_of(tensor)._parts_of_gradients is not None:
            recorder.gradients.memory.note_written(main_of(tensor))
    results: list[torch.Tensor] = []
    for i in range(entry.num_results):
        same = entry.same_as[i]
        if same >= 0:
            results.append(tensors[same])
            continue
        lazy = LazyTensor.make(call.outputs[i], recorder)
        shared = entry.shares[i]
        if shared >= 0 and (type(tensors[shared]) is LazyTensor or id(tensors[shared]) in recorder.placed):
            join_family(lazy, tensors[shared], call, i, recorder.placed)
        results.append(lazy)
    if not entry.changes and not entry.names_arguments:
        return rebuild(entry.template, results)
    objects = objects_given(given)
    result = apply_result(entry.template, entry.changes, results, objects)
    if type(call.target) is Leaf:
        if not call.target.attributes.keys() >= set(entry.attributes):
            call.target.attributes.update(dict.fromkeys(entry.attributes))
            call.target.own_objects = None
        put_attributes(call.target.modules, call.target.attributes, objects[ATTRIBUTES])
        kept = tree_leaves(objects[ATTRIBUTES]) if call.target.runs_code_backward else ()
        if any(isinstance(item, LazyTensor) for item in kept):
            recorder.changing_backwards.note_setting(call)
        if any(name.endswith(".training") for name in call.target.attributes):
            recorder.forget_states()  # `self.norm.eval()` in a forward
    return result
