"""Client of an S3 store, and the meaning of its errors. The only module that imports boto3.

Endpoint, region and credentials come from boto3's own chain: ``AWS_ENDPOINT_URL``, ``AWS_PROFILE``, ``~/.aws``, the
machine's role… Messages never contain credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_fleet.config.errors import UserError

try:
    import boto3
    from botocore import exceptions
    from botocore.config import Config
except ImportError:
    raise UserError("s3:// addresses need boto3, which this Python environment lacks; pip install boto3.") from None

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


def connect() -> Any:
    """Create a client whose methods may be called from many threads. Raises UserError when its configuration is
    unusable.
    """
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=CONNECTIONS,
        retries={"mode": "adaptive", "total_max_attempts": ATTEMPTS},
        tcp_keepalive=True,
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except NO_CREDENTIALS as e:
        raise UserError(f"s3: {e}; set up the credentials.") from None
    except (exceptions.BotoCoreError, ValueError) as e:
        raise UserError(f"s3: {e}; check AWS_ENDPOINT_URL, AWS_REGION and the AWS configuration file.") from None


@contextmanager
def told(url: str) -> Iterator[None]:
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
        raise UserError(f"{url}: the store does not answer ({e}); check AWS_ENDPOINT_URL and the network.") from None


def error_code(error: exceptions.ClientError) -> str:
    """Error code of the store; the HTTP status, as text, where it sends none."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _meaning(error: exceptions.ClientError) -> str:
    code = error_code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code == "NoSuchBucket":
        return "the bucket does not exist; create it or correct the address."
    if code == "NoSuchUpload":
        return "the unfinished upload was removed, by another process or the store's own rules; write the file again."
    if code in ("NoSuchKey", "404"):
        return "there is no such file; check the address."
    if code in WRONG_CREDENTIALS:
        return f"the store refuses the credentials ({code}); check key, secret, session token and clock."
    if status == 403:
        return f"the store denies the access ({code}); give this identity the permission or use another one."
    message = error.response.get("Error", {}).get("Message", "")
    return f"the store refuses the {error.operation_name} request ({code}, HTTP {status}: {message})."
