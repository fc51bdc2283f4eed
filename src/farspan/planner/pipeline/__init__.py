"""Pipelines of stages: the best that are found, and the seconds that each stage takes where it lies."""

from farspan.planner.pipeline.search import Objective as Objective
from farspan.planner.pipeline.search import Pipeline as Pipeline
from farspan.planner.pipeline.search import plan_pipeline as plan_pipeline
from farspan.planner.pipeline.search import stage_of as stage_of
from farspan.planner.pipeline.stage import PipelineStage as PipelineStage

__all__ = ["Objective", "Pipeline", "PipelineStage", "plan_pipeline", "stage_of"]
