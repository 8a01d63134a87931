"""The driver: rank 0's half of a run. It owns the rollout, the order of tasks and everything that is written down."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from megatron_fleet.algorithms.batch import Batch, build_data, split_batch
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.loader import load_tasks
from megatron_fleet.data.sampler import PromptSampler
from megatron_fleet.data.split import split
from megatron_fleet.data.task import Task
from megatron_fleet.policy.base import LossReport, OptimReport, Rows
from megatron_fleet.policy.flops import SequenceCost
from megatron_fleet.policy.layout import row_alignment, sequence_alignment
from megatron_fleet.policy.pack_plan import Plan, plan_rows
from megatron_fleet.probe import compare
from megatron_fleet.records import Records
from megatron_fleet.rollout.requests import CollectRequest, CollectResult
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.telemetry.metrics import attempt_metrics, eval_metrics, step_metrics
from megatron_fleet.weights.hf_config import read_model
from megatron_fleet.weights.hf_folder import read_config

EVAL_SEED_STEP = 0
"""Evaluations share their sampling seeds, so that two of them differ by the weights alone."""


@final
class Driver:
    """Collects work for the ranks and keeps the books. Exists on rank 0 only."""

    def __init__(self, config: Config, train: Sequence[Task], held_out: Sequence[Task], rollout: RolloutService):
        self._config = config
        self._held_out = list(held_out)[: config.eval.tasks]
        self._sampler = PromptSampler(train, config.rollout.prompts_per_step, config.run.seed)
        self._rollout: CollectResult | None = None
        self._batch: Batch | None = None
        self._records: Records | None = None
        self._probes: dict[int, float] = {}
        self._cost = SequenceCost.of(read_model(read_config(config.model.path)))
        self.rollout = rollout

    def begin(self, state: Mapping[str, Any] | None, started: float) -> None:
        """Open the records, from ``state`` of a checkpoint or anew; wait until episodes can be played."""
        if state is not None:
            self._sampler.load_state_dict(state["sampler"])
        step = None if state is None else int(state["step"])
        self._records = Records(self._config, resumed_step=step, started=started)
        with self._records.phase("starting"):
            self.rollout.wait_ready()

    @property
    def records(self) -> Records:
        assert self._records is not None, "begin() comes first"
        return self._records

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` steps must hold besides the policy; JSON-able."""
        return {"step": step, "sampler": self._sampler.state_dict()}

    def collect(self, step: int, data_ranks: Sequence[int]) -> list[list[Rows]]:
        """Play the next prompts and plan the updates.

        Args:
            data_ranks: data-parallel rank of each rank.

        Returns:
            For each rank the rows of each optimizer step; no steps at all when no group carried a signal.
        """
        sampling = self._config.rollout.sampling
        samples = self._config.rollout.samples_per_prompt
        self._rollout = self._play(step, self._sampler.next(), samples, sampling.temperature, "train")
        algorithm = self._config.algorithm
        self._batch = build_data(self._rollout.groups, algorithm)
        updates = []
        for data in split_batch(self._batch, self._config.policy.updates_per_batch, algorithm):
            plan = self._plan(data, max(data_ranks) + 1)
            updates.append([[[data[i] for i in row] for row in rows] for rows in plan])
        self.records.show("training")
        return [[update[rank] for update in updates] for rank in data_ranks]

    def _plan(self, data: Sequence[Datum], dp: int) -> Plan:
        lengths = [len(datum) for datum in data]
        trained = [int(np.count_nonzero(datum.mask)) for datum in data]
        parallel, capacity = self._config.parallel, self._config.policy.row_tokens
        align, row_align = sequence_alignment(parallel), row_alignment(parallel, self._config.precision)
        return plan_rows(lengths, dp, capacity, self._cost(lengths, trained), align, row_align)

    def finish_step(
        self,
        step: int,
        reports: Sequence[tuple[LossReport, OptimReport]],
        seconds: Mapping[str, float],
        memory: Mapping[str, float],
        evaluate: bool,
    ) -> None:
        """Write down what step number ``step`` (from 1) did, after evaluating the new weights if asked to."""
        assert self._batch is not None and self._rollout is not None, "collect() comes first"
        groups = self._rollout.groups
        losses, optims = [r[0] for r in reports], [r[1] for r in reports]
        seconds = {"generate": self._rollout.seconds, **seconds}
        metrics = step_metrics(groups, self._batch, losses, optims, seconds, step, self._probes.pop(step, None))
        metrics |= {**attempt_metrics(asdict(self._rollout.accounting), "accounting"), **memory}
        self.records.trajectories(step, groups, "step")
        if evaluate:
            metrics |= self._evaluate(step)
        self.records.step(step, metrics)

    def check_engines(self, version: int, data: Sequence[Datum], expected: Sequence[np.ndarray]) -> None:
        """Compare every engine with the trainer's log-probs of ``data``, see `probe.compare`."""
        scores = self.rollout.score([datum.token_ids for datum in data])
        tolerance = self._config.rollout.engine.probe_tolerance
        self._probes[version] = compare(expected, scores, tolerance, version)

    def evaluate_before(self) -> None:
        """Evaluate the initial weights; recorded as step 0."""
        self.records.evaluation(0, self._evaluate(0))

    def finish(self) -> None:
        """Summary and learning curve."""
        self.records.finish()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _evaluate(self, step: int) -> dict[str, float]:
        config = self._config.eval
        started = time.monotonic()
        temperature = self._config.rollout.sampling.temperature
        sampled = self._play(EVAL_SEED_STEP, self._held_out, config.samples, temperature, "eval")
        self.records.trajectories(step, sampled.groups, "eval")
        accounting, greedy = sampled.accounting, []
        if config.greedy:
            result = self._play(EVAL_SEED_STEP, self._held_out, 1, 0.0, "eval")
            self.records.trajectories(step, result.groups, "greedy")
            accounting, greedy = accounting + result.accounting, result.groups
        return {
            **eval_metrics(sampled.groups, greedy),
            **attempt_metrics(asdict(accounting), "eval/all"),
            "timing/eval": time.monotonic() - started,
        }

    def _play(
        self, step: int, tasks: Sequence[Task], samples: int, temperature: float, purpose: Literal["train", "eval"]
    ) -> CollectResult:
        run = self._config.run
        request = CollectRequest(
            step=step,
            tasks=list(tasks),
            samples=samples,
            temperature=temperature,
            purpose=purpose,
            seed=run.seed if run.deterministic else None,
        )
        name = "rollout" if purpose == "train" else "evaluation"
        with self.records.phase(name, len(tasks) * samples) as advance:
            return self.rollout.collect(request, on_progress=lambda now: advance(now.done))


