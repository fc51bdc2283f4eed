"""Another rank's files become the script's: rank 0 is lost, and the run goes on without it."""

from farspan.launch.files.succession.bring import bring as bring

__all__ = ["bring"]
