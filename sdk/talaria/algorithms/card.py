"""The facts of an algorithm that `talaria algorithms` prints and the docs are made from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is shared, kept and served, where it comes from, and how sure we are of it."""

    name: str
    title: str
    shares: str
    keeps: str
    serves: str
    source: str
    evidence: Literal["confirmed", "reconstructed", "partly reconstructed"]
    prunes: bool = False
    """True where ``fit`` shrinks the device's mask itself; else the plan's mask is fixed from the start."""
    differences: bool = False
    """True where updates hold differences to what was downloaded, whatever the codec; else new values."""
