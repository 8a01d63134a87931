"""Weight sync from the trainer to the engines: colocation phases, resends to restarted engines, and the probe after.

Engines that play evaluations only take no part in the syncs. They get the weights of a step when its evaluation begins,
and the trainer's weights change only after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, final

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.schema import RolloutConfig, RunConfig
from megatron_fleet.evaluation.apart import Postponed
from megatron_fleet.loop.colocation import Colocation, SleepingEngines, open_colocation
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.platform.waiting import unless, until_done
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.trainer.base import Trainer, TrainerLost
from megatron_fleet.weight_sync.base import SingleReceiver, Transport, WeightReceiver

SEQUENCES, TOKENS = 4, 32


class Engines(WeightReceiver, Protocol):
    """The part of `rollout.engine_slot.EngineGroup` that is used."""

    def take_weights(self) -> bool: ...

    async def hand_on(self, others: WeightReceiver) -> bool: ...


class EngineService(SleepingEngines, Protocol):
    """The part of `rollout.service.RolloutService` that receives weights."""

    resend: Callable[[SingleReceiver, int], Awaitable[None]] | None
    eval_resend: Callable[[SingleReceiver, int], Awaitable[None]] | None

    @property
    def engines(self) -> Engines: ...

    @property
    def eval_engines(self) -> Engines: ...

    async def wait_ready(self) -> None: ...

    async def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]: ...

    async def statistics(self) -> dict[str, float]: ...


@final
class EngineWeights:
    """Switch between training and rollout: colocation phases, weight sync, and the comparison after an update."""

    def __init__(
        self,
        rollout: RolloutConfig,
        run: RunConfig,
        trainer: Trainer,
        engines: EngineService,
        transport: Transport,
    ) -> None:
        self._settings, self._run = rollout.engine, run
        self._trainer, self._engines, self._transport = trainer, engines, transport
        self._colocation: Colocation | None = None
        self._version: int | None = None  # of the trainer's weights; None while they change
        self._version_changed = asyncio.Condition()
        self._resending = asyncio.Lock()
        self._sending = asyncio.Lock()  # to the evaluation engines
        self._eval_lost = asyncio.Event()
        engines.resend, engines.eval_resend = self._resend, self._resend_for_evaluation

    @property
    def colocation(self) -> Colocation:
        assert self._colocation is not None, "start() comes first"
        return self._colocation

    async def start(self) -> None:
        """Start the trainer, after putting colocated engines to sleep.

        Raises:
            TrainerLost: it died during startup.
        """
        await self._begin(None)

    async def restart(self, reason: TrainerLost) -> None:
        """Restart the trainer.

        Raises:
            UserError: it died too often.
        """
        await self._begin(reason)

    async def _begin(self, reason: TrainerLost | None) -> None:
        async def start() -> None:
            with TIMELINE.phase("start_trainer"):
                await self._trainer.start(reason)

        if self._colocation is not None:
            await self._colocation.restart(start)
            return
        if self._settings.colocated and reason is None:
            # Engines measure how much memory they may allocate, so they must be alone on the devices at startup.
            await self._engines.wait_ready()
            await self._engines.sleep()
        await start()
        # It needs the sizes of the trainer's parts.
        self._colocation = await open_colocation(self._settings, self._run, self._trainer, self._engines)

    async def to_trainer(self) -> None:
        """Hand the devices to the trainer, whose weights are about to change; see `Colocation.to_trainer`.

        Waits for engines that are receiving the present weights: those of evaluations, and restarted ones.
        """
        with TIMELINE.phase("to_trainer"):
            await self.colocation.to_trainer()
            async with self._sending:
                await self._hold(None)
            async with self._resending:
                pass

    async def update(self, version: int) -> float | None:
        """Sync the current weights to the engines and let them serve.

        Returns:
            If a comparison is due, the largest mean difference of log-probs of a few tokens, in nats.

        Raises:
            RolloutFailed: an engine was given up, or differs too much.
        """
        engine = self._settings
        sync = partial(self._sync, version)
        if not engine.probe_interval or version % engine.probe_interval:
            await self.colocation.to_engines(sync)
            return None
        data = probe_data(self._trainer.info.vocab_size, self._trainer.info.max_tokens)
        with TIMELINE.phase("probe_trainer"):
            expected = await self._trainer.forward(data, temperature=1.0)  # before the trainer is offloaded
        await self.colocation.to_engines(sync)
        with TIMELINE.phase("probe_engines"):
            scores = await self._engines.score([datum.token_ids for datum in data])
        return compare(expected, scores, engine.probe_tolerance, version)

    def can_send_for_evaluation(self) -> bool:
        """Whether all evaluation engines can receive weights now; false while one is replaced.

        Raises:
            RolloutFailed: one was given up.
        """
        return self._engines.eval_engines.take_weights()

    async def send_for_evaluation(self, version: int) -> None:
        """Send the trainer's weights to the evaluation engines; once begun, it ends before a cancellation is raised.

        Raises:
            Postponed: the trainer's weights are not those of step ``version`` any more.
            RolloutFailed: an evaluation engine was given up, or the weights did not arrive.
        """
        sending = asyncio.create_task(self._send_for_evaluation(version))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if we are cancelled
        await until_done(sending)
        sending.result()

    async def lost_for_evaluation(self) -> None:
        """Wait until an evaluation engine was replaced whose weights the trainer does not have any more."""
        await self._eval_lost.wait()

    async def _send_for_evaluation(self, version: int) -> None:
        async with self._sending:
            if self._version != version:
                raise Postponed(f"the trainer has newer weights than those of step {version}")
            self._eval_lost.clear()
            try:
                # The engines are not waited for once one of them was lost and the trainer, too.
                await unless(self._give(self._engines.eval_engines, version), self._gone(version))
            except RuntimeError as error:
                raise RolloutFailed(str(error)) from error

    async def _gone(self, version: int) -> Postponed:
        await self._eval_lost.wait()
        return Postponed(f"the weights of step {version} are lost")

    async def _give(self, engines: WeightReceiver, version: int) -> None:
        """Send the trainer's weights, which the rollout's engines were given last, to evaluation engines. A lasting
        transport has them still, and keeps one version, which a second sync would take from the rollout's engines.
        """
        if not await self._engines.engines.hand_on(engines):
            await self._transport.sync(self._trainer, engines, version)

    async def probe(self) -> dict[str, list[list[float]]]:
        """Tokens of `probe_data` and the trainer's log-probs of them, JSON-able; the devices are the trainer's."""
        data = probe_data(self._trainer.info.vocab_size, self._trainer.info.max_tokens)
        scores = await self._trainer.forward(data, temperature=1.0)
        return {"tokens": [d.token_ids.tolist() for d in data], "logprobs": [score.tolist() for score in scores]}

    async def statistics(self) -> dict[str, float]:
        """Return metrics of the engines since the last call, and of the tokens that are billed."""
        counts, spending = await self._engines.statistics(), self._trainer.spending
        return counts if spending is None else counts | spending.record(counts)

    def memory(self) -> dict[str, float]:
        """Metrics, see `MemoryBudget.metrics`."""
        return self.colocation.memory()

    def read_seconds(self) -> dict[str, float]:
        return self.colocation.read_seconds()

    async def _sync(self, version: int) -> None:
        await self._hold(version)
        with TIMELINE.phase("send_weights"):
            await self._transport.sync(self._trainer, self._engines.engines, version)

    async def _hold(self, version: int | None) -> None:
        """Note which version the trainer's weights are from now on."""
        async with self._version_changed:
            self._version = version
            self._version_changed.notify_all()

    async def _resend(self, engine: SingleReceiver, version: int) -> None:
        """Send weight version ``version``, the last one synced, to a restarted engine.

        Waits while the trainer holds other weights or restarts. The next sync, which covers all engines, cancels this
        call unless the engine's update has begun.

        Raises:
            ConnectionError: the trainer was lost after the engine's update had begun.
        """
        while True:
            async with self._version_changed:
                await self._version_changed.wait_for(lambda: self._version == version)
            async with self._resending:
                if self._version != version:
                    continue
                try:
                    async with self.colocation.with_parameters():
                        return await self._transport.sync(self._trainer, engine, version)
                except TrainerLost as error:  # the training loop restarts it and then syncs all engines
                    await self._hold(None)
                    if engine.begun:
                        raise ConnectionError(f"the trainer was lost during the weight update: {error}") from error

    async def _resend_for_evaluation(self, engine: SingleReceiver, version: int) -> None:
        """Send weight version ``version`` to a restarted evaluation engine. If the trainer has other weights by now,
        the evaluation is lost, and the engine waits for the weights of the next one, whose sending cancels this call.

        Raises:
            ConnectionError: the trainer was lost after the engine's update had begun.
        """
        async with self._resending:
            if self._version == version:
                try:
                    await self._give(engine, version)
                    return
                except TrainerLost as error:
                    await self._hold(None)
                    if engine.begun:
                        raise ConnectionError(f"the trainer was lost during the weight update: {error}") from error
        self._eval_lost.set()
        await asyncio.Event().wait()