@contextmanager
def open_driver(config: Config) -> Iterator[Driver | None]:
    """The driver on rank 0, ``None`` elsewhere. Input is checked before anything starts; leaving stops everything."""
    if int(os.environ.get("RANK", "0")) != 0:
        yield None
        return
    train, held_out = load_data(config)
    with ExitStack() as stack:
        rollout = stack.enter_context(RolloutService(config, Path(config.run.out), episode_python()))
        driver = Driver(config, train, held_out, rollout)
        stack.callback(driver.close)
        yield driver


def load_data(config: Config) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks.

    Raises:
        UserError: the file is malformed, or one of the two sets is too small for the configuration.
    """
    train, held_out = split(read_tasks(config.data.tasks), config.data.eval_fraction)
    for name, tasks, least in (
        ("training", train, config.rollout.prompts_per_step),
        ("held-out", held_out, 1),
    ):
        if len(tasks) < least:
            raise UserError(
                f"data.tasks={config.data.tasks}: only {len(tasks)} {name} tasks with "
                f"data.eval_fraction={config.data.eval_fraction:g}, at least {least} are needed; use more tasks."
            )
    return train, held_out


def read_tasks(source: str) -> list[Task]:
    """Tasks of a file, or the embedded fleet's own for ``embedded``."""
    if source != "embedded":
        return load_tasks(source)
    from megatron_fleet.envs.embedded.tasks import SHIPPED_TASKS

    return load_tasks(SHIPPED_TASKS)


def episode_python() -> Path:
    """The interpreter of the episode environment, which set-up puts beside that of the engine environment.

    Raises:
        UserError: it is not there.
    """
    python = Path(sys.prefix).parent / "episode" / "bin" / "python"
    if not python.exists():
        raise UserError(f"{python}: the episode environment is missing; run ./setup.sh.")
    return python
