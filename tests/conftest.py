"""For all tests: no verdict depends on how fast this machine is just now."""

from hypothesis import settings

settings.register_profile("talaria", deadline=None)
settings.register_profile("minutes", deadline=None, max_examples=4000)
settings.load_profile("talaria")
