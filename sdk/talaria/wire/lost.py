"""The end of a connection, and one that does not begin: what to say of it, with the mend."""

from __future__ import annotations

import asyncio
import os

from talaria import time
from talaria.wire.broker_url import Address, Tls
from talaria.wire.validity import troubles


class Lost:
    """Set once, with a reason."""

    def __init__(self) -> None:
        self._event, self.reason = asyncio.Event(), ""

    def set(self, reason: str) -> None:
        """It is lost; the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._event.is_set()

    async def wait_reason(self) -> str:
        """Wait until it is, and say why."""
        await self._event.wait()
        return self.reason


def gone(complaint: str, code: str) -> str:
    """Why a link is lost: paho's ``complaint`` where it has one, else its ``code``."""
    if not complaint and code == "Protocol error":
        # Mosquitto's answer to a message above its message_size_limit is none that MQTT 5 knows, and ends the link.
        unsaid = "the broker may refuse what is larger than a bound that it does not tell"
        mend = "raise that (Mosquitto: message_size_limit), or set max_packet_size in its place, which it tells"
        code = f"{code}; where that comes again and again, {unsaid}: {mend}"
    return f"link lost: {complaint or code}"


def unusable(address: Address, tls: Tls, name: str, reason: str) -> str:
    """What to say of a broker that ``name`` could not connect to for ``reason``, with the mend."""
    how = ("TLS over " if address.tls else "") + ("WebSocket" if address.websocket else "TCP")
    if "uthori" in reason or "password" in reason or "redentials" in reason:
        return f"the broker at {address} refused {name!r}: {reason}; check its user name and password"
    dates = troubles(tls, reason, time.time()) if address.tls else []
    if dates:
        return f"cannot use the MQTT broker at {address}: {reason}. {'; '.join(dates)}"
    own, safe = ("ws", "wss") if address.websocket else ("mqtt", "mqtts")
    if "VERIFY_FAILED" in reason:
        ours, more = "this one's", "join the fleet of that broker"
        if tls.ca is None:
            file, named = "name its file as SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE", "")
            if named and not os.access(named, os.R_OK):  # which OpenSSL passes over without a word
                file = f"correct SSL_CERT_FILE={named!r}, which cannot be read"
            ours, more = "this machine trusts", f"{file}; or let the broker send the certificates between, too"
        other = f"What listens there has a certificate of another authority than {ours}, or for another name"
        mend = f"{other}: correct the URL, or {more}"
    elif reason in ("QoS not supported", "Retain not supported"):
        mend = "Talaria needs both: let that broker take QoS 1, and retain (Mosquitto: max_qos, retain_available)"
    elif not reason.startswith("link lost") and "SSL" not in reason and "reset by peer" not in reason:
        mend = (
            "Look whether it runs, or the coordinator that starts its own; or correct the URL"
            if address.tls
            else f"Start one, for example `mosquitto -p {address.port}`, or let the coordinator start its own "
            'with broker = "auto"; or correct the URL'
        )
    elif address.tls:
        mend = (
            "What listens there ended the connection: the fleet may have shut this one out, which `talaria fleet "
            "list` tells its operator; its keys may be of another fleet; or it speaks no TLS: then correct the port"
        )
    else:
        instead = f"write {safe}:// in place of {own}://; or correct the port"
        mend = f"What listens there ended the connection: where it asks for TLS, {instead}"
    tried = f"tried MQTT 5 and 3.1.1 as {name!r} by {how}"
    return f"cannot use the MQTT broker at {address} ({tried}): {reason}. {mend}"
