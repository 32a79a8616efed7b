"""From when until when the certificates of a link hold, and what to say of it."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from talaria import time
from talaria.wire.broker_url import Tls

DAY = 86400.0
WARN_S = 30 * DAY
"""So long before a certificate ends it is told, each day."""
RENEW = "`talaria fleet enroll` and `talaria edge join` renew a device's, `talaria fleet rotate` the fleet's own"


@dataclass(frozen=True)
class Validity:
    """``what`` holds from ``begins`` until ``ends`` (seconds since 1970)."""

    what: str
    begins: float
    ends: float

    @property
    def day(self) -> str:
        """When it ends, for people."""
        return day_of(self.ends)

    def trouble(self, now: float) -> str:
        """Why a link with it is refused at ``now``; empty where dates are no reason."""
        clock = f"this machine's clock says {day_of(now)}"
        if now < self.begins:
            return f"{clock}, but {self.what} begins on {day_of(self.begins)}: set the clock"
        return f"{self.what} ended on {day_of(self.ends)}, and {clock}; {RENEW}" if now > self.ends else ""

    def warning(self, now: float) -> str:
        """What to say from 30 days before its end on; empty before."""
        left = self.ends - now
        if left > WARN_S:
            return ""
        if left < 0:
            return self.trouble(now)
        return f"{self.what} ends on {day_of(self.ends)}, in {left // DAY:.0f} days; {RENEW}"


def validities(tls: Tls) -> list[Validity]:
    """Those of the files of a link. What cannot be read is left out: opening the link tells that."""
    return [found for path in (tls.cert, tls.ca) if path is not None for found in validity_of(path)]


def validity_of(path: Path) -> list[Validity]:
    """That of a certificate (PEM); none where the file holds none."""
    from cryptography import x509

    try:
        with path.open("rb") as file:
            found = x509.load_pem_x509_certificate(file.read(1 << 20))
    except (OSError, ValueError, x509.InvalidVersion):
        return []
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return [Validity(f"the certificate {path}", begins.timestamp(), ends.timestamp())]


def troubles(tls: Tls, reason: str, now: float) -> list[str]:
    """What dates have to do with a link that was refused for ``reason``, those of the other side's certificate too."""
    found = [trouble for own in validities(tls) if (trouble := own.trouble(now))]
    if not found and ("certificate has expired" in reason or "certificate is not yet valid" in reason):
        renew = "whoever runs the broker renews its certificate, in a fleet with keys by `talaria fleet rotate`"
        found.append(f"This machine's clock says {day_of(now)}: where that is wrong, set it; else {renew}")
    return found


def warnings(validities: Iterable[Validity], now: float) -> list[str]:
    """What there is to say at ``now``."""
    return [warning for found in validities if (warning := found.warning(now))]


async def watch(ending: Callable[[float], Sequence[str]], tell: Callable[[str], None]) -> None:
    """Tell what ``ending`` says, now and each day."""
    while True:
        for text in ending(time.time()):
            tell(text)
        await asyncio.sleep(DAY)


def day_of(moment: float) -> str:
    """A moment in seconds since 1970, for people."""
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
