"""Running a program for its first steps only, to find out what they take."""

from farspan.runtime.trial.assemble import assemble as assemble
from farspan.runtime.trial.meter import Meter as Meter
from farspan.runtime.trial.notes import Measured as Measured
from farspan.runtime.trial.trial import Trial as Trial
from farspan.runtime.trial.trial import TrialEnded as TrialEnded
from farspan.runtime.trial.trial import current_trial as current_trial

__all__ = ["Measured", "Meter", "Trial", "TrialEnded", "assemble", "current_trial"]