def probe_data(vocab: int, longest: int) -> list[Datum]:
    """Sequences of the probe, the same in every run; all positions except the first are scored.

    Args:
        vocab: size of the vocabulary.
        longest: most tokens of all sequences together.
    """
    rng = np.random.default_rng(0)
    length = min(TOKENS, longest // SEQUENCES)
    mask = np.arange(length) > 0
    zeros = np.zeros(length, np.float32)
    return [Datum(rng.integers(0, vocab, length).astype(np.int32), mask, zeros, zeros) for _ in range(SEQUENCES)]


def compare(
    expected: Sequence[np.ndarray], engines: Sequence[Sequence[np.ndarray]], tolerance: float, version: int
) -> float | None:
    """Return the largest mean absolute difference of log-probs over the engines, in nats.

    Args:
        expected: the trainer's log-probs, float32 ``[T]`` each.
        engines: each engine's log-probs of the same sequences.
        tolerance: largest mean that is allowed.

    Returns ``None`` without engines.

    Raises:
        RolloutFailed: the tolerance is exceeded, or a mean is not a number.
    """
    wanted = np.concatenate([x[1:] for x in expected])
    means = [float(np.abs(np.concatenate([x[1:] for x in found]) - wanted).mean()) for found in engines]
    for index, mean in enumerate(means):
        if not mean <= tolerance:
            raise RolloutFailed(
                f"engine {index} differs from the trainer after the update to version {version}: log-probs by "
                f"{mean:.3g} nats on average, rollout.engine.probe_tolerance={tolerance:g} allowed; raise it if the "
                f"engine computes in a lower precision, otherwise the update failed."
            )
    return max(means, default=None)
