"""The programs here are run as programs of their own."""

collect_ignore_glob = ["programs/*"]
