"""Content-addressed bytes in a bucket of any S3-compatible server, under the names that a folder would give them.

A PUT is all or nothing and overwrites with the same bytes, so nothing is ever half there. Credentials are found as
every S3 program finds them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's own role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import s3fs.core
from aiohttp import ClientError as LinkError
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from talaria_coordinator.storage.blobs import LARGEST, BlobLost, Swept, Young, digest_of, key_of, require_small
from talaria_coordinator.storage.database import SilentError

_S3: Any = s3fs.core.S3FileSystem
FRESH_S = 600.0
"""A blob younger than this is not written again by a put; an older one is, so that no gc takes it for forgotten."""
CONNECT_S, READ_S, TRIES, AGAIN = 5, 30, 2, 2
"""So long a server may take to be reached, and over each piece; botocore tries so often, and s3fs has it do that so
often: one that is silent is given up after two minutes."""


class S3Blobs:
    """Blobs as objects ``prefix/ab/cdef...`` of a bucket. ``url`` is ``s3://bucket/prefix``."""

    def __init__(self, url: str, *, endpoint: str | None = None, profile: str | None = None) -> None:
        parts = urlsplit(url)
        self.url, self._bucket = url, parts.netloc
        self._prefix = unquote(parts.path).strip("/")
        self._root = "/".join(part for part in (self._bucket, self._prefix) if part)
        retries = {"total_max_attempts": TRIES, "mode": "standard"}
        options: dict[str, Any] = {} if profile is None else {"profile": profile}
        self._young = Young()
        with self._talking("opened"):
            self._fs = _S3(
                endpoint_url=endpoint,
                config_kwargs={"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": retries},
                use_listings_cache=False,
                **options,
            )
            self._fs.retries = AGAIN
            self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def put(self, data: bytes | memoryview, digest: str = "") -> str:
        require_small(len(data))
        digest = digest or hashlib.sha256(data).hexdigest()
        self._young.add(digest)
        with self._talking("written"):
            found = self._info(digest)
            same = found is not None and found["size"] == len(data) and _age(found) <= FRESH_S
            if not same or bytes(self._fs.cat_file(self._path(digest))) != data:  # one that is damaged is written anew
                self._fs.pipe_file(self._path(digest), bytes(data))
        return digest

    def adopt(self, file: Path, data: bytes, digest: str) -> None:
        self.put(data, digest)

    def expect(self, digest: str) -> None:
        self._young.add(digest)

    def get(self, digest: str, *, again: bool = True) -> bytes:
        path = self._path(digest)
        with self._talking("read"):
            found = self._info(digest)
            if found is None:
                raise BlobLost(
                    f"blobs: {digest[:16]} cannot be read from {self.url}: not there; restore it from a backup"
                )
            if found["size"] > LARGEST:
                raise BlobLost(f"blobs: {path} is damaged ({found['size']} bytes); restore it from a backup")
            data = bytes(self._fs.cat_file(path, start=0, end=found["size"])) if found["size"] else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobLost(f"blobs: {path} is damaged (its sha256 is another); restore it from a backup")
        return data

    def has(self, digest: str) -> bool:
        with self._talking("looked up"):
            return self._info(digest) is not None

    def digests(self) -> Iterator[str]:
        for digest, _ in self._listed():
            yield digest

    def gc(self, keep: Iterable[str], older_s: float = 0.0, *, dry_run: bool = False) -> Swept:
        wanted, freed, younger = set(keep), 0, 0
        if not dry_run:
            self._young.sweep()
        for digest, listed in self._listed():
            if digest in wanted:
                continue
            with self._talking("removed"), self._young.lock:
                # Looked at once more: a put may have refreshed it since the listing.
                found = listed if self._is_young(digest, listed, older_s) else self._info(digest)
                if found is None:
                    continue
                if self._is_young(digest, found, older_s):
                    younger += found["size"]
                    continue
                if not dry_run:
                    self._fs.rm_file(self._path(digest))
            freed += found["size"]
        return Swept(freed, younger)

    def _is_young(self, digest: str, info: dict[str, Any], older_s: float) -> bool:
        return _age(info) < older_s or (older_s > 0 and digest in self._young)

    def _listed(self) -> list[tuple[str, dict[str, Any]]]:
        with self._talking("listed"):
            found = self._fs.find(self._root, detail=True)
        named = ((path.removeprefix(self._root + "/"), info) for path, info in found.items())
        return [(digest, info) for name, info in named if (digest := digest_of(name)) is not None]

    def _path(self, digest: str) -> str:
        return f"{self._root}/{key_of(digest)}"

    def _info(self, digest: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._fs.info(self._path(digest))
        except FileNotFoundError:
            return None
        return found if found["type"] == "file" else None

    @contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, BotoCoreError, ClientError, LinkError, ResponseParserError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SilentError(
                f"blobs: {self.url} could not be {doing} ({why}); look at the server, the bucket and the keys "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or [store] profile); all earlier state is intact"
            ) from None


def _age(info: dict[str, Any]) -> float:
    written: datetime = info["LastModified"]
    return (datetime.now(UTC) - written).total_seconds()
