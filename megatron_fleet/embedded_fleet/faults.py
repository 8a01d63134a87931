"""Fault injection for the embedded fleet: at random by configuration, or as specified by a test."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_fleet.config.sections.env import FaultRatesConfig

FATAL_CALLS = 3
"""A hanging or dying call is one of an episode's first few, or its last one when there are fewer."""

Damage = Callable[[str], str]
"""Damages a reply of the server, given as text."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults of one call, instead of an immediate and correct answer.

    Attributes:
        slow_s: seconds of delay before the answer.
        hangs: the call never answers.
        dies: the session's socket closes.
        breaks: the call raises outside of the tool protocol, as a broken environment does.
        damage: applied to the bytes of the answer.
        no_verdict: a verification reports no reward.
    """

    slow_s: float = 0.0
    hangs: bool = False
    dies: bool = False
    breaks: bool = False
    damage: Damage | None = None
    no_verdict: bool = False


class FaultSource(Protocol):
    def of(self, episode: str, call: int, tool: str, *, last: bool) -> Fault:
        """Return the fault of call number ``call`` (from 0) of an episode. ``last``: it requests the verdict."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFaults:
    """Faults by tool name, for tests."""

    delay_s: tuple[tuple[str, float], ...] = ()
    """Delay of a tool's calls; a long one makes a hanging tool."""
    dies: tuple[str, ...] = ()
    """Tools that raise outside of the tool protocol, as a broken environment does."""

    def of(self, episode: str, call: int, tool: str, *, last: bool) -> Fault:
        """See ``FaultSource.of``."""
        return Fault(slow_s=dict(self.delay_s).get(tool, 0.0), breaks=tool in self.dies)


class RandomFaults:
    """Faults at the configured rates.

    Slow and malformed calls are drawn per call; hanging calls and dying sessions, which end an episode, once per
    episode, because an episode has several calls. Every draw depends on (seed, episode, call) alone, so equal runs have
    equal faults regardless of the order of their episodes.
    """

    def __init__(self, rates: FaultRatesConfig, seed: int) -> None:
        self._rates = rates
        self._seed = seed

    def of(self, episode: str, call: int, tool: str, *, last: bool) -> Fault:
        """See ``FaultSource.of``."""
        rates = self._rates
        slow = rates.slow_s if self._draw(episode, "slow", call) < rates.slow_rate else 0.0
        slow += self._latency(episode, call)
        hangs = self._strikes(episode, "hang", rates.hang_rate, call, last)
        dies = self._strikes(episode, "dead", rates.dead_session_rate, call, last)
        if last:
            return Fault(
                hangs=hangs, dies=dies, no_verdict=self._draw(episode, "verdict") < rates.verifier_failure_rate
            )
        damage = None
        if self._draw(episode, "malformed", call) < rates.malformed_rate:
            damage = DAMAGES[int(self._draw(episode, "damage", call) * len(DAMAGES))]
        return Fault(slow, hangs, dies, damage=damage)

    def _strikes(self, episode: str, kind: str, rate: float, call: int, last: bool) -> bool:
        if self._draw(episode, kind) >= rate:
            return False
        first = int(self._draw(episode, f"{kind} call") * FATAL_CALLS)
        return call == first or (last and call < first)

    def _latency(self, episode: str, call: int) -> float:
        """Draw a log-normal latency in seconds."""
        rates = self._rates
        if not rates.latency_median_s:
            return 0.0
        normal = statistics.NormalDist().inv_cdf(max(self._draw(episode, "latency", call), 2**-53))
        return rates.latency_median_s * math.exp(rates.latency_sigma * normal)

    def _draw(self, *what: str | int) -> float:
        """Draw uniformly from [0, 1)."""
        digest = hashlib.blake2b("\x1f".join(map(str, (self._seed, *what))).encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


def _truncated_frame(reply: str) -> str:
    return reply[: len(reply) // 2]


def _garbage_frame(reply: str) -> str:
    return "<html>502 Bad Gateway</html>"


def _list_for_frame(reply: str) -> str:
    return json.dumps([reply])


def _text_for_observation(reply: str) -> str:
    return _with(reply, observation="Internal Server Error")


def _cut_result(reply: str) -> str:
    result = json.loads(reply)["data"]["observation"].get("result")
    return _with_in_observation(reply, result=str(result)[: len(str(result)) // 2])


def _number_for_result(reply: str) -> str:
    return _with_in_observation(reply, result=3.5)


def _holes_in_result(reply: str) -> str:
    return _with_in_observation(reply, result={"content": [None, 1, {"type": "text"}]})


def _text_for_error(reply: str) -> str:
    return _with_in_observation(reply, result=None, error="Traceback (most recent call last)")


DAMAGES: tuple[Damage, ...] = (
    _truncated_frame,
    _garbage_frame,
    _list_for_frame,
    _text_for_observation,
    _cut_result,
    _number_for_result,
    _holes_in_result,
    _text_for_error,
)
"""The first four make the message unreadable: the session is lost. The others make malformed results or errors."""


def _with(reply: str, **values: Any) -> str:
    message = json.loads(reply)
    message["data"] |= values
    return json.dumps(message)


def _with_in_observation(reply: str, **values: Any) -> str:
    message = json.loads(reply)
    message["data"]["observation"] |= values
    return json.dumps(message)
