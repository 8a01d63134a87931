"""Which tests a run of CI leaves to others: with ``--turn KEY`` it plays its turn of those that have two marks.

``nightly(minutes)`` is for what takes minutes: played with ``--nightly``, else as many as a turn has time for.
``in_turn(number, of)`` is for one of many variants of a behaviour: played by everybody, but in CI by one run of ``of``,
the one whose turn the number is. The key is how many commits came before, so that ``of`` runs of CI that follow each
other play everything; any other text will do, from which a turn is drawn.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

TURN_MINUTES = 2
"""Time of a turn's nightly tests, on two cores that do nothing else."""
MOST_MINUTES = 12
"""A test that takes longer has no turn: it is played with ``--nightly`` only."""


def left_out(items: Iterable[pytest.Item], nightly: bool, key: str | None) -> list[pytest.Item]:
    """Return the tests that are not played: with ``nightly`` none."""
    items = [] if nightly else list(items)
    minutes = {item.nodeid: mark.kwargs["minutes"] for item in items if (mark := item.get_closest_marker("nightly"))}
    chosen = turn(minutes, key) if key else set()
    return [
        item
        for item in items
        if item.nodeid in minutes.keys() - chosen or (key and item.nodeid not in minutes and not _has_turn(item, key))
    ]


def turn(minutes: Mapping[str, float], key: str) -> set[str]:
    """Return the nightly tests whose turn it is.

    The order is drawn from the key: every test comes first as often as every other one. It is played whatever it takes,
    and those after it while the turn's time lasts.

    Args:
        minutes: name of each test → what it takes.
    """
    order = sorted(minutes, key=lambda name: _draw(key, name))
    chosen: set[str] = set()
    left = float(TURN_MINUTES)
    for name in order:
        if minutes[name] <= (left if chosen else MOST_MINUTES):
            chosen.add(name)
            left -= minutes[name]
    return chosen


def in_turn(variants: Iterable[Any], always: Collection[Any] = (), of: int = 4) -> list[Any]:
    """Variants for ``parametrize``: those of ``always`` are in every run, each other one in one of ``of`` runs of CI.

    Tests of one file that have the same variants get the same ones of them, so that they can share what was made for
    them (fixture ``played``).
    """
    numbers = itertools.count()
    return [
        variant
        if variant in always
        else pytest.param(
            *(variant if isinstance(variant, tuple) else (variant,)),
            marks=pytest.mark.in_turn(number=next(numbers), of=of),
        )
        for variant in variants
    ]


def _has_turn(item: pytest.Item, key: str) -> bool:
    """Whether each of a test's numbers (it may have variants of several lists) is the one whose turn it is.

    Files begin with numbers of their own, so that turns take about the same time.
    """
    first = int.from_bytes(_draw("first", item.nodeid.partition("::")[0])[:8], "big")
    turn = int(key) if key.isdecimal() else int.from_bytes(_draw("turn", key)[:8], "big")
    return all((mark.kwargs["number"] - first - turn) % mark.kwargs["of"] == 0 for mark in item.iter_markers("in_turn"))


def _draw(key: str, name: str) -> bytes:
    return hashlib.sha256(f"{key} {name}".encode()).digest()
