"""What pytest must know of this folder."""

from hypothesis import settings

collect_ignore_glob = ["programs/*"]  # run as programs of their own, with a rank

# A machine under load may stop for longer than any example should take.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
