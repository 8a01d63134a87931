"""A rollout in memory: plays episodes at once with a policy of one softmax, and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatron_fleet.agents.settings import stable_seed
from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.rollout.requests import Accounting, CollectRequest, CollectResult
from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender

TOKENS = 6
GOOD = 7
"""Episodes are rewarded for the share of this token among those that they sampled."""


class FakeEngines:
    """All engines; they sample from the logits that they were sent last."""

    def __init__(self, vocab_size: int, calls: list[str]) -> None:
        self.weights, self.version, self.calls = np.zeros(vocab_size), 0, calls

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        self.calls.append("open_transport")

    async def begin_update(self) -> None:
        self.calls.append("begin_update")
        await asyncio.sleep(0)

    async def load(self, message: Mapping[str, Any]) -> None:
        self.weights = np.array(message["weights"])

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        self.calls.append(f"finish_update {version}")
        await asyncio.sleep(0)
        self.version = version

    def take_weights(self) -> bool:
        return True

    async def hand_on(self, others: WeightReceiver) -> bool:
        return False


class FakeRollout:
    """The whole of what the loop uses of `rollout.service.RolloutService`.

    Attributes:
        eval_calls: those of the evaluation engines, which are not in order with the loop's.
        unknown: plays of a whole training step, by number from 0, in which no reward is known.
        fate: outcome of their episodes.
        outages: what `environment_available` answers, one after the other; then it is available.
        delays: seconds that a request takes, by step; none by default.
        delay_of: the same, of a request; it takes the place of ``delays``.
        requests: all that was asked for.
    """

    resend: Callable[[WeightReceiver, int], Awaitable[None]] | None = None
    eval_resend: Callable[[WeightReceiver, int], Awaitable[None]] | None = None

    def __init__(self, vocab_size: int = 512, calls: list[str] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.engines = FakeEngines(vocab_size, self.calls)
        self.eval_calls: list[str] = []
        self.eval_engines = FakeEngines(vocab_size, self.eval_calls)
        self.unknown: set[int] = set()
        self.fate = Outcome.ENV_FAILED
        self.outages: list[str] = []
        self.delays: dict[int, float] = {}
        self.delay_of: Callable[[CollectRequest], float] = lambda request: self.delays.get(request.step, 0.0)
        self.requests: list[CollectRequest] = []
        self.under_way = 0
        self._plays = self._generated = 0

    async def wait_ready(self) -> None:
        self.calls.append("wait_ready")
        await asyncio.sleep(0)

    async def collect(
        self,
        request: CollectRequest,
        on_episode: Callable[[Trajectory], None] | None = None,
        stop: asyncio.Event | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> CollectResult:
        if on_start is not None:
            on_start()
        if request.engines == "eval":
            self.eval_calls.append(f"collect {self.eval_engines.version}")
        elif request.first == 0:  # of the groups of a step, which are requested together, the first one stands for all
            self.calls.append(f"collect {request.purpose} {request.step}")
            self._plays += request.purpose == "train"
        self.requests.append(request)
        known = request.purpose == "eval" or self._plays - 1 not in self.unknown
        engines = self.engines if request.engines == "rollout" else self.eval_engines
        weights, version = engines.weights, engines.version
        self.under_way += 1
        try:
            stopped = await self._stopped(self.delay_of(request), stop)
        finally:
            self.under_way -= 1
        groups = []
        for index, task in enumerate(request.tasks, request.first):
            episodes = [
                request.played.get((index, sample))
                or self._episode(request, index, sample, weights, version, known and not stopped)
                for sample in range(request.samples)
            ]
            groups.append(Group(index, task.key, task.env_key, episodes))
        new = [t for group in groups for t in group.trajectories if (t.group, t.sample) not in request.played]
        self._generated += len(new) * TOKENS
        for trajectory in new:
            if stopped:
                trajectory.outcome = Outcome.ABORTED
            if on_episode is not None:
                on_episode(trajectory)
        reached = sum(t.reward is not None for t in new)
        return CollectResult(groups, Accounting(started=len(new), known=reached, unknown=len(new) - reached), 0.0)

    async def _stopped(self, seconds: float, stop: asyncio.Event | None) -> bool:
        """Wait; returns whether it was stopped."""
        if stop is None or seconds == 0:
            await asyncio.sleep(seconds)
            return False
        try:
            async with asyncio.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            return False
        return True

    def _episode(
        self, request: CollectRequest, group: int, sample: int, weights: np.ndarray, version: int, known: bool
    ) -> Trajectory:
        task = request.tasks[group - request.first]
        rng = np.random.default_rng(stable_seed(request.seed or 0, request.step, task.key, sample, 0))
        chances = np.exp(weights - weights.max())
        chances /= chances.sum()
        tokens = rng.choice(len(weights), TOKENS, p=chances).astype(np.int32)
        ids = np.concatenate([np.array([1, 2], np.int32), tokens])
        mask = np.arange(len(ids)) >= 2
        logprobs = np.where(mask, np.log(chances[ids]), 0).astype(np.float32)
        reward = float((tokens % 8 == GOOD).mean()) if known else None
        return Trajectory(
            task_key=task.key,
            env_key=task.env_key,
            group=group,
            sample=sample,
            token_ids=ids,
            action_mask=mask,
            behaviour_logprobs=logprobs,
            spans=(Span("prompt", 0, 2, 0), Span("action", 2, len(ids), 0, version)),
            reward=reward,
            reward_reason="counted" if known else "the server is gone",
            outcome=Outcome.COMPLETED if known else self.fate,
            metrics={"attempts_retried": 0},
        )

    async def environment_available(self) -> str | None:
        self.calls.append("environment_available")
        await asyncio.sleep(0)
        return self.outages.pop(0) if self.outages else None

    async def statistics(self) -> dict[str, float]:
        await asyncio.sleep(0)
        generated, self._generated = self._generated, 0
        return {"engine/generated_tokens": generated}

    async def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        await asyncio.sleep(0)
        shifted = self.engines.weights - self.engines.weights.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        scores = [logprobs[ids].astype(np.float32) for ids in sequences]
        for score in scores:
            score[0] = 0
        return [scores]

    async def sleep(self) -> str | None:
        self.calls.append("sleep")
        await asyncio.sleep(0)
        return None

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self.calls.append(f"wake {part}")
        await asyncio.sleep(0)


class FakeTransport:
    """Hands the weights over as they are."""

    name, lasting = "fake", False

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        await engines.begin_update()
        await trainer.send_weights(version, {}, engines.load)
        await engines.finish_update(version, None)

    def close(self) -> None:
        pass
