"""Federated datasets: by name (:func:`load`), from arrays and files, and what suits each (``presets``).

Uses types alone; its public names load when they are first used.
"""

from typing import TYPE_CHECKING

from talaria import lazy

if TYPE_CHECKING:
    from talaria.data.client import Client
    from talaria.data.federated import Federated
    from talaria.data.registry import NAMES, load, options_of

__all__ = ["NAMES", "Client", "Federated", "load", "options_of"]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {"Client": "talaria.data.client", "Federated": "talaria.data.federated"}
    | dict.fromkeys(("NAMES", "load", "options_of"), "talaria.data.registry"),
)
