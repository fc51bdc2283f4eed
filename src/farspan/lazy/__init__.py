"""Running Python becomes graphs: lazy tensors, the recorder, and where calls are caught."""

from farspan.lazy.context.outer import under_saved_hooks as under_saved_hooks
from farspan.lazy.hooks import without_user_hooks as without_user_hooks
from farspan.lazy.intercept import activate as activate
from farspan.lazy.intercept import install as install
from farspan.lazy.intercept import watch_module as watch_module
from farspan.lazy.intercept import watch_parameter as watch_parameter
from farspan.lazy.leaf import Leaf as Leaf
from farspan.lazy.leaf import Placed as Placed
from farspan.lazy.leaf import swapped as swapped
from farspan.lazy.metadata import MutableArguments as MutableArguments
from farspan.lazy.metadata import Raised as Raised
from farspan.lazy.metadata import Unknown as Unknown
from farspan.lazy.metadata import apply_modes as apply_modes
from farspan.lazy.metadata import describe_result as describe_result
from farspan.lazy.metadata import digest_of as digest_of
from farspan.lazy.metadata import flatten as flatten
from farspan.lazy.metadata import in_region as in_region
from farspan.lazy.metadata import intern as intern
from farspan.lazy.metadata import meta_of as meta_of
from farspan.lazy.metadata import real_attributes as real_attributes
from farspan.lazy.metadata import rebuild as rebuild
from farspan.lazy.metadata import rebuild_arguments as rebuild_arguments
from farspan.lazy.metadata import watched_attributes as watched_attributes
from farspan.lazy.ops.functions import find_where as find_where
from farspan.lazy.ops.functions import format_where as format_where
from farspan.lazy.ops.functions import name_of as name_of
from farspan.lazy.ops.mutation import plain_versions as plain_versions
from farspan.lazy.ops.places import glue_at as glue_at
from farspan.lazy.ops.places import understand_places as understand_places
from farspan.lazy.ops.special import read_recorded as read_recorded
from farspan.lazy.parameters.copying import plan_by_model as plan_by_model
from farspan.lazy.parameters.outside import go_on as go_on
from farspan.lazy.parameters.outside import plain_of as plain_of
from farspan.lazy.parameters.place import Move as Move
from farspan.lazy.parameters.place import Sites as Sites
from farspan.lazy.parameters.place import can_go as can_go
from farspan.lazy.parameters.place import is_free_of_recorded as is_free_of_recorded
from farspan.lazy.parameters.place import moves as moves
from farspan.lazy.parameters.place import place as place
from farspan.lazy.parameters.place import place_anew as place_anew
from farspan.lazy.randomness import GENERATORS as GENERATORS
from farspan.lazy.randomness import Frame as Frame
from farspan.lazy.randomness import active as active
from farspan.lazy.randomness import around_backward as around_backward
from farspan.lazy.randomness import key_of as key_of
from farspan.lazy.randomness import seeded as seeded
from farspan.lazy.received.checked import damaged as damaged
from farspan.lazy.received.decoder import unknown_class as unknown_class
from farspan.lazy.recompute import ModuleUnits as ModuleUnits
from farspan.lazy.recompute import Unit as Unit
from farspan.lazy.recompute import as_packed as as_packed
from farspan.lazy.recompute import repeated_blocks as repeated_blocks
from farspan.lazy.recompute import unpacks_again as unpacks_again
from farspan.lazy.recorder import Recorder as Recorder
from farspan.lazy.shared.exceptions import exception_from_json as exception_from_json
from farspan.lazy.shared.exceptions import exception_to_json as exception_to_json
from farspan.lazy.shared.exceptions import told_as as told_as
from farspan.lazy.shared.inputs import announce as announce
from farspan.lazy.shared.inputs import take_in as take_in
from farspan.lazy.shared.learning import learned_from_run as learned_from_run
from farspan.lazy.shared.learning import learned_from_text as learned_from_text
from farspan.lazy.shared.learning import noting_raised as noting_raised
from farspan.lazy.shared.learning import registering_nothing as registering_nothing
from farspan.lazy.shared.learning import text_for_others as text_for_others
from farspan.lazy.shared.wire import names_in as names_in
from farspan.lazy.shared.wire import structure_from_json as structure_from_json
from farspan.lazy.shared.wire import structure_to_json as structure_to_json
from farspan.lazy.shared.wire import unknown_names as unknown_names
from farspan.lazy.tensor import LazyTensor as LazyTensor
from farspan.lazy.tensor import PassedBy as PassedBy
from farspan.lazy.tensor import StubParameter as StubParameter
from farspan.lazy.versions import is_as_it_was as is_as_it_was
from farspan.lazy.versions import own_versions as own_versions

__all__ = [
    "GENERATORS",
    "Frame",
    "LazyTensor",
    "Leaf",
    "ModuleUnits",
    "Move",
    "MutableArguments",
    "PassedBy",
    "Placed",
    "Recorder",
    "Sites",
    "StubParameter",
    "Unit",
    "Raised",
    "Unknown",
    "activate",
    "active",
    "announce",
    "apply_modes",
    "around_backward",
    "as_packed",
    "can_go",
    "damaged",
    "describe_result",
    "digest_of",
    "exception_from_json",
    "exception_to_json",
    "find_where",
    "flatten",
    "format_where",
    "glue_at",
    "go_on",
    "in_region",
    "is_as_it_was",
    "install",
    "intern",
    "is_free_of_recorded",
    "key_of",
    "learned_from_run",
    "learned_from_text",
    "noting_raised",
    "meta_of",
    "moves",
    "name_of",
    "names_in",
    "own_versions",
    "place",
    "place_anew",
    "plain_of",
    "plain_versions",
    "plan_by_model",
    "read_recorded",
    "real_attributes",
    "rebuild",
    "rebuild_arguments",
    "repeated_blocks",
    "registering_nothing",
    "seeded",
    "structure_from_json",
    "structure_to_json",
    "swapped",
    "take_in",
    "text_for_others",
    "told_as",
    "understand_places",
    "under_saved_hooks",
    "unknown_class",
    "unknown_names",
    "unpacks_again",
    "watch_module",
    "watch_parameter",
    "watched_attributes",
    "without_user_hooks",
]
