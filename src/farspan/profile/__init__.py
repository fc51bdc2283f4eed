"""What a model costs: estimates from its modules, before anything has run."""

from farspan.profile.estimate import atoms as atoms
from farspan.profile.names import keepers as keepers
from farspan.profile.names import tied as tied

__all__ = ["atoms", "keepers", "tied"]
