"""A bundle on disk: ``me.talaria``, one file that holds a personal model and all that is needed to trust it.

Members: ``manifest.json`` first, ``signature.json`` where it is signed, the models (``models/*.onnx``) and the parity
data (``parity/*``). The manifest names every other member with its size and SHA-256; the signature (Ed25519) covers
the manifest. Reading needs numpy at most; checking a signature needs the ``cryptography`` package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np

from talaria import durable, valid
from talaria.errors import BundleError, ConfigError, so_that_it_can_be_written
from talaria.foreign import shown
from talaria.npz import UNREADABLE
from talaria.tensors import Array
from talaria_export.bundle.archive import Limits, pack, unpack
from talaria_export.bundle.manifest import FORMAT, VERSION, parse_manifest
from talaria_export.bundle.onnx_validator import MANY, inspect_onnx
from talaria_export.bundle.preprocess import Preprocessing

MANIFEST = "manifest.json"
SIGNATURE = "signature.json"
_CONTEXT = b"talaria-bundle-1\n"  # what is signed begins with its purpose, so that no other message can stand in


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: every member was checked against the manifest, every model was inspected."""

    path: str
    manifest: Mapping[str, Any]
    members: Mapping[str, memoryview] = field(repr=False)
    digest: str
    """Hex SHA-256 of the manifest, and so of everything in the bundle."""
    signer: str | None = None
    """Hex public key whose signature was checked; None where there is none or it was not asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input of the model, without the batch dimension."""
        return tuple(self.manifest["input"]["shape"])

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the named inputs that stand side by side in one; empty where the model has a single one."""
        return {part["name"]: tuple(part["shape"]) for part in self.manifest["input"].get("parts", ())}

    @property
    def steps(self) -> Preprocessing:
        """What the graph does before its model, and so what the bundle takes."""
        return Preprocessing.from_json(self.manifest["input"])

    @property
    def labels(self) -> tuple[str, ...]:
        """One name per class."""
        return tuple(self.manifest["output"]["labels"])

    @property
    def task(self) -> str:
        """What the model says of an input (:mod:`talaria.tasks`)."""
        return str(self.manifest["output"].get("task", "classification"))

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants whose model is inside, the default first."""
        inside = [row["name"] for row in self.manifest["variants"] if row["file"] is not None]
        return tuple(sorted(inside, key=lambda name: name != self.manifest["default"]))

    def variant(self, name: str | None = None) -> Mapping[str, Any]:
        """The manifest's row of a variant inside, of the default where no name is given."""
        wanted = self.manifest["default"] if name is None else name
        for row in self.manifest["variants"]:
            if row["name"] == wanted and row["file"] is not None:
                found: Mapping[str, Any] = row
                return found
        raise ConfigError(f"variant={wanted!r} is not in {self.path}; it holds {', '.join(self.variants)}")

    def model(self, name: str | None = None) -> bytes:
        """The ONNX file of a variant, of the default where no name is given."""
        return bytes(self.members[self.variant(name)["file"]])

    def array(self, member: str) -> Array:
        """A float32 array stored in npy form."""
        if member not in self.members:
            raise ConfigError(f"member={member!r} is not in {self.path}; it holds {', '.join(self.members)}")
        return read_array(member, self.members[member])


def read_array(name: str, data: bytes | memoryview) -> Array:
    """A float32 array in npy form, without pickle; its header must fit the bytes that follow."""
    stream = BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=1000)
    except UNREADABLE as problem:
        raise BundleError(f"{name}: not a plain array ({problem}); export the model again") from None
    count = 1
    for size in shape:
        count *= size
    rest = len(data) - stream.tell()
    if dtype != np.dtype("<f4") or fortran or rest != 4 * count or any(size < 0 for size in shape):
        raise BundleError(f"{name}: {rest} bytes do not make a float32 array of shape {shape}; export the model again")
    return np.frombuffer(data, dtype=dtype, offset=stream.tell()).reshape(shape)


def array_bytes(array: Array) -> bytes:
    """``array`` as float32 in npy form, version 1.0."""
    stream = BytesIO()
    plain = np.ascontiguousarray(array, dtype="<f4")
    np.lib.format.write_array(stream, plain, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def seal(manifest: Mapping[str, Any], members: Mapping[str, bytes], signing_key: bytes | None = None) -> bytes:
    """The bytes of a bundle. ``manifest`` needs no ``files``: sizes and hashes are filled in here.

    ``signing_key`` is a raw Ed25519 private key, 32 bytes. Equal arguments give equal bytes.
    """
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in members.items()
    }
    whole = {"format": FORMAT, "version": VERSION, **manifest, "files": files}
    try:
        text = json.dumps(whole, indent=1, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"meta: must be plain data that JSON can hold, without NaN ({problem})") from None
    if len(text) > Limits().manifest:
        raise ConfigError(f"meta: makes manifest.json {len(text)} bytes, and {Limits().manifest} are read; shorten it")
    parse_manifest(text)
    head = {MANIFEST: text}
    if signing_key is not None:
        head[SIGNATURE] = _sign(text, signing_key)
    return pack(head | dict(members))


