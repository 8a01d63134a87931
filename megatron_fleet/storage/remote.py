"""Requests to object stores: what the folders on S3 and in GCS share. Standard library only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from megatron_fleet.config.errors import UserError

BODY_ATTEMPTS = 6
"""Attempts at one request with a body, and at one read whose connection breaks in the middle; bytes already received
are kept."""
PIECE = 1 << 20
"""Bytes received per read from a connection."""
NO_BUCKET = "the bucket does not exist; create it or correct the address."
NO_FILE = "there is no such file; check the address."
UPLOAD_REMOVED = "the unfinished upload was removed, by another process or the store's own rules; write the file again."

T = TypeVar("T")


def pause(attempt: int) -> None:
    """Wait before an attempt, 0 = the first: at random and longer each time, so that clients do not come together."""
    if attempt:
        time.sleep(random.uniform(0, 0.1 * 2**attempt))


def retried(request: Callable[[], T], transient: Callable[[Exception], bool], attempts: int = BODY_ATTEMPTS) -> T:
    """Send a request until it succeeds, at most ``attempts`` times; errors that are not ``transient`` end it."""
    for attempt in range(1, attempts):
        try:
            return request()
        except Exception as e:
            if not transient(e):
                raise
            pause(attempt)
    return request()


def broken_too_often(url: str, error: Exception) -> UserError:
    """Error of a read that was given up."""
    return UserError(f"{url}: the connection broke {BODY_ATTEMPTS} times ({error}); check the network.")


def denied(code: str) -> str:
    """Meaning of a refusal for want of a permission."""
    return f"the store denies the access ({code}); give this identity the permission or use another one."
