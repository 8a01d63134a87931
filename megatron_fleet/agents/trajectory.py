"""Trajectory of an episode, as compact arrays that are passed between processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import ImageSpan


class Outcome(StrEnum):
    """Reason for the end of an episode."""

    COMPLETED = "completed"
    """The policy gave its final answer (or the environment declared the task done) and the verifier scored it."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached; the verifier still scored the state left behind."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next turn would not fit into the context; the verifier still scored the state left behind."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The first prompt alone did not fit; nothing was generated."""
    GENERATION_TRUNCATED = "generation_truncated"
    """A turn hit its token limit or its deadline before it ended; the verifier still scored the state left behind."""
    NO_ACTION = "no_action"
    """The policy repeatedly produced neither a valid tool call nor a final answer."""
    TIMEOUT = "timeout"
    """The episode's deadline passed."""
    ENV_FAILED = "env_failed"
    """The environment could not be started or was lost; the reward is unknown."""
    VERIFIER_FAILED = "verifier_failed"
    """The episode ended but its verifier could not be run; the reward is unknown."""
    WROTE_IMAGE = "wrote_image"
    """The policy wrote a token that only stands for a part of an image; the verifier still scored the state."""
    REFUSED = "refused"
    """The engine, the environment or the episode's code refused what it was asked, and would again; the reward is
    unknown."""
    ABORTED = "aborted"
    """The run was stopped or the engine failed while the episode was in flight; the reward is unknown."""


class Cause(StrEnum):
    """Cause of an outcome."""

    POLICY = "policy"
    """The policy played until it finished or exceeded a limit: the verifier scores the state that it left behind."""
    TASK = "task"
    """The task cannot be played with this configuration."""
    ENVIRONMENT = "environment"
    REQUEST = "request"
    """The configuration, the task or a program, which fail in the same way at every attempt."""
    VERIFIER = "verifier"
    RUN = "run"
    """The engine, the endpoint or the end of the run."""


CAUSES: Mapping[Outcome, Cause] = MappingProxyType(
    {
        Outcome.COMPLETED: Cause.POLICY,
        Outcome.MAX_TURNS: Cause.POLICY,
        Outcome.CONTEXT_OVERFLOW: Cause.POLICY,
        Outcome.PROMPT_TOO_LONG: Cause.TASK,
        Outcome.GENERATION_TRUNCATED: Cause.POLICY,
        Outcome.NO_ACTION: Cause.POLICY,
        Outcome.TIMEOUT: Cause.POLICY,
        Outcome.ENV_FAILED: Cause.ENVIRONMENT,
        Outcome.VERIFIER_FAILED: Cause.VERIFIER,
        Outcome.WROTE_IMAGE: Cause.POLICY,
        Outcome.REFUSED: Cause.REQUEST,
        Outcome.ABORTED: Cause.RUN,
    }
)
"""Whether an episode is scored, and what counts as a failure of the infrastructure or of the environment, follows from
this table alone."""


def environment_failed(outcome: Outcome, reward: float | None) -> bool | None:
    """Return whether the environment caused an unknown reward; ``None``: the episode is no evidence either way."""
    if CAUSES[outcome] in (Cause.RUN, Cause.REQUEST):
        return None
    return reward is None and CAUSES[outcome] is not Cause.TASK


