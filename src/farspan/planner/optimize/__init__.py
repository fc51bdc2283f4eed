"""The answer to "how will it run there": the best plan, what it will be like, and why others lost."""

from farspan.planner.forecast import Forecast as Forecast
from farspan.planner.forecast import StageForecast as StageForecast
from farspan.planner.forecast import can_run as can_run
from farspan.planner.forecast import forecast as forecast
from farspan.planner.forecast import forecast_of_stages as forecast_of_stages
from farspan.planner.optimize.options import Answer as Answer
from farspan.planner.optimize.options import Loser as Loser
from farspan.planner.optimize.options import best_plan as best_plan
from farspan.planner.optimize.recalibrate import Recalibration as Recalibration
from farspan.planner.optimize.recalibrate import StageSeconds as StageSeconds
from farspan.planner.optimize.recalibrate import recalibrate as recalibrate
from farspan.planner.optimize.text import explain as explain
from farspan.planner.optimize.text import format_answer as format_answer

__all__ = [
    "Answer",
    "Forecast",
    "Loser",
    "Recalibration",
    "StageForecast",
    "StageSeconds",
    "best_plan",
    "can_run",
    "explain",
    "forecast",
    "forecast_of_stages",
    "format_answer",
    "recalibrate",
]
