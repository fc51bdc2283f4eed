"""What a call gives, without running it: found once for each kind of call with fake tensors, then cached."""

from farspan.lazy.metadata.canonical import canonical as canonical
from farspan.lazy.metadata.canonical import digest_of as digest_of
from farspan.lazy.metadata.canonical import is_plain as is_plain
from farspan.lazy.metadata.effects.attributes import OwnObjects as OwnObjects
from farspan.lazy.metadata.effects.attributes import attributes_of as attributes_of
from farspan.lazy.metadata.effects.attributes import attributes_with_tensors as attributes_with_tensors
from farspan.lazy.metadata.effects.attributes import holds_hidden as holds_hidden
from farspan.lazy.metadata.effects.attributes import own_attributes as own_attributes
from farspan.lazy.metadata.effects.attributes import put_attributes as put_attributes
from farspan.lazy.metadata.effects.attributes import put_own_attributes as put_own_attributes
from farspan.lazy.metadata.effects.attributes import real_attributes as real_attributes
from farspan.lazy.metadata.effects.attributes import watched_attributes as watched_attributes
from farspan.lazy.metadata.effects.changes import ATTRIBUTES as ATTRIBUTES
from farspan.lazy.metadata.effects.changes import MutableArguments as MutableArguments
from farspan.lazy.metadata.effects.changes import apply_result as apply_result
from farspan.lazy.metadata.effects.changes import describe_result as describe_result
from farspan.lazy.metadata.effects.changes import objects_given as objects_given
from farspan.lazy.metadata.effects.changes import rebuild_arguments as rebuild_arguments
from farspan.lazy.metadata.effects.hidden import generators_held as generators_held
from farspan.lazy.metadata.effects.reachable import State as State
from farspan.lazy.metadata.effects.registered import Registered as Registered
from farspan.lazy.metadata.entry import Entry as Entry
from farspan.lazy.metadata.entry import Raised as Raised
from farspan.lazy.metadata.entry import Unknown as Unknown
from farspan.lazy.metadata.entry import intern as intern
from farspan.lazy.metadata.entry import meta_of as meta_of
from farspan.lazy.metadata.ladder import MetadataCache as MetadataCache
from farspan.lazy.metadata.modes import Modes as Modes
from farspan.lazy.metadata.modes import Regions as Regions
from farspan.lazy.metadata.modes import apply_modes as apply_modes
from farspan.lazy.metadata.modes import current_modes as current_modes
from farspan.lazy.metadata.modes import in_region as in_region
from farspan.lazy.metadata.predict import observe as observe
from farspan.lazy.metadata.surroundings.around import Surroundings as Surroundings
from farspan.lazy.metadata.surroundings.code import kinds_of as kinds_of
from farspan.lazy.metadata.surroundings.moments import Moment as Moment
from farspan.lazy.metadata.surroundings.moments import Moments as Moments
from farspan.lazy.metadata.template import ById as ById
from farspan.lazy.metadata.template import Flattener as Flattener
from farspan.lazy.metadata.template import flatten as flatten
from farspan.lazy.metadata.template import flatten_arguments as flatten_arguments
from farspan.lazy.metadata.template import map_tensors as map_tensors
from farspan.lazy.metadata.template import rebuild as rebuild
from farspan.lazy.metadata.template import shape_of_call as shape_of_call

__all__ = [
    "ATTRIBUTES",
    "Entry",
    "Flattener",
    "MetadataCache",
    "Modes",
    "MutableArguments",
    "OwnObjects",
    "Regions",
    "Registered",
    "State",
    "Raised",
    "Unknown",
    "apply_modes",
    "apply_result",
    "attributes_of",
    "attributes_with_tensors",
    "current_modes",
    "describe_result",
    "ById",
    "Moment",
    "Moments",
    "Surroundings",
    "canonical",
    "digest_of",
    "is_plain",
    "kinds_of",
    "flatten",
    "flatten_arguments",
    "generators_held",
    "holds_hidden",
    "in_region",
    "intern",
    "map_tensors",
    "meta_of",
    "objects_given",
    "observe",
    "own_attributes",
    "put_attributes",
    "put_own_attributes",
    "real_attributes",
    "rebuild",
    "rebuild_arguments",
    "shape_of_call",
    "watched_attributes",
]
