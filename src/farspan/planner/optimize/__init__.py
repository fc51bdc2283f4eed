"""Finds the best plan that distribute can run, says what it will be like, and why others were rejected."""

from farspan.planner.forecast import Forecast as Forecast
from farspan.planner.forecast import StageForecast as StageForecast
from farspan.planner.forecast import can_run as can_run
from farspan.planner.forecast import forecast as forecast
from farspan.planner.forecast import forecast_of_stages as forecast_of_stages
from farspan.planner.optimize.best_plan import RejectedPlan as RejectedPlan
from farspan.planner.optimize.best_plan import SearchResult as SearchResult
from farspan.planner.optimize.best_plan import best_plan as best_plan
from farspan.planner.optimize.recalibrate import Recalibration as Recalibration
from farspan.planner.optimize.recalibrate import StageSeconds as StageSeconds
from farspan.planner.optimize.recalibrate import recalibrate as recalibrate
from farspan.planner.optimize.result_text import explain as explain
from farspan.planner.optimize.result_text import format_result as format_result

__all__ = [
    "SearchResult",
    "Forecast",
    "RejectedPlan",
    "Recalibration",
    "StageForecast",
    "StageSeconds",
    "best_plan",
    "can_run",
    "explain",
    "forecast",
    "forecast_of_stages",
    "format_result",
    "recalibrate",
]
