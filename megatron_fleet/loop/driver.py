"""The driver: rank 0's half of a run. It owns the rollout, the order of tasks and everything that is written down."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np

from megatron_fleet.agents.tokenizer import Tokenizer
from megatron_fleet.algorithms.advantages import is_known
from megatron_fleet.algorithms.batch import Batch, build_data, split_batch
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import run_dataset, save_manifest
from megatron_fleet.data.mixture import check_mixture
from megatron_fleet.data.sampler import make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.evaluator import Evaluator
from megatron_fleet.loop.probe import compare
from megatron_fleet.loop.records import Records
from megatron_fleet.rollout.requests import CollectRequest, CollectResult
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.telemetry.distributions import distributions
from megatron_fleet.telemetry.episodes import why_nothing_is_known
from megatron_fleet.telemetry.metrics import attempt_metrics, data_metrics, progress_metrics, step_metrics
from megatron_fleet.telemetry.prompt_log import PromptLog
from megatron_fleet.trainer.base import LossReport, OptimReport, Rows
from megatron_fleet.trainer.layout import row_alignment, sequence_alignment
from megatron_fleet.trainer.packing.flops import SequenceCost
from megatron_fleet.trainer.packing.pack_plan import Plan, plan_rows
from megatron_fleet.weights.hf_config import read_model
from megatron_fleet.weights.hf_folder import read_config

log = logging.getLogger(__name__)


@final
class Driver:
    """Collects work for the ranks and keeps the books. Exists on rank 0 only."""

    def __init__(self, config: Config, train: Sequence[Task], held_out: Sequence[Task], rollout: RolloutService):
        self._config = config
        self._evaluator = Evaluator(config, held_out, rollout.collect)
        self._unevaluated: int | None = None
        self._evaluating: int | None = None
        self._training_tasks = len(train)
        self._planning: dict[str, float] = {}
        self._sampler = make_sampler(train, config.rollout.prompts_per_step, config.run.seed, config.data.mixture)
        self._rollout: CollectResult | None = None
        self._batch: Batch | None = None
        self._records: Records | None = None
        self._probes: dict[int, float] = {}
        self._prompts = PromptLog(Path(config.run.out) / "prompts", Tokenizer(config.model.path).decode)
        self._cost = SequenceCost.of(read_model(read_config(config.model.path)))
        self.rollout = rollout

    def begin(self, state: Mapping[str, Any] | None, started: float) -> None:
        """Open the records, from ``state`` of a checkpoint or anew; wait until episodes can be played."""
        if state is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._unevaluated = state.get("unevaluated")
        step = None if state is None else int(state["step"])
        self._records = Records(self._config, resumed_step=step, started=started)
        if self._unevaluated is not None and self._records.evaluated(self._unevaluated):
            self._unevaluated = None  # the lost attempt got as far as that after its checkpoint
        with self._records.phase("starting"):
            self.rollout.wait_ready()

    @property
    def records(self) -> Records:
        assert self._records is not None, "begin() comes first"
        return self._records

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` steps must hold besides the policy; JSON-able."""
        return {"step": step, "sampler": self._sampler.state_dict(), "unevaluated": self._unevaluated}

    def collect(self, step: int, data_ranks: Sequence[int]) -> list[list[Rows]]:
        """Play the next prompts and plan the updates.

        Args:
            data_ranks: data-parallel rank of each rank.

        Returns:
            For each rank the rows of each optimizer step; no steps at all when no group carried a signal.
        """
        if self._unevaluated is not None and not self._config.eval.overlap:  # it was true before the run was resumed
            self._evaluate_now(self._unevaluated)
        self._rollout = self._play(step)
        reason = why_nothing_is_known(t for group in self._rollout.groups for t in group.trajectories)
        if reason is not None:
            log.warning("step %d: not one reward is known, so it trains nothing; most often %s", step + 1, reason)
        self._prompts.write(self._rollout.groups)
        self._start_evaluation()
        began, algorithm = time.monotonic(), self._config.algorithm
        self._batch = build_data(self._rollout.groups, algorithm)
        built = time.monotonic()
        updates = []
        for data in split_batch(self._batch, self._config.policy.updates_per_batch, algorithm):
            plan = self._plan(data, max(data_ranks) + 1)
            updates.append([[[data[i] for i in row] for row in rows] for rows in plan])
        self._planning = {
            "compute_advantages_and_returns": built - began,
            "convert_to_training_input": time.monotonic() - built,
        }
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
        """Write down what step number ``step`` (from 1) did; evaluate the new weights if asked to, now or later."""
        assert self._batch is not None and self._rollout is not None, "collect() comes first"
        groups = self._rollout.groups
        losses, optims = [r[0] for r in reports], [r[1] for r in reports]
        seconds = {"generate": self._rollout.seconds, **self._planning, **seconds}
        metrics = step_metrics(groups, self._batch, losses, optims, seconds, step, self._probes.pop(step, None))
        metrics |= {**attempt_metrics(asdict(self._rollout.accounting), "accounting"), **memory}
        metrics |= progress_metrics(step, self._config.rollout.prompts_per_step, self._training_tasks)
        self._sampler.observe((g.task_key, [t.reward for t in g.trajectories if is_known(t.reward)]) for g in groups)
        metrics |= data_metrics(self._sampler.status())
        self.records.trajectories(step, groups)
        if evaluate and self._overlaps(step):
            self._unevaluated = step
        elif evaluate:
            metrics |= self.records.episodes_of(step, self._evaluator.play(self.records.phase))
        self.records.step(step, metrics, distributions(groups, self._batch))

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint after ``step`` steps took so long."""
        self.records.add(step, {"timing/save_checkpoints": seconds})

    def check_engines(self, version: int, data: Sequence[Datum], expected: Sequence[np.ndarray]) -> None:
        """Compare every engine with the trainer's log-probs of ``data``, see `probe.compare`."""
        scores = self.rollout.score([datum.token_ids for datum in data])
        tolerance = self._config.rollout.engine.probe_tolerance
        self._probes[version] = compare(expected, scores, tolerance, version)

    def evaluate_before(self) -> None:
        """Evaluate the initial weights, now or later; recorded as step 0."""
        if self._overlaps(0):
            self._unevaluated = 0
        else:
            self._evaluate_now(0)

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that runs in the background, if any: the weights are about to change."""
        if self._evaluating is None:
            return
        began = time.monotonic()
        evaluation = self._evaluator.finish()
        step, self._evaluating = self._evaluating, None
        waited = time.monotonic() - began
        metrics = self.records.episodes_of(step, evaluation)
        self.records.evaluation(step, metrics | {"timing/eval_wait": waited}, in_step=True)

    def finish(self) -> None:
        """Summary and learning curve."""
        self.records.finish()

    def close(self) -> None:
        self._evaluator.close()
        if self._records is not None:
            self._records.close()

    def _overlaps(self, step: int) -> bool:
        """Whether weights of ``step`` are evaluated while the next update is computed; after the last there is none."""
        return self._config.eval.overlap and step < self._config.run.steps

    def _evaluate_now(self, step: int) -> None:
        self._unevaluated = None
        evaluation = self._evaluator.play(self.records.phase)
        self.records.evaluation(step, self.records.episodes_of(step, evaluation))

    def _start_evaluation(self) -> None:
        """The engines have the weights that are to be evaluated, and nothing to do until the next ones come."""
        if self._unevaluated is not None:
            self._evaluating, self._unevaluated = self._unevaluated, None
            self._evaluator.start()

    def _play(self, step: int) -> CollectResult:
        run, rollout, tasks = self._config.run, self._config.rollout, self._sampler.next()
        request = CollectRequest(
            step=step,
            tasks=tasks,
            samples=rollout.samples_per_prompt,
            temperature=rollout.sampling.temperature,
            purpose="train",
            seed=run.seed if run.deterministic else None,
        )
        with self.records.phase("rollout", len(tasks) * rollout.samples_per_prompt) as advance:
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
    """Training and held-out tasks; which is which is written into the run's outputs.

    Raises:
        UserError: the source is malformed, or one of the two sets is too small for the configuration.
    """
    dataset = run_dataset(config)
    train, held_out = dataset.split.train, dataset.split.held_out
    for name, tasks, least in (
        ("training", train, config.rollout.prompts_per_step),
        ("held-out", held_out, int(config.eval.in_training)),
    ):
        if len(tasks) < least:
            raise UserError(
                f"data.tasks={config.data.tasks}: only {len(tasks)} {name} tasks with "
                f"data.eval_fraction={config.data.eval_fraction:g}, at least {least} are needed; use more tasks."
            )
    check_mixture(train, config.rollout.prompts_per_step, config.data.mixture)
    for note in dataset.split.notes:
        log.warning("%s", note)
    save_manifest(dataset, Path(config.run.out))
    return train, held_out


def episode_python() -> Path:
    """The interpreter of the episode environment, which set-up puts beside that of the engine environment.

    Raises:
        UserError: it is not there.
    """
    python = Path(sys.prefix).parent / "episode" / "bin" / "python"
    if not python.exists():
        raise UserError(f"{python}: the episode environment is missing; run ./setup.sh.")
    return python
