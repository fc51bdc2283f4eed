"""What pytest must know of this folder."""

collect_ignore_glob = ["programs/*"]  # run as programs of their own, with a rank
