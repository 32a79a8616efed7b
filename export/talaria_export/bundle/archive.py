"""The container of a bundle: a zip archive in the one form that this module writes.

Members are stored (never compressed), in order, with fixed dates and attributes, and nothing lies between, before or
behind them. So every byte of the file is either a member's content, covered by its checksum, or is known in advance:
there is no room for zip bombs, hidden members, links, comments or two readers that see different archives. Any zip
tool can read the file; one that was packed again by such a tool is refused.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from talaria.errors import BundleError

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATE = 0x21  # 1 January 1980, the zero of this format: equal content gives equal bytes
_ATTRIBUTES = 0o100644 << 16
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}(/[a-z0-9][a-z0-9_.-]{0,63}){0,2}")


@dataclass(frozen=True)
class Limits:
    """What a reader accepts, in bytes where not said otherwise; checked before anything is allocated."""

    file: int = 512 << 20
    members: int = 64
    """Number of members."""
    manifest: int = 1 << 20
    """Of the manifest and of the signature."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """The archive of ``members``, in their order. Equal members give equal bytes."""
    body, directory, offset = [], [], 0
    for name, content in members.items():
        _check_name(name)
        head, entry = _headers(name, zlib.crc32(content), len(content), offset)
        body += [head, content]
        directory.append(entry)
        offset += len(head) + len(content)
    if offset >= 1 << 31:
        raise BundleError(f"bundle: {offset} bytes are more than the format's 2 GiB; export a smaller model")
    return b"".join([*body, _tail(directory, offset)])


def unpack(data: bytes, limits: Limits = Limits()) -> dict[str, memoryview]:
    """The members of an archive written by :func:`pack`, as views into ``data``.

    Raises :class:`~talaria.errors.BundleError` on anything else.
    """
    view = memoryview(data).toreadonly()
    members: dict[str, memoryview] = {}
    directory, offset = [], 0
    while bytes(view[offset : offset + 4]) == b"PK\x03\x04":
        if len(members) == limits.members:
            raise BundleError(f"bundle: more than {limits.members} members; no bundle has so many")
        if len(data) - offset < _LOCAL.size:
            raise _cut()
        _, _, flags, method, _, _, crc, packed, size, name_length, extra = _LOCAL.unpack_from(data, offset)
        if method != 0 or flags != 0 or packed != size or extra:
            raise BundleError(
                f"bundle: member {len(members)} is compressed, encrypted or carries extra fields; "
                "a bundle stores its members plainly, so write it again with `talaria export`"
            )
        start = offset + _LOCAL.size + name_length
        if start + size > len(data):
            raise _cut()
        name = str(bytes(view[offset + _LOCAL.size : start]), "latin-1")
        _check_name(name)
        if name in members:
            raise BundleError(f"bundle: member {name!r} occurs twice; the file was tampered with")
        content = view[start : start + size]
        if zlib.crc32(content) != crc:
            raise BundleError(f"bundle: member {name!r} is damaged (checksum differs); fetch the file again")
        head, entry = _headers(name, crc, size, offset)
        if view[offset:start] != head:
            raise _odd()
        members[name] = content
        directory.append(entry)
        offset = start + size
    if not members:
        raise BundleError("bundle: this file is not a bundle (it does not begin as one); give a .talaria file")
    if view[offset:] != _tail(directory, offset):
        raise _odd()
    return members


def _headers(name: str, crc: int, size: int, offset: int) -> tuple[bytes, bytes]:
    raw = name.encode("ascii")
    common = (20, 0, 0, 0, _DATE, crc, size, size, len(raw), 0)
    local = _LOCAL.pack(b"PK\x03\x04", *common) + raw
    return local, _CENTRAL.pack(b"PK\x01\x02", 0x0314, *common, 0, 0, 0, _ATTRIBUTES, offset) + raw


def _tail(directory: list[bytes], offset: int) -> bytes:
    count, size = len(directory), sum(map(len, directory))
    return b"".join([*directory, _END.pack(b"PK\x05\x06", 0, 0, count, count, size, offset, 0)])


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"bundle: member name {name[:80]!r} is refused; names are lower-case relative paths without '..'"
        )


def _cut() -> BundleError:
    return BundleError("bundle: the file ends too early; fetch it again")


def _odd() -> BundleError:
    return BundleError(
        "bundle: the archive differs from the form that talaria writes (cut short, damaged or packed by another tool); "
        "fetch it again or write it with `talaria export`"
    )
