"""Folder in Google Cloud Storage.

Google's own client makes the requests: ``cloud.google.com/storage/docs/json_api``. The interface that GCS has for S3
clients is not enough: it has no conditional uploads.

Credentials are the Application Default Credentials; ``STORAGE_EMULATOR_HOST`` names another server, which is asked
without any. Messages never contain credentials. This is the only module that imports Google's client.

A file of several parts is sent as one object per part, which the store then joins. The objects of the parts lie beside
the file in ``.NAME.TOKEN.partial/`` until it is committed or aborted.
"""

from __future__ import annotations

import base64
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

import urllib3.exceptions

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.network import go_direct
from megatron_fleet.storage.folder import check_name
from megatron_fleet.storage.local import UNFINISHED, is_unfinished
from megatron_fleet.storage.remote import (
    NO_BUCKET,
    NO_FILE,
    UPLOAD_REMOVED,
    Answer,
    Exists,
    RemoteFolder,
    RemoteWriter,
    denied,
    retried,
)

try:
    import google.auth
    import google_crc32c
    import requests
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions
    from google.auth.credentials import AnonymousCredentials, Credentials
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud import storage
except ImportError:
    raise UserError(
        "gs:// addresses need google-cloud-storage, which this Python environment lacks; "
        "pip install google-cloud-storage."
    ) from None

CONNECTIONS = 64
"""Maximum number of connections that are kept; one more is closed after its request."""
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
ATTEMPTS = 8
"""Attempts at one request."""
TIMEOUT_S = (10, 60)
"""To connect, and between two bytes of an answer."""
PART = 8 << 20
"""Bytes of a part: the most that the client sends in one request, with the checksum in front of the bytes."""
SOURCES = 32
"""Maximum number of objects that the store joins in one request."""
WORKERS = 16
"""Requests under way at a time when many objects are joined or removed."""
TRY_AGAIN = {408, 429, 500, 502, 503, 504}
"""Statuses of refusals that may be none the next time."""
BROKEN = (urllib3.exceptions.HTTPError, OSError)
"""All of requests' own errors are OSErrors."""

T = TypeVar("T")


def connect() -> storage.Client:
    """Return this process's client, whose methods may be called from many threads.

    Raises:
        UserError: there are no credentials.
    """
    return _connect(
        os.getpid(),
        frozenset(item for item in os.environ.items() if item[0].startswith(("GOOGLE_", "STORAGE_EMULATOR_"))),
    )


