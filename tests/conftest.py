"""What pytest must know of this folder."""

collect_ignore = ["programs"]  # run as programs of their own, with a rank
