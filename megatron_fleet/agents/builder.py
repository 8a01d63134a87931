"""Growing token sequences of one episode: pure state, no I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_fleet.agents.token_engine import Generation
from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import ImageSpan, PlacedImage, digest


class TrajectoryBuilder:
    """Collects prompts, actions and observations in order; ids are appended and never changed.

    Attributes:
        ids: token ids of the current segment, which form the engine's next prompt.
        images: images of the current segment, placed in ``ids``.
        turns: turns sampled so far.
        messages: the conversation as text, for records and verifiers.
        metrics: counters and seconds; the episode loop adds to them.
        stretches: what `timed` measured, see `Trajectory`.
        routed: number of leading tokens of the current segment whose experts are known; the next request asks for those
            after them.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.images: list[PlacedImage] = []
        self.turns = 0
        self.messages: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.stretches: list[tuple[str, float, float]] = []
        self.routed = 0
        self._before: list[int] = []
        self._starts: list[int] = []
        self._routing: list[tuple[int, np.ndarray]] = []
        self._spans: list[Span] = []
        self._actions: list[tuple[int, np.ndarray]] = []
        self._image_spans: list[ImageSpan] = []
        self._kept_images: dict[str, Image] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + amount

    def say(self, role: str, content: str, images: Sequence[Image] = ()) -> None:
        """Record one message as text; ``images`` are kept and referenced by their digests."""
        self.messages.append({"role": role, "content": content})
        if images:
            self.messages[-1]["images"] = names = [digest(image) for image in images]
            self._kept_images |= zip(names, images, strict=True)
            self.count("images", len(images))

    def begin(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Begin a segment with a rendered prompt: the episode's first, or one after the history was rewritten."""
        self._before += self.ids
        self._starts.append(len(self._before))
        self.ids, self.images, self.routed = [], [], 0
        self._append("prompt", ids, self.turns, images)

    def add_observation(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Append what the policy is shown after a turn, as part of that turn. ``images``: placed in the segment."""
        self._append("observation", ids, self.turns - 1, images)

    def add_action(self, generation: Generation) -> None:
        """Append one sampled turn, requested with ``routing_start`` = ``routed`` or without.

        Raises:
            ValueError: its log-probs or versions do not cover its tokens, or it reports experts of tokens that were
                never an input.
        """
        n, start = len(generation.token_ids), len(self._before) + len(self.ids)
        edges = [0, *(end for _, _, end in generation.versions)]
        starts = [s for _, s, _ in generation.versions]
        if len(generation.logprobs) != n or edges[-1] != n or starts != edges[:-1]:
            raise ValueError(f"the engine's log-probs or weight versions do not cover its {n} tokens")
        if generation.interruptions:
            self.count("interruptions", generation.interruptions)
            self.count("recomputed_tokens", generation.recomputed)
        if generation.routing is not None:
            self._add_routing(generation.routing, fed=len(self.ids) + n - 1)
        self._actions.append((start, generation.logprobs))
        for version, a, b in generation.versions:
            if a < b:
                self._spans.append(Span("action", start + a, start + b, self.turns, version))
        self.ids.extend(generation.token_ids.tolist())
        self.turns += 1

    def build(
        self,
        task: Task,
        outcome: Outcome,
        reward: float | None,
        reason: str,
        final_answer: str | None,
    ) -> Trajectory:
        """Build the finished trajectory, not numbered yet; array layout as in ``Trajectory``."""
        ids = self._before + self.ids
        mask = np.zeros(len(ids), bool)
        logprobs = np.zeros(len(ids), np.float32)
        for start, values in self._actions:
            mask[start : start + len(values)] = True
            logprobs[start : start + len(values)] = values
        self.metrics |= {"turns": self.turns, "action_tokens": int(mask.sum()), "total_tokens": len(ids)}
        self.metrics["segments"] = len(self._starts)
        if self._image_spans:
            self.metrics["image_tokens"] = sum(span.end - span.start for span in self._image_spans)
        return Trajectory(
            task_key=task.key,
            env_key=task.env_key,
            group=-1,
            sample=-1,
            token_ids=np.array(ids, np.int32),
            action_mask=mask,
            behaviour_logprobs=logprobs,
            spans=tuple(self._spans),
            reward=reward,
            reward_reason=reason,
            outcome=outcome,
            final_answer=final_answer,
            routing=self._all_routing(len(ids)),
            metrics=self.metrics,
            messages=self.messages,
            segment_starts=tuple(self._starts) or (0,),
            image_spans=tuple(self._image_spans),
            images=self._kept_images,
            stretches=self.stretches,
        )

    def _add_routing(self, routing: np.ndarray, fed: int) -> None:
        self._routing.append((len(self._before) + self.routed, routing))
        self.routed += len(routing)
        if self.routed > fed:
            raise ValueError(f"the engine reports experts of {self.routed} tokens, but only {fed} were fed")

    def _all_routing(self, total: int) -> np.ndarray | None:
        if not self._routing:
            return None
        _, some = self._routing[0]
        routing = np.zeros((total, *some.shape[1:]), some.dtype)
        for start, reported in self._routing:
            routing[start : start + len(reported)] = reported
        return routing

    def _append(self, kind: str, ids: Sequence[int], turn: int, images: Sequence[PlacedImage]) -> None:
        if ids:
            start = len(self._before) + len(self.ids)
            self.ids.extend(ids)
            self._spans.append(Span(kind, start, start + len(ids), turn))
        before = len(self._before)
        self.images += images
        self._image_spans += [ImageSpan(before + i.start, before + i.end, i.digest) for i in images]


@contextmanager
def timed(builder: TrajectoryBuilder, name: str) -> Iterator[None]:
    """Add the elapsed seconds to the metric ``<name>_s``, and note when they were."""
    at, began = time.time(), time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        builder.count(f"{name}_s", seconds)
        builder.stretches.append((name, at, seconds))
