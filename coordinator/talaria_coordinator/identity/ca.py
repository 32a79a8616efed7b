"""A fleet's own certificate authority: it signs the certificates of broker, coordinator and devices, and revokes
them."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from talaria.errors import ConfigError
from talaria.identity import badges, credentials

AUTHORITY_DAYS, LEAF_DAYS = 3650, 397
_SKEW = dt.timedelta(hours=1)
"""Clocks of small devices run behind."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """A P-256 key: what every TLS library of a small device knows."""
    return ec.generate_private_key(ec.SECP256R1())


class Authority:
    """The certificate and private key that sign all others; ``repr`` shows neither."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self._key = certificate, key

    def __repr__(self) -> str:
        return f"Authority({self.certificate.subject.rfc4514_string()})"

    @classmethod
    def new(cls, fleet: str) -> Authority:
        """A new authority for ten years, which may sign leaves and lists of revoked ones, nothing else."""
        key, name = new_key(), _name(f"Talaria fleet {fleet}")
        built = (
            _builder(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(built.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority in ``ca.crt`` and ``ca.key``. Raises :class:`ConfigError` where they are not to be read."""
        mend = "make a fleet with `talaria fleet init`, or bring the key back from where it is kept"
        certificate = load_certificate(credentials.read(folder / "ca.crt", mend))
        try:
            certificate.verify_directly_issued_by(certificate)  # its own signature: what else reads it would stumble
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise ConfigError(f"identity: {folder / 'ca.crt'} is damaged; restore it from a backup") from None
        data = credentials.read(folder / "ca.key", mend)
        credentials.require_private(folder / "ca.key")
        try:
            key = serialization.load_pem_private_key(data, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"identity: {folder / 'ca.key'} is not the key of ca.crt; {mend}")
        return cls(certificate, key)

    def save(self, folder: Path) -> None:
        """Write ``ca.crt``, and ``ca.key`` for the owner only."""
        credentials.write(folder / "ca.key", credentials.pem(self._key), private=True)
        credentials.write(folder / "ca.crt", to_pem(self.certificate))

    def sign(
        self,
        public: ec.EllipticCurvePublicKey,
        name: str,
        *,
        server: bool = False,
        hosts: Sequence[str] = (),
        days: float = LEAF_DAYS,
        badge: tuple[str, bytes] | None = None,
    ) -> x509.Certificate:
        """A leaf for 397 days: for a client called ``name``, or for a server reached under ``hosts``. ``badge``: the
        fleet, and the Ed25519 key that is vouched for in it."""
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        issuer = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(_name(name), self.certificate.subject, public, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        if badge is not None:
            fleet, key = badge
            own = badges.extension(badges.badge_signer(self._key), fleet, name, key)
            builder = builder.add_extension(own, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def revoked(self, serials: Iterable[int]) -> bytes:
        """The list of revoked certificates, as PEM.

        It is good for as long as the authority: a broker lets nobody in by a list that begins later, or has ended, and
        this machine's clock may be wrong today.
        """
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(self.certificate.not_valid_before_utc)
            .next_update(self.certificate.not_valid_after_utc)
        )
        for serial in sorted(set(serials)):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def load_certificate(data: bytes) -> x509.Certificate:
    """One certificate as PEM; :class:`ConfigError` for anything else."""
    try:
        return x509.load_pem_x509_certificate(data)
    except (ValueError, x509.InvalidVersion):
        raise ConfigError("identity: a certificate is damaged; restore it from a backup, or join again") from None


def requested_key(csr: str) -> ec.EllipticCurvePublicKey:
    """The P-256 key that a certificate request asks for and proves to hold; what else it asks for is ignored."""
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        key = request.public_key()
        good = request.is_signature_valid
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise ConfigError("enrolment: the certificate request is damaged; join again") from None
    if not good or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError("enrolment: the certificate request is not one of a P-256 key, signed by it; join again")
    return key


def to_pem(certificate: x509.Certificate) -> bytes:
    """The certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def to_der(certificate: x509.Certificate) -> bytes:
    """The certificate as it is fingerprinted."""
    return certificate.public_bytes(serialization.Encoding.DER)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
