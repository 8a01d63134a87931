"""Classification of start-up failures that are worth a retry."""

from __future__ import annotations

from collections.abc import Iterator

_MARKS = (
    "capacity_reached",
    "instance limit",
    "rate limit",
    "too many in-flight",
    "temporarily unavailable",
    '"retryable": true',
    '"retryable":true',
    "'retryable': true",
)
"""Lower-case markers of transient refusals by OpenEnv's and Fleet's servers."""


def is_busy(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes says that the server currently has no capacity."""
    return any(mark in f"{type(e).__name__} {e}".lower() for e in _chain(error) for mark in (*_MARKS, "instancelimit"))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _chain(part)
        error = error.__cause__ or error.__context__
