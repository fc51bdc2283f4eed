"""Random numbers inside the model: those of the plain program, or such as follow from where they are drawn."""

from farspan.lazy.randomness.draws import DRAWS as DRAWS
from farspan.lazy.randomness.draws import has_own_generator as has_own_generator
from farspan.lazy.randomness.draws import may_draw as may_draw
from farspan.lazy.randomness.frame import Frame as Frame
from farspan.lazy.randomness.frame import forget_module as forget_module
from farspan.lazy.randomness.frame import key_of as key_of
from farspan.lazy.randomness.frame import key_of_function as key_of_function
from farspan.lazy.randomness.frame import key_of_module as key_of_module
from farspan.lazy.randomness.frame import name_module as name_module
from farspan.lazy.randomness.generators import GENERATORS as GENERATORS
from farspan.lazy.randomness.generators import host_seed as host_seed
from farspan.lazy.randomness.movement import BY_SHAPE as BY_SHAPE
from farspan.lazy.randomness.movement import Draws as Draws
from farspan.lazy.randomness.movement import Operation as Operation
from farspan.lazy.randomness.movement import keep_operation as keep_operation
from farspan.lazy.randomness.program import ProgramDraws as ProgramDraws
from farspan.lazy.randomness.program import around_backward as around_backward
from farspan.lazy.randomness.scope import active as active
from farspan.lazy.randomness.scope import called_inside as called_inside
from farspan.lazy.randomness.scope import draw_at_once as draw_at_once
from farspan.lazy.randomness.scope import replayed as replayed
from farspan.lazy.randomness.scope import seeded as seeded
from farspan.lazy.randomness.scope import way_back as way_back
from farspan.lazy.randomness.seen import SeenGenerator as SeenGenerator

__all__ = [
    "BY_SHAPE",
    "DRAWS",
    "GENERATORS",
    "Draws",
    "Frame",
    "Operation",
    "ProgramDraws",
    "SeenGenerator",
    "active",
    "around_backward",
    "called_inside",
    "draw_at_once",
    "forget_module",
    "has_own_generator",
    "host_seed",
    "key_of",
    "key_of_function",
    "keep_operation",
    "key_of_module",
    "may_draw",
    "name_module",
    "replayed",
    "seeded",
    "way_back",
]
