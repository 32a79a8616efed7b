"""Joining a fleet: this device makes its keys, asks to be let in, and takes no answer but its own fleet's."""

from __future__ import annotations

import json
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from talaria import valid
from talaria.errors import ConfigError
from talaria.identity import credentials
from talaria.identity.enrolment import LARGEST, Answer, Code, Request
from talaria.wire.signing import Signer


def ask(folder: Path, code: Code) -> Path:
    """Make this device's keys in ``folder`` and the request that goes to the operator; its path.

    The private keys never leave the folder, and the code is not kept: only the fleet's fingerprint is. Raises
    :class:`ConfigError` where the folder holds keys already, or anything else, which would be shut to everybody but its
    owner.
    """
    found = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    begun = {name for name in found if name in ("tls.key", "sign.key") or name.endswith((".request", ".part"))}
    if found & {"tls.key", "sign.key"} and begun != found:
        raise ConfigError(
            f"join: {folder} holds keys already; give --answer to finish, or a new folder to join anew (and set "
            "[identity] folder to it)"
        )
    if begun != found:
        raise ConfigError(
            f"join: {folder} is not empty, and would be shut to everybody else, as it is for this device's keys alone; "
            "name a new folder, such as identity"
        )
    credentials.make_private(folder)
    tls, sign = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, code.device)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(tls, hashes.SHA256())
    signer = Signer(sign)
    text = csr.public_bytes(serialization.Encoding.PEM).decode()
    request = Request(code.fleet, code.device, text, signer.public).signed(signer, code)
    pending = {"fleet": code.fleet, "device": code.device, "fingerprint": code.fingerprint.hex()}
    credentials.write(folder / "tls.key", credentials.pem(tls), private=True)
    credentials.write(folder / "sign.key", credentials.pem(sign), private=True)
    for left in begun - {"tls.key", "sign.key"}:
        (folder / left).unlink(missing_ok=True)
    path = folder / f"{code.device}.request"
    credentials.write(path, request.encode())
    # The last: a folder without it, and with no answer, was cut off, and its keys are nobody's yet.
    credentials.write(folder / "joining.json", json.dumps(pending).encode())
    return path


def finish(folder: Path, data: bytes) -> Answer:
    """Take the operator's answer: the folder is complete then. Raises :class:`ConfigError` for an answer of another
    fleet, for another device or key, or altered on its way."""
    pending = credentials.read_json(folder / "joining.json", "begin with `talaria edge join` and a code")
    answer = Answer.decode(data)
    try:
        ca = x509.load_pem_x509_certificate(answer.ca.encode())
        own = x509.load_pem_x509_certificate(answer.certificate.encode())
        expected = bytes.fromhex(pending["fingerprint"])
    except (ValueError, KeyError, TypeError, x509.InvalidVersion):
        raise ConfigError("join: the answer is damaged; ask for it again") from None
    if not answer.genuine(ca.public_bytes(serialization.Encoding.DER), expected):
        raise ConfigError(
            "join: this answer is not of the fleet that gave the code, or was altered on its way; refused"
        )
    if (answer.fleet, answer.device) != (pending.get("fleet"), pending.get("device")):
        raise ConfigError(f"join: this answer is for {answer.device!r} of {answer.fleet!r}; give this device its own")
    try:
        key = serialization.load_pem_private_key(credentials.read(folder / "tls.key", "join again"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            f"join: {folder / 'tls.key'} holds no key; restore it, or join again in a new folder with a new code"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or own.public_key() != key.public_key():
        raise ConfigError("join: the answer's certificate is of another key; it answers an earlier request, ask again")
    facts = {
        "fleet": answer.fleet,
        "device": answer.device,
        "broker": answer.broker,
        "coordinator": answer.coordinator.hex(),
    }
    credentials.write(folder / "ca.crt", answer.ca.encode())
    credentials.write(folder / "tls.crt", answer.certificate.encode())
    credentials.write(folder / "fleet.json", json.dumps(facts, indent=2).encode())
    (folder / "joining.json").unlink()
    (folder / f"{answer.device}.request").unlink(missing_ok=True)
    return answer


def join(folder: str | Path, code: str) -> Path:
    """The first step of joining a fleet with keys: make this device's keys and its request.

    Args:
        folder: Where the keys go, a new folder; no private key ever leaves it.
        code: The one-time code that ``talaria fleet enroll`` printed for this device.

    Returns:
        The path of the request, which holds nothing secret and goes to the operator (``talaria fleet admit``); the
        answer to it goes to :func:`accept_answer`.

    Raises:
        ConfigError: The code is damaged, or the folder holds keys already, or something else.

    Example:
        ``talaria_edge.join("identity", input("Code: "))``
    """
    return ask(valid.path("join", "folder", folder), Code.parse(code))


def accept_answer(folder: str | Path, answer: str | Path) -> Answer:
    """The last step of joining a fleet: take the operator's answer; ``folder`` is complete then.

    Args:
        folder: The folder that :func:`join` made.
        answer: The file that ``talaria fleet admit`` wrote.

    Returns:
        What the operator answered: ``fleet``, ``device``, ``broker``.

    Raises:
        ConfigError: The answer is of another fleet, for another device or key, or was altered on its way.

    Example:
        ``broker = talaria_edge.accept_answer("identity", "s01-left.answer").broker``
    """
    given = valid.path("join", "answer", answer)
    return finish(valid.path("join", "folder", folder), read_answer(given))


def read_answer(path: Path) -> bytes:
    """The answer's bytes, at most 16 KiB."""
    return credentials.read(path, "give the file that `talaria fleet admit` wrote", LARGEST)
