"""The published vectors of what is built upon, through the functions that the protocol calls."""

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from talaria.errors import WireError
from talaria.privacy import keystream

h = bytes.fromhex


def test_x25519_of_rfc_7748() -> None:
    scalar = h("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = h("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert keystream.agreeing(scalar)(point) == h("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")


def test_x25519_again_and_again_of_rfc_7748() -> None:
    k = u = b"\x09" + bytes(31)
    for times in range(1000):
        k, u = keystream.agreeing(k)(u), k
        if times == 0:
            assert k == h("422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079")
    assert k == h("684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51")


LOW = (  # points of low order, as Wycheproof has them
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)


@pytest.mark.parametrize("point", LOW)
def test_a_key_that_anybody_agrees_with_is_refused(point: str) -> None:
    with pytest.raises(WireError, match="anybody"):
        keystream.agreeing(bytes(range(32)))(h(point))


def test_hkdf_of_rfc_5869() -> None:
    made = HKDF(hashes.SHA256(), 42, h("000102030405060708090a0b0c"), h("f0f1f2f3f4f5f6f7f8f9")).derive(b"\x0b" * 22)
    assert made == h("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")


def test_keys_are_hkdf_by_its_definition() -> None:
    info = b"talaria/secure/1\x00" + b"\x00\x00\x00\x03own" + b"\x00\x00\x00\x01\x05"
    prk = hmac.digest(b"salt", b"secret", hashlib.sha256)
    expected = hmac.digest(prk, info + b"\x01", hashlib.sha256)
    assert keystream.derived(b"secret", b"salt", "own", b"\x05") == expected
    assert keystream.derived(b"secret", b"salt", "ow", b"n\x05") != expected


def test_chacha20_of_rfc_8439() -> None:
    first = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    second = (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    for dtype in (np.uint16, np.uint32):
        stream = keystream.stream(bytes(32), 128 // np.dtype(dtype).itemsize, np.dtype(dtype))
        assert stream.astype(np.dtype(dtype).newbyteorder("<")).tobytes() == h(first + second)


def test_a_long_stream_goes_on_where_its_parts_meet() -> None:
    long = keystream.stream(b"k" * 32, 1 << 17, np.dtype(np.uint32))
    assert np.array_equal(long[: 1 << 10], keystream.stream(b"k" * 32, 1 << 10, np.dtype(np.uint32)))
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    whole = Cipher(algorithms.ChaCha20(b"k" * 32, bytes(16)), None).encryptor().update(bytes(1 << 19))
    assert long.astype("<u4").tobytes() == whole


def test_the_aead_of_rfc_8439() -> None:
    key = h("808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f")
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
        b"be it."
    )
    box = ChaCha20Poly1305(key).encrypt(h("070000004041424344454647"), plain, h("50515253c0c1c2c3c4c5c6c7"))
    assert box[-16:] == h("1ae10b594f09e26a7e902ecbd0600691")
    assert box[:8] == h("d31a8d34648e60db")


def test_a_sealed_share_opens_as_it_was_meant_alone() -> None:
    box = keystream.sealed(b"k" * 32, b"share", b"to anna")
    assert keystream.unsealed(b"k" * 32, box, b"to anna") == b"share"
    for key, data, context in (
        (b"j" * 32, box, b"to anna"),
        (b"k" * 32, box, b"to bela"),
        (b"k" * 32, bytes([box[0] ^ 1]) + box[1:], b"to anna"),
    ):
        with pytest.raises(WireError, match="altered"):
            keystream.unsealed(key, data, context)
