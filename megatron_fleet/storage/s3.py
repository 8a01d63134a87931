"""Folder on S3 or an S3-compatible store.

Requests are made individually, ranged GETs and parts of multipart uploads: ``docs.aws.amazon.com/AmazonS3`` (API
Reference). boto3's transfer manager is not used because, with the CRT installed, it may ignore the endpoint.

Endpoint, region and credentials come from boto3's own chain: ``AWS_ENDPOINT_URL``, ``AWS_PROFILE``, ``~/.aws``, the
machine's role… Messages never contain credentials. This is the only module that imports boto3.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import urllib3.exceptions

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.network import go_direct, proxy_of, through_proxy
from megatron_fleet.storage.folder import PART, Parts, check_name
from megatron_fleet.storage.remote import (
    BODY_ATTEMPTS,
    NO_BUCKET,
    NO_FILE,
    PIECE,
    UPLOAD_REMOVED,
    broken_too_often,
    denied,
    pause,
    retried,
)

try:
    import boto3
    from botocore import exceptions
    from botocore.config import Config
except ImportError:
    raise UserError("s3:// addresses need boto3, which this Python environment lacks; pip install boto3.") from None

METADATA = "http://169.254.169.254"
"""Server of a cloud machine that gives its role's credentials."""
CONNECTIONS = 64
"""Maximum number of concurrent transfers; one more would wait for a connection."""
ATTEMPTS = 8
"""Attempts at one request, with boto3's exponential back-off between them."""
NO_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.ProfileNotFound,
    exceptions.TokenRetrievalError,
    exceptions.SSOError,
)
WRONG_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AuthorizationHeaderMalformed",
    "RequestTimeTooSkewed",
}

MOST_PARTS = 10_000
"""Maximum number of parts of one upload, by the protocol."""
MOST_KEYS = 1_000
"""Maximum number of objects in one request to delete them, by the protocol."""
AGAIN = {"BadDigest", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict", "OperationAborted"}
"""Codes of refusals that boto3 does not try again: the bytes were damaged on the way, or another request for the same
object was under way."""
BROKEN = (exceptions.HTTPClientError, exceptions.IncompleteReadError, urllib3.exceptions.HTTPError, OSError)


def connect() -> Any:
    """Return this process's client, whose methods may be called from many threads: making one takes half a second.

    Raises:
        UserError: its configuration is unusable.
    """
    return _connect(os.getpid(), frozenset(item for item in os.environ.items() if item[0].startswith("AWS_")))


@functools.lru_cache(maxsize=4)
def _connect(process: int, environment: frozenset[tuple[str, str]]) -> Any:
    """Args: what makes clients differ."""
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=CONNECTIONS,
        retries={"mode": "adaptive", "total_max_attempts": ATTEMPTS},
        tcp_keepalive=True,
    )
    go_direct(METADATA)
    try:
        session = boto3.session.Session()
        client = session.client("s3", config=config)
        endpoint = client.meta.endpoint_url
        if proxy_of(endpoint) is not None and go_direct(endpoint):
            return session.client("s3", config=config)  # boto3 chose the proxy when it made the first one
        return client
    except NO_CREDENTIALS as e:
        raise UserError(f"s3: {e}; set up the credentials.") from None
    except (exceptions.BotoCoreError, ValueError) as e:
        raise UserError(f"s3: {e}; check AWS_ENDPOINT_URL, AWS_REGION and the AWS configuration file.") from None


