"""Running a program for its first steps only, to find out what they take."""

from farspan.runtime.trial.trial import Trial as Trial
from farspan.runtime.trial.trial import TrialEnded as TrialEnded
from farspan.runtime.trial.trial import current_trial as current_trial

__all__ = ["Trial", "TrialEnded", "current_trial"]