def save(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes ``data`` so that ``path`` holds either its old content or all of the new, also after a power cut.

    For its owner alone: a bundle holds a personal head, which says much about whose it is.
    """
    target = valid.path("bundle", "path", path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.write(target, data, alone=False)
    except OSError as problem:
        raise BundleError(
            f"cannot write {target}: {problem.strerror or problem}; what was there before is intact; "
            f"{so_that_it_can_be_written(problem)}, or give another path"
        ) from None


def open_bundle(path: str | os.PathLike[str], limits: Limits = Limits(), *, trust: str | bytes | None = None) -> Bundle:
    """Reads and checks a bundle.

    ``trust`` is the Ed25519 public key (raw bytes or hex) that must have signed it. Without it a bundle is checked
    for damage, not for its origin. Raises :class:`~talaria.errors.BundleError` on whatever is not a sound bundle.
    """
    valid.path("bundle", "path", path)
    if not isinstance(limits, Limits):
        raise ConfigError(f"bundle: limits={shown(limits)} must be Limits, such as Limits(file=1 << 20), or left out")
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limits.file:
                raise BundleError(f"{name}: {size} bytes are more than the limit of {limits.file}; raise Limits.file")
            data = file.read(limits.file + 1)
    except OSError as problem:
        raise BundleError(f"cannot read {name}: {problem.strerror or problem}; check the path") from None
    if len(data) > limits.file:
        raise BundleError(f"{name}: more than the limit of {limits.file} bytes; raise Limits.file")
    try:
        return read_bundle(data, limits, trust=trust, path=name)
    except BundleError as problem:
        raise BundleError(f"{name}: {problem}") from None


def read_bundle(
    data: bytes, limits: Limits = Limits(), *, trust: str | bytes | None = None, path: str = "<bytes>"
) -> Bundle:
    """:func:`open_bundle` for bytes in memory."""
    members = unpack(data, limits)
    if next(iter(members)) != MANIFEST:
        raise BundleError("bundle: the first member must be manifest.json; this archive is not a bundle")
    text = members.pop(MANIFEST)
    signature = members.pop(SIGNATURE, None)
    if len(text) > limits.manifest or (signature is not None and len(signature) > limits.manifest):
        raise BundleError(f"bundle: manifest.json is larger than {limits.manifest} bytes; raise Limits.manifest")
    signer = None if trust is None else _check_signature(bytes(text), signature, trust)
    manifest = parse_manifest(bytes(text))
    _check_members(manifest["files"], members)
    steps = Preprocessing.from_json(manifest["input"])
    shapes = steps.inputs(1), steps.inputs(MANY)
    for member, content in members.items():
        if member.endswith(".onnx"):
            inspect_onnx(member, content, element_limit=limits.file, shapes=shapes)
    digest = hashlib.sha256(text).hexdigest()
    return Bundle(path=path, manifest=manifest, members=members, digest=digest, signer=signer)


def _check_members(files: Mapping[str, Any], members: Mapping[str, memoryview]) -> None:
    if list(files) != sorted(members):
        odd = sorted(set(files) ^ set(members))
        raise BundleError(f"bundle: members {odd} are missing or not in the manifest; fetch the bundle again")
    for name, content in members.items():
        found = hashlib.sha256(content).hexdigest()
        if len(content) != files[name]["bytes"] or found != files[name]["sha256"]:
            raise BundleError(
                f"bundle: member {name!r} is not the one that the manifest names (sha256 {found[:12]}...)"
            )


def _sign(text: bytes, key: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not isinstance(key, bytes) or len(key) != 32:
        found = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
        raise ConfigError(f"signing_key: is {found}; an Ed25519 private key is 32 bytes")
    private = Ed25519PrivateKey.from_private_bytes(key)
    public = private.public_key().public_bytes_raw()
    signature = {"key": public.hex(), "signature": private.sign(_CONTEXT + text).hex()}
    return json.dumps(signature, sort_keys=True).encode()


def _check_signature(text: bytes, signature: memoryview | None, trust: str | bytes) -> str:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise ConfigError("trust: checking a signature needs the package cryptography; pip install it") from None
    try:
        wanted = bytes.fromhex(trust) if isinstance(trust, str) else bytes(trust)
    except ValueError:
        wanted = b""
    if len(wanted) != 32:
        raise ConfigError("trust: give an Ed25519 public key as 32 bytes or 64 hex digits")
    if signature is None:
        raise BundleError("bundle: not signed, but a signature was asked for; ask its maker to sign it")
    try:
        claim = json.loads(bytes(signature))
        key, signed = bytes.fromhex(claim["key"]), bytes.fromhex(claim["signature"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError("bundle: signature.json cannot be read; fetch the bundle again") from None
    if key != wanted:
        raise BundleError(f"bundle: signed by {key.hex()[:16]}..., not by the trusted {wanted.hex()[:16]}...")
    try:
        Ed25519PublicKey.from_public_bytes(wanted).verify(signed, _CONTEXT + text)
    except (InvalidSignature, ValueError):
        raise BundleError("bundle: the signature does not fit the manifest; the file was changed") from None
    return wanted.hex()