@functools.lru_cache(maxsize=4)
def _connect(process: int, environment: frozenset[tuple[str, str]]) -> storage.Client:
    """Args: what makes clients differ."""
    with store_errors_as_user_error("gs"):
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            go_direct(emulator)
            credentials: Credentials = AnonymousCredentials()
        else:
            credentials, _ = google.auth.default(scopes=[SCOPE])
        session = AuthorizedSession(credentials)
        for scheme in ("https://", "http://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(pool_connections=8, pool_maxsize=CONNECTIONS))
        return storage.Client(project=None, credentials=credentials, _http=session)


@contextmanager
def store_errors_as_user_error(url: str, missing: str = NO_FILE) -> Iterator[None]:
    """Convert the store's errors for an address to UserError.

    Args:
        missing: what it means that something is not there.
    """
    try:
        yield
    except auth_exceptions.DefaultCredentialsError:
        raise UserError(
            f"{url}: no credentials for the store; run `gcloud auth application-default login`, or set "
            f"GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key."
        ) from None
    except auth_exceptions.TransportError as e:
        raise UserError(f"{url}: the server of the credentials does not answer ({e}); check the network.") from None
    except auth_exceptions.GoogleAuthError as e:
        raise UserError(
            f"{url}: the store refuses the credentials ({type(e).__name__}); log in again, or check key and clock."
        ) from None
    except exceptions.GoogleAPICallError as e:
        raise UserError(f"{url}: {_meaning(e, missing)}") from None
    except BROKEN as e:
        raise UserError(
            f"{url}: the store does not answer ({e}); check STORAGE_EMULATOR_HOST and the network."
        ) from None
    except ValueError as e:
        raise UserError(f"{url}: {' '.join(str(e).split())}; correct the address.") from None


def _meaning(error: exceptions.GoogleAPICallError, missing: str) -> str:
    status = int(error.code or 0)
    if status == 404:
        return NO_BUCKET if "bucket does not exist" in str(error) else missing
    if status == 401:
        return "the store refuses the credentials (HTTP 401); log in again, or check key and clock."
    if status == 403:
        return denied("HTTP 403")
    # The client's own text contains the address of the request and all of a page of HTML.
    said = " ".join(str(error.errors[0].get("message", "")).split()) if error.errors else type(error).__name__
    return f"the store refuses the request (HTTP {status}: {said})."


def _transient(error: Exception) -> bool:
    """Whether the same request may succeed: the store is busy, the connection broke, or bytes were damaged."""
    if isinstance(error, exceptions.GoogleAPICallError):
        return error.code in TRY_AGAIN or (error.code == 400 and "match calculated" in str(error))
    return isinstance(error, (*BROKEN, auth_exceptions.TransportError, _Damaged))


class GCSFolder(RemoteFolder):
    """``Folder`` in Google Cloud Storage."""

    broken = BROKEN

    def __init__(self, bucket: str, prefix: str) -> None:
        """Create a client; sends no request to the store yet. Args: see `RemoteFolder`."""
        super().__init__("gs", bucket, prefix)
        self._client = connect()
        with store_errors_as_user_error(self.url):
            self._bucket = self._client.bucket(bucket)
        host = os.environ.get("STORAGE_EMULATOR_HOST") or self._client.api_endpoint
        self._media = f"{host.rstrip('/')}/download/storage/v1/b/{quote(bucket, safe='')}/o/"

    def _files(self) -> Iterator[tuple[str, int, str]]:
        for name, blob in self._listed("").items():
            # Consoles represent a folder by an object whose name ends with a slash.
            if name and not name.endswith("/") and not _is_part(name):
                yield name, int(blob.size), str(blob.generation)

    def _listed(self, below: str) -> dict[str, storage.Blob]:
        """All objects whose names begin with ``below``, those of unfinished files too."""

        def pages() -> dict[str, storage.Blob]:
            found = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + below,
                fields="items(name,size,generation),nextPageToken",
                timeout=TIMEOUT_S,
                retry=None,
            )
            return {blob.name.removeprefix(self._prefix): blob for blob in found}

        return self._ask(self.url, pages, missing=NO_BUCKET)

    def size(self, name: str) -> int | None:
        found = self._ask(
            self.join(name), lambda: self._bucket.get_blob(self._key(name), timeout=TIMEOUT_S, retry=None)
        )
        return None if found is None else int(found.size)

    def _get(self, name: str, offset: int, length: int, version: str | None) -> Answer:
        query = {"alt": "media"} | ({"generation": version} if version else {})

        def get() -> requests.Response:
            answer = self._client._http.get(
                self._media + quote(self._key(name), safe=""),
                params=query,
                headers={"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"},
                stream=True,
                timeout=TIMEOUT_S,
            )
            if answer.status_code != 206:
                with answer:
                    raise exceptions.from_http_response(answer)
            return answer

        changed = "another file has replaced this one meanwhile; read it again."
        try:
            answer = self._ask(self.join(name), get, missing=changed if version else NO_FILE)
        except _Unsatisfiable:
            raise self._too_short(name, offset + length) from None
        return _body(answer), int(answer.headers["Content-Length"]), answer.headers.get("X-Goog-Generation")

    def _put(self, name: str, data: bytes, only_new: bool) -> None:
        self._upload(self.join(name), self._key(name), data, only_new)

    def _upload(self, url: str, key: str, data: bytes, only_new: bool = False) -> int:
        """Write an object, whose checksum the store compares; returns its generation."""
        checksum = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()

        def put() -> int:
            blob = self._bucket.blob(key)
            blob.upload_from_string(
                data,
                content_type="application/octet-stream",
                checksum="crc32c",
                if_generation_match=0 if only_new else None,
                timeout=TIMEOUT_S,
                retry=None,
            )
            # The store refuses what does not have the checksum sent along; what it says to hold is compared as well.
            if blob.crc32c != checksum:
                blob.delete(timeout=TIMEOUT_S, retry=None)
                raise _Damaged
            return int(blob.generation)

        return self._ask(url, put, missing=NO_BUCKET)

    def create(self, name: str, size: int) -> GCSWriter:
        return GCSWriter(self, name, size)

    def delete(self, name: str) -> None:
        self._remove([check_name(name)])

    def clear(self, marker: str) -> None:
        self.delete(marker)
        self._remove(self._listed(""))

    def abort_uploads(self) -> None:
        self._remove(name for name in self._listed("") if _is_part(name))

    def _remove(self, names: Iterable[str]) -> None:
        """Remove objects, several at a time; nothing happens for one that is not there."""

        def remove(name: str) -> None:
            with suppress(exceptions.NotFound):
                self._bucket.delete_blob(self._prefix + name, timeout=TIMEOUT_S, retry=None)

        _parallel(lambda name: self._ask(self._root + name, lambda: remove(name)), names)

    @staticmethod
    def _ask(url: str, request: Callable[[], T], missing: str = NO_FILE) -> T:
        """Send a request, again where that may help; returns the answer."""
        with store_errors_as_user_error(url, missing):
            try:
                return retried(request, _transient, ATTEMPTS)
            except exceptions.PreconditionFailed:
                raise Exists(f"{url} exists already.") from None
            except _Damaged:
                raise UserError(f"{url}: the bytes were damaged in every transfer; check the network.") from None
            except exceptions.RequestRangeNotSatisfiable:
                raise _Unsatisfiable(f"{url} is shorter.") from None


