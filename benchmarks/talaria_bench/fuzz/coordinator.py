"""Fuzz targets of the coordinator: what devices say of themselves, and what they ask to be certified."""

from __future__ import annotations

import json

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from talaria.errors import ConfigError
from talaria_bench.fuzz.target import Target, deeper
from talaria_coordinator.identity.ca import load_certificate, new_key, requested_key
from talaria_coordinator.storage.records import profile_of


def targets() -> list[Target]:
    """All of them."""
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(new_key(), hashes.SHA256())
    text = csr.public_bytes(serialization.Encoding.PEM)
    return [
        Target("profile", _profile, (), [b'{"cores": 4}']),
        Target("certificate request", lambda data: requested_key(data.decode("latin-1")), (ConfigError,), [text]),
        Target("certificate", load_certificate, (ConfigError,), [text]),
    ]


def _profile(data: bytes) -> None:
    profile = profile_of(data)
    kept = deeper(lambda: json.dumps(profile), 60)  # as deep as a store writes it,
    json.loads(kept)  # and reads it again
