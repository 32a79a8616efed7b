"""A module that needs what is not installed."""

import nobody_has_this_package  # noqa: F401
