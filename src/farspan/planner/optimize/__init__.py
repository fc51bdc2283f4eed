"""Finds the best plan that distribute can run, says what it will be like, and why others were rejected."""

from farspan.planner.optimize.best_plan import RejectedPlan as RejectedPlan
from farspan.planner.optimize.best_plan import SearchResult as SearchResult
from farspan.planner.optimize.best_plan import best_plan as best_plan
from farspan.planner.optimize.recalibrate import Recalibration as Recalibration
from farspan.planner.optimize.recalibrate import StageSeconds as StageSeconds
from farspan.planner.optimize.recalibrate import recalibrate as recalibrate
from farspan.planner.optimize.result_text import explain as explain
from farspan.planner.optimize.result_text import format_result as format_result
from farspan.planner.prediction import Prediction as Prediction
from farspan.planner.prediction import StagePrediction as StagePrediction
from farspan.planner.prediction import can_run as can_run
from farspan.planner.prediction import predict_step as predict_step

__all__ = [
    "SearchResult",
    "Prediction",
    "RejectedPlan",
    "Recalibration",
    "StagePrediction",
    "StageSeconds",
    "best_plan",
    "can_run",
    "explain",
    "predict_step",
    "format_result",
    "recalibrate",
]
