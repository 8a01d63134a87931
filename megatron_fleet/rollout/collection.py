"""Collection: bookkeeping of a request's episodes still to be played. No Ray, no tasks, no clock."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory, will_recur
from megatron_fleet.rollout.requests import Accounting, CollectRequest, CollectResult, EpisodeSpec

MAX_LOSSES = 3
"""An episode that is lost with a component this often is given up, because it may be the cause. Must not exceed the
restart limit of a component."""

OnEpisode = Callable[[Trajectory], None]


class Collection:
    """Hand out specs (``take``) and collect their outcomes (``ended``, ``lost``) until ``done``.

    After ``stop`` nothing is handed out, and every outcome is kept as it is.
    """

    def __init__(
        self, request: CollectRequest, max_retries: int, number: int = 0, on_episode: OnEpisode | None = None
    ) -> None:
        """
        Args:
            number: `EpisodeSpec.collection`.
            on_episode: called with each trajectory that becomes part of the result.
        """
        self.number = number
        self._on_episode = on_episode
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
        self.accounting = Accounting()

    @property
    def done(self) -> bool:
        return len(self._kept) == self._total

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    @property
    def waiting(self) -> int:
        """Number of episodes to play that have not been taken."""
        return len(self._waiting)

    def take(self, most: int) -> list[EpisodeSpec]:
        """Take up to ``most`` episodes to play now; empty when all are running or finished."""
        specs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self.accounting.started += len(specs)
        return specs

    def ended(self, spec: EpisodeSpec, trajectory: Trajectory) -> None:
        """Record a finished attempt. An aborted one was lost with its engine; any other unknown reward is retried,
        unless a retry would change nothing."""
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
        """Record an attempt that was lost with a component. It is issued again, unless it was lost too often."""
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
        """Give up the episodes that were not taken, as ``aborted`` for ``reason``; running ones are kept when they
        return."""
        self._stopped = reason
        while self._waiting:
            spec = self._waiting.popleft()
            self.accounting.unstarted += 1
            self._keep((spec.group, spec.sample), _given_up(spec, reason))

    def result(self, seconds: float) -> CollectResult:
        """Return all trajectories in order. Raises RuntimeError when the counts do not add up."""
        self.accounting.check(wanted=self._total - len(self._request.played))
        samples = range(self._request.samples)
        groups = [
            Group(index, task.key, task.env_key, [self._kept[index, sample] for sample in samples])
            for index, task in enumerate(self._request.tasks, self._request.first)
        ]
        return CollectResult(groups, self.accounting, seconds)

    def _worth_a_retry(self, key: tuple[int, int], trajectory: Trajectory) -> bool:
        hopeless = will_recur(trajectory.outcome)
        return trajectory.reward is None and not hopeless and self._retries.get(key, 0) < self._max_retries

    def _keep(self, key: tuple[int, int], trajectory: Trajectory) -> None:
        self._kept[key] = trajectory
        trajectory.metrics["attempts_retried"] = self._retries.get(key, 0)
        if trajectory.reward is None:
            self.accounting.unknown += 1
        else:
            self.accounting.known += 1
        if self._on_episode is not None:
            self._on_episode(trajectory)

    def _again(self, spec: EpisodeSpec) -> None:
        self._waiting.append(replace(spec, attempt=spec.attempt + 1))

    def _spec(self, group: int, sample: int) -> EpisodeSpec:
        request = self._request
        return EpisodeSpec(
            task=request.tasks[group - request.first],
            group=group,
            sample=sample,
            step=request.step,
            temperature=request.temperature,
            seed=self._seed(group),
            trained=request.purpose == "train",
            collection=self.number,
            engines=request.engines,
        )

    def _seed(self, group: int) -> int | None:
        """Return a 31-bit seed of purpose and group, which the worker does not know; it mixes in step, task and sample.
        The group is needed because a step may contain the same task twice."""
        request = self._request
        if request.seed is None:
            return None
        place = f"{request.seed}/{request.purpose}/{group}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest(), "little") >> 1


def issue_order(request: CollectRequest) -> list[tuple[int, int]]:
    """Return ``(group, sample)`` of every episode, in the order in which they are started."""
    samples, groups = range(request.samples), enumerate(request.tasks, request.first)
    if request.purpose == "train":
        return [(group, sample) for group, _ in groups for sample in samples]
    turns: list[tuple[int, str, int]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for group, task in groups:
        turns.append((seen[task.env_key], task.env_key, group))
        seen[task.env_key] += 1
    return [(group, sample) for sample in samples for _, _, group in sorted(turns)]


def _given_up(spec: EpisodeSpec, reason: str) -> Trajectory:
    """Return the empty trajectory of an episode that was not finished."""
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
