"""The growing token sequence of one episode: pure state, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fleet.agents.engine import Generation
from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.data.task import Task


class TrajectoryBuilder:
    """Collects prompt, actions and observations in order; ids are appended and never changed.

    Attributes:
        ids: all token ids so far.
        messages: the conversation as text, for records and verifiers.
        metrics: counters and seconds; the loop adds to them.
        routed: tokens from the start whose experts are known; the next request asks for those behind them.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.routed = 0
        self._routing: list[np.ndarray] = []
        self._spans: list[Span] = []
        self._actions: list[tuple[int, np.ndarray]] = []
        self._turn = 0

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + amount

    def say(self, role: str, content: str) -> None:
        """Record one message as text."""
        self.messages.append({"role": role, "content": content})

    def add_prompt(self, ids: Sequence[int]) -> None:
        """The first prompt."""
        self._append("prompt", ids, 0)

    def add_observation(self, ids: Sequence[int]) -> None:
        """What the policy is shown after a turn; counted to that turn."""
        self._append("observation", ids, self._turn - 1)

    def add_action(self, generation: Generation) -> None:
        """One sampled turn, asked for with ``routing_start`` = ``routed`` or without.

        Raises:
            ValueError: its log-probs or versions do not cover its tokens, or it tells experts of tokens that were no
                input.
        """
        n, start = len(generation.token_ids), len(self.ids)
        edges = [0, *(end for _, _, end in generation.versions)]
        starts = [s for _, s, _ in generation.versions]
        if len(generation.logprobs) != n or edges[-1] != n or starts != edges[:-1]:
            raise ValueError(f"the engine's log-probs or weight versions do not cover its {n} tokens")
        if generation.routing is not None:
            self.routed += len(generation.routing)
            if self.routed >= start + n:
                raise ValueError(f"the engine tells experts of {self.routed} tokens, but only {start + n - 1} were fed")
            self._routing.append(generation.routing)
        self._actions.append((start, generation.logprobs))
        for version, a, b in generation.versions:
            if a < b:
                self._spans.append(Span("action", start + a, start + b, self._turn, version))
        self.ids.extend(generation.token_ids.tolist())
        self._turn += 1

    def build(
        self,
        task: Task,
        group: int,
        sample: int,
        outcome: Outcome,
        reward: float | None,
        reason: str,
        final_answer: str | None,
    ) -> Trajectory:
        """The finished trajectory; array layout as in ``Trajectory``."""
        total = len(self.ids)
        mask = np.zeros(total, bool)
        logprobs = np.zeros(total, np.float32)
        for start, values in self._actions:
            mask[start : start + len(values)] = True
            logprobs[start : start + len(values)] = values
        self.metrics |= {"turns": self._turn, "action_tokens": int(mask.sum()), "total_tokens": total}
        return Trajectory(
            task_key=task.key,
            env_key=task.env_key,
            group=group,
            sample=sample,
            token_ids=np.array(self.ids, np.int32),
            action_mask=mask,
            behaviour_logprobs=logprobs,
            spans=tuple(self._spans),
            reward=reward,
            reward_reason=reason,
            outcome=outcome,
            final_answer=final_answer,
            routing=self._all_routing(total),
            metrics=self.metrics,
            messages=self.messages,
        )

    def _all_routing(self, total: int) -> np.ndarray | None:
        if not self._routing:
            return None
        told = np.concatenate(self._routing)
        return np.concatenate([told, np.zeros((total - len(told), *told.shape[1:]), told.dtype)])

    def _append(self, kind: str, ids: Sequence[int], turn: int) -> None:
        if ids:
            start = len(self.ids)
            self.ids.extend(ids)
            self._spans.append(Span(kind, start, len(self.ids), turn))
