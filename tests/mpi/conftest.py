"""The programs here are run by mpirun."""

collect_ignore_glob = ["programs/*"]
