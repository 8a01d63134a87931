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
from contextlib import closing, contextmanager
from typing import Any

import urllib3.exceptions

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.network import go_direct, proxy_of, through_proxy
from megatron_fleet.storage.folder import PART
from megatron_fleet.storage.remote import (
    NO_BUCKET,
    NO_FILE,
    PIECE,
    UPLOAD_REMOVED,
    Answer,
    Exists,
    RemoteFolder,
    RemoteWriter,
    denied,
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


class S3Folder(RemoteFolder):
    """``Folder`` on S3; ``write_new`` needs a store with conditional writes (``If-None-Match``)."""

    broken = BROKEN

    def __init__(self, bucket: str, prefix: str) -> None:
        """Create a client; sends no request yet. Args: see `RemoteFolder`."""
        super().__init__("s3", bucket, prefix)
        self._bucket = bucket
        self._client = connect()

    def _files(self) -> Iterator[tuple[str, int, str]]:
        with store_errors_as_user_error(self.url):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            ):
                for entry in page.get("Contents", []):
                    # Consoles represent a folder by an object whose key ends with a slash.
                    if not entry["Key"].endswith("/"):
                        yield entry["Key"].removeprefix(self._prefix), entry["Size"], entry["ETag"]

    def size(self, name: str) -> int | None:
        with store_errors_as_user_error(self.join(name)):
            try:
                return int(self._client.head_object(**self._at(name))["ContentLength"])
            except exceptions.ClientError as e:
                if error_code(e) not in ("404", "NoSuchKey"):
                    raise
                return None

    def _get(self, name: str, offset: int, length: int, version: str | None) -> Answer:
        span = f"bytes={offset}-{offset + length - 1}"
        with store_errors_as_user_error(self.join(name)):
            try:
                response = self._client.get_object(
                    **self._at(name), Range=span, **({"IfMatch": version} if version is not None else {})
                )
            except exceptions.ClientError as e:
                if error_code(e) in ("InvalidRange", "416"):
                    raise self._too_short(name, offset + length) from None
                raise
        return closing(response["Body"]), response["ContentLength"], response["ETag"]

    def _put(self, name: str, data: bytes, only_new: bool) -> None:
        condition = {"IfNoneMatch": "*"} if only_new else {}
        with store_errors_as_user_error(self.join(name)):
            try:
                send(self._client.put_object, **self._at(name), Body=data, **_checksum(self._client, data), **condition)
            except exceptions.ClientError as e:
                if not only_new or error_code(e) not in ("PreconditionFailed", "412"):
                    raise
                raise Exists(f"{self.join(name)} exists already.") from None

    def create(self, name: str, size: int) -> S3Writer:
        return S3Writer(self, name, size)

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
                keys = [{"Key": self._key(name)} for name in names[at : at + MOST_KEYS]]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})

    def abort_uploads(self) -> None:
        with store_errors_as_user_error(self.url):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for page in pages:
                for upload in page.get("Uploads", []):
                    _abort(self._client, {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(name)}


class S3Writer(RemoteWriter):
    """``FileWriter`` of an object: a multipart upload. The store checks the CRC32, or MD5, of every part."""

    def __init__(self, folder: S3Folder, name: str, size: int) -> None:
        super().__init__(folder, name, size, part_bytes(size))
        self._client = folder._client
        self._sent: dict[int, dict[str, Any]] = {}
        at = folder._at(name)
        with store_errors_as_user_error(self._url):
            algorithm = {} if _only_md5(self._client) else {"ChecksumAlgorithm": "CRC32"}
            created = self._client.create_multipart_upload(**at, **algorithm)
        self._upload = {**at, "UploadId": created["UploadId"]}

    def _send(self, index: int, data: bytes) -> None:
        checksum = _checksum(self._client, data)
        with store_errors_as_user_error(self._url):
            answer = send(self._client.upload_part, **self._upload, PartNumber=index + 1, Body=data, **checksum)
        checksum.pop("ContentMD5", None)
        self._sent[index] = {"PartNumber": index + 1, "ETag": answer["ETag"], **checksum}

    def _join(self) -> None:
        with store_errors_as_user_error(self._url):
            self._client.complete_multipart_upload(
                **self._upload, MultipartUpload={"Parts": [self._sent[index] for index in sorted(self._sent)]}
            )
        self._open = False

    def _remove_parts(self) -> None:
        with store_errors_as_user_error(self._url):
            _abort(self._client, self._upload)


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
