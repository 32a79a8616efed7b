"""How a device joins a fleet: one code from the operator, one request, one answer.

The code is the only secret, and it is used once. Request and answer hold public things only and prove
themselves, so they may travel by any way, a hostile one too:

- the code holds 16 random bytes, from which both sides derive an Ed25519 key. The fleet keeps its public half
  only, so that whoever reads the fleet's list cannot use the code. The device signs its request with it;
- the code also holds a fingerprint of the fleet's authority and of the coordinator's key. The device takes no
  answer that does not fit it, and the coordinator signs the answer.

The device makes its own private keys; the request carries a certificate request for one and the public half
of the other.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from talaria.errors import ConfigError, WireError
from talaria.foreign import parsed
from talaria.wire.signing import KEY_BYTES, SIGNATURE_BYTES, Signer, verified
from talaria.wire.topics import DEVICE_NAME, FLEET_NAME, Topic

LARGEST = 16 * 1024
"""Bytes of a request or an answer at most."""
_DOMAIN = b"talaria/enrolment/1\x00"
_REQUEST = ("fleet", "device", "csr", "key")
_ANSWER = ("fleet", "device", "ca", "certificate", "coordinator", "broker")
_CODE = re.compile(rf"({FLEET_NAME})\.({DEVICE_NAME})\.([a-z2-7]{{52}})")


@dataclass(frozen=True)
class Code:
    """A one-time enrolment code. It never shows its secret unless asked by :meth:`text`."""

    fleet: str
    device: str
    fingerprint: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, fleet: str, device: str, fingerprint: bytes) -> Code:
        """A code with 128 bits from the operating system's random source."""
        return cls(fleet, device, fingerprint, secrets.token_bytes(16))

    @classmethod
    def parse(cls, text: str) -> Code:
        """The code that :meth:`text` wrote. Raises :class:`ConfigError`, which does not repeat it."""
        match = _CODE.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        try:
            raw = base64.b32decode(match[3].upper() + "====") if match else b""
        except binascii.Error:
            raw = b""
        if match is None or len(raw) != 32:
            raise ConfigError(
                "code: this is no enrolment code; it reads fleet.device.(52 letters and digits), as "
                "`talaria fleet enroll` printed it"
            )
        named(match[1], match[2])
        return cls(match[1], match[2], raw[16:], raw[:16])

    def text(self) -> str:
        """The code to hand to the device, by a way that nobody else reads."""
        tail = base64.b32encode(self.secret + self.fingerprint).decode().lower().rstrip("=")
        return f"{self.fleet}.{self.device}.{tail}"

    def signer(self) -> Signer:
        """The key that signs the request."""
        return Signer.of(sha256(_DOMAIN + self.secret).digest())


def named(fleet: str, device: str) -> None:
    """Raise :class:`ConfigError` for names that no topic may hold."""
    try:
        Topic(fleet, "cmd", device)
    except WireError as error:
        raise ConfigError(str(error)) from None


def fingerprint(ca: bytes, coordinator: bytes) -> bytes:
    """16 bytes that stand for a fleet: its authority (DER) and the coordinator's public key."""
    return sha256(_DOMAIN + sha256(ca).digest() + coordinator).digest()[:16]