@contextmanager
def store_errors_as_user_error(url: str) -> Iterator[None]:
    """Convert the store's errors for an address to UserError."""
    try:
        yield
    except NO_CREDENTIALS:
        raise UserError(
            f"{url}: no credentials for the store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        ) from None
    except exceptions.ClientError as e:
        raise UserError(f"{url}: {_meaning(e)}") from None
    except exceptions.ParamValidationError as e:
        raise UserError(f"{url}: {' '.join(str(e).split())}; correct the address.") from None
    except (exceptions.HTTPClientError, exceptions.BotoCoreError) as e:
        way = through_proxy(getattr(e, "kwargs", {}).get("endpoint_url") or "")
        raise UserError(
            f"{url}: the store does not answer ({e}){way}; check AWS_ENDPOINT_URL and the network."
        ) from None


def send(request: Callable[..., Any], **arguments: Any) -> Any:
    """Send a request with a body, again after refusals of `AGAIN`; returns the answer."""
    return retried(
        lambda: request(**arguments), lambda e: isinstance(e, exceptions.ClientError) and error_code(e) in AGAIN
    )


def error_code(error: exceptions.ClientError) -> str:
    """Error code of the store; the HTTP status, as text, where it sends none."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _meaning(error: exceptions.ClientError) -> str:
    code = error_code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code == "NoSuchBucket":
        return NO_BUCKET
    if code == "NoSuchUpload":
        return UPLOAD_REMOVED
    if code in ("NoSuchKey", "404"):
        return NO_FILE
    if code in WRONG_CREDENTIALS:
        return f"the store refuses the credentials ({code}); check key, secret, session token and clock."
    if status == 403:
        return denied(code)
    message = error.response.get("Error", {}).get("Message", "")
    if code == "NotImplemented" or "x-amz-checksum" in message or "x-amz-sdk-checksum" in message:
        return (
            f"the store refuses the {error.operation_name} request ({code}: {message}); if it does not know the newest "
            f"checksum headers, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, which uses MD5."
        )
    return f"the store refuses the {error.operation_name} request ({code}, HTTP {status}: {message})."


class S3Folder:
    """``Folder`` on S3."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Create a client; sends no request yet.

        Args:
            prefix: without slashes around it; empty = the whole bucket.
        """
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}"
        self._client = connect()

    def join(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{check_name(name)}"

    def sizes(self) -> dict[str, int]:
        return {name: entry["Size"] for name, entry in self._listed()}

    def versions(self) -> dict[str, str]:
        return {name: entry["ETag"] for name, entry in self._listed()}

    def _listed(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        with store_errors_as_user_error(self.url):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            ):
                for entry in page.get("Contents", []):
                    # Consoles represent a folder by an object whose key ends with a slash.
                    if not entry["Key"].endswith("/"):
                        found.append((entry["Key"].removeprefix(self._prefix), entry))
        return sorted(found, key=lambda item: item[0])

    def size(self, name: str) -> int | None:
        """Bytes of a file, ``None`` when there is none."""
        with store_errors_as_user_error(self.join(name)):
            try:
                return int(self._client.head_object(**self._at(name))["ContentLength"])
            except exceptions.ClientError as e:
                if error_code(e) not in ("404", "NoSuchKey"):
                    raise
                return None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            size = self.size(name)
            if size is None:
                raise UserError(f"{self.join(name)}: {NO_FILE}")
            length = max(size - offset, 0)
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        done, etag = 0, None
        broken: Exception | None = None
        for attempt in range(BODY_ATTEMPTS if len(view) else 0):
            pause(attempt)
            body, etag = self._get(name, offset + done, len(view) - done, etag)
            try:
                while done < len(view):
                    done += body.readinto(view[done : done + PIECE])
                return
            except BROKEN as e:
                broken = e
            finally:
                body.close()
        if broken:
            raise broken_too_often(self.join(name), broken)

    def write(self, name: str, data: bytes) -> None:
        with store_errors_as_user_error(self.join(name)):
            send(self._client.put_object, **self._at(name), Body=data, **self._checksum(data))

    def write_new(self, name: str, data: bytes) -> bool:
        """See `Folder.write_new`; the store must support conditional writes (``If-None-Match``)."""
        with store_errors_as_user_error(self.join(name)):
            try:
                send(self._client.put_object, **self._at(name), Body=data, **self._checksum(data), IfNoneMatch="*")
            except exceptions.ClientError as e:
                if error_code(e) not in ("PreconditionFailed", "412"):
                    raise
                # A request that was answered too late is sent twice: the second finds what the first has written.
                return self.read(name) == data
        return True

    def create(self, name: str, size: int) -> S3Writer:
        return S3Writer(self, self._client, self._at(name), name, size)

    def delete(self, name: str) -> None:
        with store_errors_as_user_error(self.join(name)):
            self._client.delete_object(**self._at(name))

    def clear(self, marker: str) -> None:
        self.delete(marker)
        names = list(self.sizes())
        with store_errors_as_user_error(self.url):
            if _only_md5(self._client):  # a request to delete many needs one of the new checksums
                for name in names:
                    self._client.delete_object(**self._at(name))
                return
            for at in range(0, len(names), MOST_KEYS):
                keys = [{"Key": self._at(name)["Key"]} for name in names[at : at + MOST_KEYS]]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})

    def abort_uploads(self) -> None:
        """Abort every unfinished upload below the folder: those of killed writers, but also of living ones."""
        with store_errors_as_user_error(self.url):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for page in pages:
                for upload in page.get("Uploads", []):
                    _abort(self._client, {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})

    def _checksum(self, data: bytes) -> dict[str, str]:
        return _checksum(self._client, data)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_name(name)}

    def _get(self, name: str, offset: int, length: int, etag: str | None) -> tuple[Any, str]:
        """Open a stream of exactly these bytes and return it with the object's ETag, which must equal ``etag`` if
        given.
        """
        span = f"bytes={offset}-{offset + length - 1}"
        with store_errors_as_user_error(self.join(name)):
            try:
                response = self._client.get_object(
                    **self._at(name), Range=span, **({"IfMatch": etag} if etag is not None else {})
                )
            except exceptions.ClientError as e:
                if error_code(e) in ("InvalidRange", "416"):
                    raise self._too_short(name, offset + length) from None
                raise
        if response["ContentLength"] != length:
            response["Body"].close()
            raise self._too_short(name, offset + length)
        return response["Body"], response["ETag"]

    def _too_short(self, name: str, end: int) -> UserError:
        return UserError(
            f"{self.join(name)}: has {self.size(name)} bytes and byte {end} was asked for; upload it again."
        )


class S3Writer:
    """``FileWriter`` of an object: a multipart upload. The store checks the CRC32, or MD5, of every part."""

    def __init__(self, folder: S3Folder, client: Any, at: dict[str, str], name: str, size: int) -> None:
        self.part = part_bytes(size)
        self._folder = folder
        self._client = client
        self._name = name
        self._url = folder.join(name)
        self._size = size
        self._parts = Parts(self._url, size, self.part)
        self._sent: dict[int, dict[str, Any]] = {}
        self._open = True
        with store_errors_as_user_error(self._url):
            algorithm = {} if _only_md5(client) else {"ChecksumAlgorithm": "CRC32"}
            created = client.create_multipart_upload(**at, **algorithm)
        self._upload = {**at, "UploadId": created["UploadId"]}

    def write_at(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        index = self._parts.index(offset, len(view))
        data = bytes(view)
        checksum = _checksum(self._client, data)
        with store_errors_as_user_error(self._url):
            answer = send(self._client.upload_part, **self._upload, PartNumber=index + 1, Body=data, **checksum)
        checksum.pop("ContentMD5", None)
        self._sent[index] = {"PartNumber": index + 1, "ETag": answer["ETag"], **checksum}
        self._parts.wrote(index)

    def commit(self) -> None:
        self._parts.require_all()
        if not self._size:
            # An upload needs a part, and some stores reject an empty one.
            self.abort()
            self._folder.write(self._name, b"")
            return
        with store_errors_as_user_error(self._url):
            self._client.complete_multipart_upload(
                **self._upload, MultipartUpload={"Parts": [self._sent[index] for index in sorted(self._sent)]}
            )
        self._open = False
        stored = self._folder.size(self._name)
        if stored != self._size:
            self._folder.delete(self._name)
            raise UserError(f"{self._url}: the store holds {stored} bytes of {self._size}; write the file again.")

    def abort(self) -> None:
        if self._open:
            with store_errors_as_user_error(self._url):
                _abort(self._client, self._upload)
            self._open = False


def part_bytes(size: int) -> int:
    """Bytes of a part: ``PART``, or more where the file would exceed the maximum number of parts."""
    return max(PART, -(-size // MOST_PARTS // PIECE) * PIECE)


def _checksum(client: Any, data: bytes) -> dict[str, str]:
    """Return the argument with which the store verifies ``data``."""
    if _only_md5(client):
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}
    return {"ChecksumCRC32": _crc32(data)}


def _only_md5(client: Any) -> bool:
    """Whether AWS_REQUEST_CHECKSUM_CALCULATION=when_required says that the store knows no checksum but MD5."""
    return client.meta.config.request_checksum_calculation == "when_required"


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _abort(client: Any, upload: dict[str, str]) -> None:
    try:
        client.abort_multipart_upload(**upload)
    except exceptions.ClientError as e:
        if error_code(e) not in ("NoSuchUpload", "404"):
            raise
