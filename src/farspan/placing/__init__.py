"""A plan and a model meet: at the start, and anew while the program runs, once its first step is measured."""

from farspan.placing.alone import runs_as_it_is as runs_as_it_is
from farspan.placing.kept import KeptPlan as KeptPlan
from farspan.placing.measured import is_measuring as is_measuring
from farspan.placing.measured import measure_first as measure_first
from farspan.placing.places import place_first as place_first
from farspan.placing.places import replace_plan as replace_plan
from farspan.placing.suitable import check_model as check_model
from farspan.placing.weights import agree_on_model as agree_on_model

__all__ = [
    "KeptPlan",
    "agree_on_model",
    "check_model",
    "is_measuring",
    "measure_first",
    "place_first",
    "replace_plan",
    "runs_as_it_is",
]
