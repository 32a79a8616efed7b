"""For all tests: no verdict depends on how fast this machine is just now."""

from hypothesis import settings

settings.register_profile("talaria", deadline=None)
settings.load_profile("talaria")