def will_recur(outcome: Outcome) -> bool:
    """Return whether another attempt would end in the same way."""
    return CAUSES[outcome] in (Cause.TASK, Cause.REQUEST)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of one kind: ``prompt``, ``action`` or ``observation``.

    ``weight_version`` is the version that sampled an action span; an action sampled across a weight update is split
    into several spans. It is ``-1`` for tokens that no policy sampled.
    """

    kind: str
    start: int
    end: int
    turn: int
    weight_version: int = -1


@dataclass(slots=True)
class Trajectory:
    """One finished episode.

    A *segment* is one append-only conversation: a rendered prompt, then actions and observations. An episode has one
    segment, plus one with its own prompt for each time its history was rewritten. Every token was predicted from the
    tokens before it in its segment, and from nothing else.

    Attributes:
        group: number of its group within the step or the evaluation, set when it comes back; -1 before.
        sample: number within its group, likewise.
        token_ids: int32 ``[T]``, everything the policy saw and sampled, never re-encoded; all segments concatenated.
        action_mask: bool ``[T]``, true where the policy sampled the token.
        behaviour_logprobs: float32 ``[T]``, log μ(token) at the sampling temperature; 0 where ``action_mask`` is false.
        spans: cover ``[0, T)`` without gaps, in order; a segment begins with a ``prompt`` span.
        segment_starts: first token of each segment, ascending; the first is 0.
        routing: uint8 or int16 ``[T, layers, k]`` for a mixture of experts whose routing is replayed, else ``None``:
            the experts that each layer of the engine sent token t *as an input* to. A token takes k ≥ 2 different
            experts, so equal ids (zeros: the last token, dense layers, tokens the engine did not report) mean unknown.
        reward: ``None`` = unknown; an unknown reward never enters group statistics or the loss.
        reward_reason: one short sentence from the verifier, or on why it gave no reward.
        metrics: numbers of this episode (turns, tool_calls, tool_errors, parse_errors, seconds…).
        messages: the conversation as text, for records only; never re-tokenised. A message with images names their
            digests as ``images``, in the order of their places ``[image n]``.
        image_spans: spans of the images that the policy saw, in order; each is a run of the placeholder token in a
            prompt or an observation.
        images: digest → unmodified image, each once; empty when the images are stored as files.
        stretches: name, unix time of the beginning and seconds of the episode and of what it waited for, in order:
            ``episode``, then ``env``, ``generate`` and ``verify``; for traces, not kept in files.
    """

    task_key: str
    env_key: str
    group: int
    sample: int
    token_ids: np.ndarray
    action_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    spans: tuple[Span, ...]
    reward: float | None
    reward_reason: str
    outcome: Outcome
    final_answer: str | None = None
    routing: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    segment_starts: tuple[int, ...] = (0,)
    image_spans: tuple[ImageSpan, ...] = ()
    images: dict[str, Image] = field(default_factory=dict)
    stretches: list[tuple[str, float, float]] = field(default_factory=list)

    def segments(self) -> list[slice]:
        """Return the slice of each segment in the arrays."""
        return [slice(a, b) for a, b in pairwise((*self.segment_starts, len(self.token_ids)))]

    def ages(self, version: int) -> Iterator[tuple[Span, int]]:
        """Yield each span of sampled tokens, and the weight versions between its sampling and ``version``."""
        return ((span, version - span.weight_version) for span in self.spans if span.kind == "action")

    def check(self, images_kept: bool = True) -> None:
        """Raise ValueError when an invariant is broken; called where trajectories enter the trainer.

        Args:
            images_kept: ``images`` must hold every image; false for a trajectory read from a file, whose images are
                separate files.
        """
        n = len(self.token_ids)
        if not (len(self.action_mask) == len(self.behaviour_logprobs) == n):
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: array lengths differ")
        if self.routing is not None and len(self.routing) != n:
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: experts of {len(self.routing)} of {n} tokens")
        edges = [0] + [s.end for s in self.spans]
        if edges[-1] != n or any(s.start != e for s, e in zip(self.spans, edges, strict=False)):
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: spans do not cover the tokens")
        if np.any(self.behaviour_logprobs[~self.action_mask]):
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: log-probs on tokens that were not sampled")
        starts, prompts = self.segment_starts, {s.start for s in self.spans if s.kind == "prompt"}
        if starts[:1] != (0,) or any(a >= b for a, b in pairwise(starts)) or (n and not prompts.issuperset(starts)):
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: its segments do not begin with their prompts")
        if wrong := self._wrong_image(images_kept):
            raise ValueError(f"trajectory {self.task_key}#{self.sample}: {wrong}")

    def _wrong_image(self, kept: bool) -> str:
        """Describe the first invalid image span; empty when all are valid."""
        behind, ids = 0, self.token_ids
        for span in self.image_spans:
            start, end = span.start, span.end
            where = f"the image at [{start}, {end})"
            if not behind <= start < end <= len(ids) or any(start < edge < end for edge in self.segment_starts):
                return f"{where} is not behind the one before it, within one segment"
            if self.action_mask[start:end].any():
                return f"{where} stands where tokens were sampled"
            if (ids[start:end] != ids[self.image_spans[0].start]).any():
                return f"{where} is not a run of one placeholder"
            if kept and span.digest not in self.images:
                return f"{where} was not kept"
            behind = end
        return ""


@dataclass(slots=True)
class Group:
    """Trajectories of one task at one step, in order of ``sample``."""

    index: int
    task_key: str
    env_key: str
    trajectories: list[Trajectory]
