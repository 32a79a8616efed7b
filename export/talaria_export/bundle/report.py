""":class:`Report`: the named checks of a build or a verification, and the figures behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One question, its answer, and the numbers or reason in a few words."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """All checks of one bundle. ``figures`` is plain data, ready for JSON."""

    path: str
    checks: tuple[Check, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True where every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        checks = {check.name: {"ok": check.ok, "detail": check.detail} for check in self.checks}
        return {"path": self.path, "ok": self.ok, "checks": checks, **self.figures}
