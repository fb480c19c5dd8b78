"""Property tests of the frontend are not timed: how long an example takes depends on the machine."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
