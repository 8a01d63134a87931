"""Collection: which episodes of a request are still to be played. Pure bookkeeping: no Ray, no tasks, no clock."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.rollout.accounting import Accounting
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, EpisodeSpec, Progress

MAX_LOSSES = 3
"""An episode that went down with a component this often is given up: it may be what kills them. Not more often than a
component is restarted."""


class Collection:
    """Hands out specs (``take``), takes back what became of them (``ended``, ``lost``), ends when ``done``.

    After ``stop`` nothing is handed out, and whatever comes back is kept as it is.
    """

    def __init__(self, request: CollectRequest, max_retries: int, number: int = 0):
        """Args: ``number``: `EpisodeSpec.collection`."""
        self.number = number
        self._request = request
        self._max_retries = max_retries
        self._stopped: str | None = None
        order = issue_order(request)
        self._waiting = deque(self._spec(*key) for key in order if key not in request.played)
        self._total = len(order)
        self._kept: dict[tuple[int, int], Trajectory] = {
            key: request.played[key] for key in order if key in request.played
        }
        self._losses: dict[tuple[int, int], int] = {}
        self._retries: dict[tuple[int, int], int] = {}
        self._tokens = 0
        self.accounting = Accounting()

    @property
    def done(self) -> bool:
        return len(self._kept) == self._total

    @property
    def waiting(self) -> int:
        """Episodes to be played that nobody has taken."""
        return len(self._waiting)

    def progress(self) -> Progress:
        return Progress(len(self._kept), self._total, self._tokens)

    def kept(self, since: int) -> list[Trajectory]:
        """What has come back, in that order, without the first ``since``; what was there before is left out."""
        return list(self._kept.values())[len(self._request.played) + since :]

    def take(self, most: int) -> list[EpisodeSpec]:
        """Up to ``most`` episodes to play now; empty when all are under way or over."""
        specs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self.accounting.started += len(specs)
        return specs

    def ended(self, spec: EpisodeSpec, trajectory: Trajectory) -> None:
        """One attempt is over. An aborted one went down with its engine; another unknown reward is worth a retry,
        unless the prompt is too long, which it would be again."""
        key = (spec.group, spec.sample)
        if trajectory.outcome is Outcome.ABORTED:
            self.lost(spec, trajectory)
        elif self._stopped is not None:
            self._keep(key, trajectory)
        elif self._worth_a_retry(key, trajectory):
            self._retries[key] = self._retries.get(key, 0) + 1
            self.accounting.retried += 1
            self._again(spec)
        else:
            self._keep(key, trajectory)

    def lost(self, spec: EpisodeSpec, trajectory: Trajectory | None = None) -> None:
        """One attempt went down with a component. It is issued again, unless that happened too often."""
        key = (spec.group, spec.sample)
        if self._stopped is not None:
            self._keep(key, _given_up(spec, self._stopped))
            return
        self._losses[key] = self._losses.get(key, 0) + 1
        if self._losses[key] >= MAX_LOSSES:
            reason = f"its worker or engine died {MAX_LOSSES} times while it was played"
            self._keep(key, trajectory or _given_up(spec, reason))
        else:
            self.accounting.aborted += 1
            self._again(spec)

    def stop(self, reason: str) -> None:
        """Give up what nobody has taken; what is under way is kept when it comes back, ``aborted`` for ``reason``."""
        self._stopped = reason
        while self._waiting:
            spec = self._waiting.popleft()
            self.accounting.unstarted += 1
            self._keep((spec.group, spec.sample), _given_up(spec, reason))

    def result(self, seconds: float) -> CollectResult:
        """Everything in order. Raises RuntimeError when the counts do not add up."""
        self.accounting.check(wanted=self._total - len(self._request.played))
        samples = range(self._request.samples)
        groups = [
            Group(index, task.key, task.env_key, [self._kept[index, sample] for sample in samples])
            for index, task in enumerate(self._request.tasks)
        ]
        return CollectResult(groups, self.accounting, seconds)

    def _worth_a_retry(self, key: tuple[int, int], trajectory: Trajectory) -> bool:
        hopeless = trajectory.outcome is Outcome.PROMPT_TOO_LONG
        return trajectory.reward is None and not hopeless and self._retries.get(key, 0) < self._max_retries

    def _keep(self, key: tuple[int, int], trajectory: Trajectory) -> None:
        self._kept[key] = trajectory
        trajectory.metrics["attempts_retried"] = self._retries.get(key, 0)
        self._tokens += int(trajectory.action_mask.sum())
        if trajectory.reward is None:
            self.accounting.unknown += 1
        else:
            self.accounting.known += 1

    def _again(self, spec: EpisodeSpec) -> None:
        self._waiting.append(replace(spec, attempt=spec.attempt + 1))

    def _spec(self, group: int, sample: int) -> EpisodeSpec:
        request = self._request
        return EpisodeSpec(
            task=request.tasks[group],
            group=group,
            sample=sample,
            step=request.step,
            temperature=request.temperature,
            seed=self._seed(group),
            trained=request.purpose == "train",
            collection=self.number,
        )

    def _seed(self, group: int) -> int | None:
        """31 bits. The worker mixes in step, task and sample; purpose and group it does not know, and the same
        task may be asked for twice in a step."""
        request = self._request
        if request.seed is None:
            return None
        place = f"{request.seed}/{request.purpose}/{group}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest(), "little") >> 1


def issue_order(request: CollectRequest) -> list[tuple[int, int]]:
    """``(group, sample)`` of every episode, in the order in which they are begun."""
    samples = range(request.samples)
    if request.purpose == "train":
        return [(group, sample) for group in range(len(request.tasks)) for sample in samples]
    turns: list[tuple[int, str, int]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for group, task in enumerate(request.tasks):
        turns.append((seen[task.env_key], task.env_key, group))
        seen[task.env_key] += 1
    return [(group, sample) for sample in samples for _, _, group in sorted(turns)]


def _given_up(spec: EpisodeSpec, reason: str) -> Trajectory:
    """What is left of an episode that nobody finished: nothing but its name."""
    return Trajectory(
        task_key=spec.task.key,
        env_key=spec.task.env_key,
        group=spec.group,
        sample=spec.sample,
        token_ids=np.zeros(0, np.int32),
        action_mask=np.zeros(0, bool),
        behaviour_logprobs=np.zeros(0, np.float32),
        spans=(),
        reward=None,
        reward_reason=reason,
        outcome=Outcome.ABORTED,
    )
