"""What a step will be like under a plan: its tasks simulated event by event, and what each rank holds meanwhile."""

from farspan.planner.forecast.forecast import Forecast as Forecast
from farspan.planner.forecast.forecast import StageForecast as StageForecast
from farspan.planner.forecast.forecast import can_run as can_run
from farspan.planner.forecast.forecast import forecast as forecast
from farspan.planner.forecast.forecast import shortest_step as shortest_step
from farspan.planner.forecast.given import forecast_of_stages as forecast_of_stages

__all__ = ["Forecast", "StageForecast", "can_run", "forecast", "forecast_of_stages", "shortest_step"]
