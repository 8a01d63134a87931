"""Which failures to start an environment are worth another try."""

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
"""What OpenEnv's and Fleet's servers write into refusals that pass by themselves, in lower case."""


def is_busy(error: BaseException) -> bool:
    """Whether a server said, in ``error`` or in what caused it, that it has no room just now."""
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
