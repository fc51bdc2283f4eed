"""Hints: what a user says about a plan before it is searched, and what that means for the units of a model."""

from farspan.plan.hints.hints import Hints as Hints
from farspan.plan.hints.meaning import Meaning as Meaning
from farspan.plan.hints.meaning import meaning_of as meaning_of
from farspan.plan.hints.meaning import names_meant as names_meant

__all__ = ["Hints", "Meaning", "meaning_of", "names_meant"]