@dataclass(frozen=True)
class Request:
    """What a device sends: a certificate request (PEM) and its public signing key."""

    fleet: str
    device: str
    csr: str
    key: bytes
    own: bytes = b""
    """The signature by ``key``: the device has the private half."""
    proof: bytes = b""
    """The signature by the code."""

    def __post_init__(self) -> None:
        named(self.fleet, self.device)
        if len(self.key) != KEY_BYTES or not {len(self.own), len(self.proof)} <= {0, SIGNATURE_BYTES}:
            raise ConfigError("enrolment: a key or signature of the request has a wrong length; join again")

    def signed(self, signer: Signer, code: Code) -> Request:
        """With both signatures."""
        text = self._text()
        return Request(self.fleet, self.device, self.csr, self.key, signer.sign(text), code.signer().sign(text))

    def signed_by(self, code: bytes) -> bool:
        """True where the holders of the device's key and of the code (its public half) signed it."""
        return verified(self.key, self.own, self._text()) and verified(code, self.proof, self._text())

    def encode(self) -> bytes:
        """The request as a small JSON file."""
        return _dump("request", {**self._facts(), "own": self.own.hex(), "proof": self.proof.hex()})

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Raises :class:`ConfigError` for what is no request; nothing is trusted yet."""
        fleet, device, csr, key, own, proof = _load("request", data, (*_REQUEST, "own", "proof"))
        return cls(fleet, device, csr, _hex(key), _hex(own), _hex(proof))

    def _facts(self) -> dict[str, str]:
        return {"fleet": self.fleet, "device": self.device, "csr": self.csr, "key": self.key.hex()}

    def _text(self) -> bytes:
        return _DOMAIN + b"request" + json.dumps(self._facts(), sort_keys=True).encode()


@dataclass(frozen=True)
class Answer:
    """What the fleet sends back: its authority, the device's certificate (PEM), the coordinator's key, the broker."""

    fleet: str
    device: str
    ca: str
    certificate: str
    coordinator: bytes
    broker: str
    proof: bytes = b""
    """The coordinator's signature."""

    def __post_init__(self) -> None:
        named(self.fleet, self.device)
        if len(self.coordinator) != KEY_BYTES or len(self.proof) not in (0, SIGNATURE_BYTES):
            raise ConfigError("enrolment: a key or signature of the answer has a wrong length; ask for it again")

    def signed(self, signer: Signer) -> Answer:
        """With the coordinator's signature."""
        proof = signer.sign(self._text())
        return Answer(self.fleet, self.device, self.ca, self.certificate, self.coordinator, self.broker, proof)

    def genuine(self, ca: bytes, expected: bytes) -> bool:
        """True where it comes from the fleet with the fingerprint ``expected``; ``ca`` is its authority as DER."""
        same = secrets.compare_digest(fingerprint(ca, self.coordinator), expected)
        return same and verified(self.coordinator, self.proof, self._text())

    def encode(self) -> bytes:
        """The answer as a small JSON file."""
        return _dump("answer", {**self._facts(), "proof": self.proof.hex()})

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """Raises :class:`ConfigError` for what is no answer; nothing is trusted yet."""
        fleet, device, ca, certificate, coordinator, broker, proof = _load("answer", data, (*_ANSWER, "proof"))
        return cls(fleet, device, ca, certificate, _hex(coordinator), broker, _hex(proof))

    def _facts(self) -> dict[str, str]:
        values = (self.fleet, self.device, self.ca, self.certificate, self.coordinator.hex(), self.broker)
        return dict(zip(_ANSWER, values, strict=True))

    def _text(self) -> bytes:
        return _DOMAIN + b"answer" + json.dumps(self._facts(), sort_keys=True).encode()


def _dump(what: str, facts: Mapping[str, str]) -> bytes:
    return (json.dumps({"talaria": f"enrolment {what} 1", **facts}, indent=2) + "\n").encode()


def _load(what: str, data: bytes, names: tuple[str, ...]) -> list[str]:
    if len(data) > LARGEST:
        raise ConfigError(f"enrolment: {len(data)} bytes are no {what}; one has at most {LARGEST}")
    try:
        facts: Any = parsed(data)
    except ValueError:
        facts = None
    good = isinstance(facts, dict) and facts.get("talaria") == f"enrolment {what} 1"
    if not good or not all(isinstance(facts.get(name), str) for name in names):
        raise ConfigError(f"enrolment: this is no enrolment {what}; give the file that was written for it")
    return [facts[name] for name in names]


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"enrolment: {text[:20]!r} is not hexadecimal; the file is damaged") from None
