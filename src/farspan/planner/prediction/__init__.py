"""Predicts a step under a plan: its tasks simulated event by event, and what each rank holds meanwhile."""

from farspan.planner.prediction.prediction import Prediction as Prediction
from farspan.planner.prediction.prediction import StagePrediction as StagePrediction
from farspan.planner.prediction.prediction import can_run as can_run
from farspan.planner.prediction.prediction import predict_step as predict_step
from farspan.planner.prediction.prediction import shortest_step as shortest_step

__all__ = ["Prediction", "StagePrediction", "can_run", "predict_step", "shortest_step"]
