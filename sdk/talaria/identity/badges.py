"""A member's badge: the fleet's authority says, for other devices to check, whose Ed25519 key a device's key is.

The badge lies in the device's certificate as an extension of its own (not critical), beside the Ed25519 key of the
authority that signed it: who trusts the authority's certificate by its fingerprint, trusts both. That key derives from
the authority's private key, so that it is where that is, and nowhere else; a coordinator serves without either.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from talaria.errors import ConfigError, WireError
from talaria.identity import credentials
from talaria.wire.badge import Badge
from talaria.wire.signing import KEY_BYTES, SIGNATURE_BYTES, Signer

OID = x509.ObjectIdentifier("2.25.276044361386149811735432110214376914391")
"""Of the extension; from a random UUID, as ITU-T X.667 lets everybody make one."""


def badge_signer(key: EllipticCurvePrivateKey) -> Signer:
    """What signs badges, of the authority with this private key."""
    secret = key.private_numbers().private_value.to_bytes(32, "big")
    return Signer.of(HKDF(hashes.SHA256(), 32, b"", b"talaria/badges/1\x00").derive(secret))


def extension(signer: Signer, fleet: str, device: str, key: bytes) -> x509.UnrecognizedExtension:
    """What a certificate says of ``device`` and its Ed25519 ``key``."""
    return x509.UnrecognizedExtension(OID, signer.public + key + Badge.issued(signer, fleet, device, key).proof)


def read(certificate: Path, authority: Path, fleet: str, device: str) -> tuple[Badge, bytes]:
    """The badge in the file ``certificate``, and the public key of who signs badges. Raises :class:`ConfigError` where
    it holds none that the authority whose certificate is ``authority`` stands for."""
    mend = "get new keys: `talaria fleet enroll` and `talaria edge join` (a coordinator: `talaria fleet rotate`)"
    try:
        own = x509.load_pem_x509_certificate(credentials.read(certificate, mend))
        issuer = x509.load_pem_x509_certificate(credentials.read(authority, mend))
        own.verify_directly_issued_by(issuer)
        found = own.extensions.get_extension_for_oid(OID).value
    except x509.ExtensionNotFound:
        raise ConfigError(
            f"identity: {certificate} is from before there were badges, and secure rounds need one; {mend}"
        ) from None
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            f"identity: {certificate} is damaged, or not of the authority in {authority}; {mend}"
        ) from None
    data = found.value if isinstance(found, x509.UnrecognizedExtension) else b""
    if len(data) != 2 * KEY_BYTES + SIGNATURE_BYTES:
        raise ConfigError(f"identity: the badge in {certificate} is damaged; {mend}")
    public, key, proof = data[:KEY_BYTES], data[KEY_BYTES : 2 * KEY_BYTES], data[2 * KEY_BYTES :]
    try:
        badge = Badge(key, proof)
    except WireError as error:
        raise ConfigError(f"identity: the badge in {certificate} is damaged ({error}); {mend}") from None
    if not badge.genuine(public, fleet, device):
        raise ConfigError(f"identity: the badge in {certificate} is not of {device!r} in fleet {fleet!r}; {mend}")
    return badge, public
