"""What an agent may know of an inference engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class EngineLost(Exception):
    """The engine cannot answer (crashed, unreachable, past its deadline). The episode ends as ``aborted``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. ``temperature`` 0 is greedy. ``seed`` makes the sample reproducible."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One turn as sampled.

    Attributes:
        token_ids: int32 ``[A]``, the stop token included when one ended the turn.
        logprobs: float32 ``[A]``, log μ at the request's temperature.
        finish_reason: ``stop``, ``length`` or ``abort``.
        versions: ``(weight version, start, end)`` over ``[0, A)``.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    versions: tuple[tuple[int, int, int], ...]


class Engine(Protocol):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, session: str) -> Generation:
        """Sample one turn. ``session`` names the episode: equal sessions go to the same replica (prefix cache).

        Raises:
            EngineLost: no answer within the engine's deadline, or the engine died.
        """
        ...
