"""Interface of an inference engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_fleet.models.images import PlacedImage


class EngineLost(Exception):
    """The engine cannot answer (crashed, unreachable, silent). The episode ends as ``aborted``."""


class EngineRefused(ValueError):
    """The engine refuses the request itself, and would again. The episode ends as ``refused``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 is greedy.
        seed: makes the sample reproducible.
        routing_start: first token, counted from the start of the prompt, whose experts are requested; ``None``: none.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    routing_start: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn.

    Attributes:
        token_ids: int32 ``[A]``, the stop token included when one ended the turn.
        logprobs: float32 ``[A]``, log μ at the request's temperature.
        finish_reason: ``stop``, ``length``, ``deadline`` (cut off at the turn's deadline, maybe before any token),
            ``interrupted`` (cut off because the engine went to sleep; only between an engine and its client, which goes
            on with the rest) or ``abort``.
        versions: ``(weight version, start, end)`` over ``[0, A)``.
        routing: uint8 or int16 ``[R, layers, k]`` (see ``Trajectory.routing``), the experts of the tokens from
            ``routing_start`` on, in order. The last sampled token was never an input, so R ends before it, or earlier.
            ``None``: the engine reports none.
        interruptions: times that the engine went to sleep meanwhile.
        recomputed: tokens of prompt and turn that the engine had computed and computed again after these.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    versions: tuple[tuple[int, int, int], ...]
    routing: np.ndarray | None = None
    interruptions: int = 0
    recomputed: int = 0


class Engine(Protocol):
    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample one turn. ``session`` identifies the episode: equal sessions go to the same replica (prefix cache).

        ``images`` are those of the prompt, in order; its ids contain all their placeholders.

        Raises:
            EngineLost: the engine died, or does not answer.
            EngineRefused: it refuses the request (for example a prompt beyond its context).
        """
        ...
