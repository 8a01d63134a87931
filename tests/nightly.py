"""Which of the tests marked nightly are played without ``--nightly``: some in each run of CI, in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

TURN_MINUTES = 5
"""Time of a turn, on two cores that do nothing else."""
MOST_MINUTES = 12
"""A test that takes longer has no turn: it is played with ``--nightly`` only."""


def turn(minutes: Mapping[str, float], key: str) -> set[str]:
    """Return the tests whose turn it is.

    The order is drawn from the key, a commit: every test comes first as often as every other one. It is played whatever
    it takes, and those after it while the turn's time lasts.

    Args:
        minutes: name of each test → what it takes.
    """
    order = sorted(minutes, key=lambda name: hashlib.sha256(f"{key} {name}".encode()).digest())
    chosen: set[str] = set()
    left = float(TURN_MINUTES)
    for name in order:
        if minutes[name] <= (left if chosen else MOST_MINUTES):
            chosen.add(name)
            left -= minutes[name]
    return chosen