class _Damaged(Exception):
    """The store holds other bytes than were sent."""


class _Unsatisfiable(UserError):
    """A file ends before the first byte that was asked for."""


class GCSWriter(RemoteWriter):
    """``FileWriter`` of an object: one object per part, joined by the store, which checks the CRC32C of each."""

    _folder: GCSFolder

    def __init__(self, folder: GCSFolder, name: str, size: int) -> None:
        super().__init__(folder, name, size, PART)
        final = PurePosixPath(name)
        self._place = str(final.with_name(f".{final.name}.{secrets.token_hex(8)}{UNFINISHED}"))
        self._sent: dict[int, tuple[str, int]] = {}
        """Name and generation of the object of each part."""
        # What cannot be written is refused here, as a multipart upload is on S3, and not after the first part was read.
        folder._upload(self._url, folder._prefix + f"{self._place}/begun", b"")

    def _send(self, index: int, data: bytes) -> None:
        name = f"{self._place}/0-{index:07d}"
        self._sent[index] = name, self._folder._upload(self._url, self._folder._prefix + name, data)

    def _join(self) -> None:
        """Join the parts in order, level by level, the last time to the file itself."""
        pieces = [self._sent[index] for index in sorted(self._sent)]
        level = 1
        while len(pieces) > SOURCES:
            groups = [pieces[at : at + SOURCES] for at in range(0, len(pieces), SOURCES)]
            names = [f"{self._place}/{level}-{index:07d}" for index in range(len(groups))]
            joined = _parallel(lambda pair: self._compose(*pair), zip(names, groups, strict=True))
            pieces = list(zip(names, joined, strict=True))
            level += 1
        self._compose(self._name, pieces)

    def _compose(self, name: str, pieces: list[tuple[str, int]]) -> int:
        """Join objects of these names and generations to one; returns its generation."""
        bucket, prefix = self._folder._bucket, self._folder._prefix

        def compose() -> int:
            blob = bucket.blob(prefix + name)
            blob.content_type = "application/octet-stream"
            blob.compose(
                [bucket.blob(prefix + piece, generation=generation) for piece, generation in pieces],
                timeout=TIMEOUT_S,
                retry=None,
            )
            return int(blob.generation)

        return self._folder._ask(self._url, compose, missing=UPLOAD_REMOVED)

    def _remove_parts(self) -> None:
        self._folder._remove(self._folder._listed(f"{self._place}/"))


@contextmanager
def _body(answer: requests.Response) -> Iterator[Any]:
    with answer:
        yield answer.raw


def _is_part(name: str) -> bool:
    """Whether an object belongs to an unfinished file."""
    return any(is_unfinished(folder) for folder in PurePosixPath(name).parts[:-1])


def _parallel(do: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    """Call a function for all items, several at a time; returns the results in order."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="gcs") as pool:
        return list(pool.map(do, items))
