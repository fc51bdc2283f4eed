"""The program of a step: who does what, when, and which messages go between ranks."""

from farspan.runtime.program.build import build_program as build_program
from farspan.runtime.program.build import has_weights as has_weights
from farspan.runtime.program.program import Bundle as Bundle
from farspan.runtime.program.program import Program as Program
from farspan.runtime.program.program import Step as Step
from farspan.runtime.program.programs import Programs as Programs
from farspan.runtime.program.settings import Settings as Settings
from farspan.runtime.program.settings import sites_of as sites_of

__all__ = ["Bundle", "Program", "Programs", "Settings", "Step", "build_program", "has_weights", "sites_of"]
