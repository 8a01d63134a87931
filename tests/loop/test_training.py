"""Whole training runs in milliseconds: the order of calls, resuming, and what follows each failure."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from fake_rollout import TOKENS, FakeEngines, FakeRollout, FakeTransport
from fake_trainer import FakeTrainer
from waiting import HANG_S, until

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.checkpoint.resume_point import open_checkpoints, set_aside
from megatron_fleet.checkpoint.saves import Saves
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.loop.attempt import open_attempts
from megatron_fleet.loop.engine_weights import EngineWeights
from megatron_fleet.loop.run_tasks import in_steps, load_data
from megatron_fleet.loop.stopping import StopRequest
from megatron_fleet.loop.train import Training, until_lost
from megatron_fleet.rollout.requests import EnvironmentFailed, RolloutFailed
from megatron_fleet.storage.run_folder import RunFolder
from megatron_fleet.telemetry.shards import Shard
from megatron_fleet.trainer.base import BudgetSpent, TrainerLost

VOCABULARY = 16
NEVER_S = 3600.0
OVERRIDES = [
    "experiment=quickstart", "run.steps=4", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
    "eval.tasks=2", "eval.samples=1", "eval.greedy=false", "eval.at_start=false", "eval.at_end=false",
    "checkpoint.interval=2", "logging.tensorboard=false", "logging.plot=false", "algorithm.group_filter=none",
    "policy.optimizer.lr=5.0", "policy.optimizer.min_lr=5.0",
]  # fmt: skip


class Run:
    """A run with fakes; `go` may be called again, which resumes it."""

    def __init__(self, out: Path, *overrides: str):
        self.config = in_steps(load([*OVERRIDES, f"run.out={out}", *overrides]))
        self.out, self.calls = out, []
        self.data = load_data(self.config)
        self.fresh()

    def moved(self, out: Path) -> Run:
        """The same run in another folder, not begun."""
        other = copy.copy(self)
        run = self.config.run.model_copy(update={"out": str(out)})
        other.config, other.out, other.calls = self.config.model_copy(update={"run": run}), out, []
        out.mkdir(parents=True, exist_ok=True)
        other.fresh()
        return other

    def fresh(self) -> None:
        """New processes, as after a restart of everything."""
        self.trainer, self.rollout = FakeTrainer(VOCABULARY, self.calls), FakeRollout(VOCABULARY, self.calls)
        self.stop = StopRequest()

    async def go(self) -> None:
        engines = EngineWeights(self.config.rollout, self.config.run, self.trainer, self.rollout, FakeTransport())
        if self.config.run.resume == "never":
            set_aside(self.config)
        with RunFolder(self.out, self.config.run.name, self.config.run.id) as folder:
            config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"id": folder.id})})
            own = engines if config.eval.engines else None
            attempts = open_attempts(config, *self.data, self.rollout, lambda: 0.0, (), own)
            stack = ExitStack()
            checkpoints, uploader, found = stack.enter_context(open_checkpoints(config))
            try:
                saves = Saves(config.checkpoint, config.run.last_step, self.trainer, checkpoints, uploader)
                await Training(self.config, self.trainer, engines, attempts, saves, self.stop).run(found)
            finally:
                await asyncio.to_thread(stack.close)  # uploads may need the trainer, and the event loop with it

    def take(self, *unwanted: str) -> list[str]:
        """The calls so far, without those that begin with one of ``unwanted``."""
        taken = [call for call in self.calls if not call.startswith(("memory", *unwanted))]
        self.calls.clear()
        return taken

    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step, clocks left out."""
        rows = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        hidden = ("time", "attempt", "timing/", "memory/", "generate/", "async/trainer_waits", "async/engines_idle")
        hidden += ("checkpoint/upload", "engine/")
        steps: dict[int, dict[str, float]] = {}
        for row in rows:
            steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if not k.startswith(hidden)})
        return [steps[step] for step in sorted(steps)]


TRAIN = ["collect train {0}", "forward_backward", "optim_step"]
SYNC = ["begin_update", "send_weights {1}", "finish_update {1}"]


def step_calls(first: int, end: int, interval: int = 2) -> list[str]:
    return [
        call.format(step, step + 1)
        for step in range(first, end)
        for call in [*TRAIN, *(["copy_state"] if (step + 1) % interval == 0 else []), *SYNC]
    ]


@pytest.mark.parametrize("colocated", ["false", "true"])
async def test_evaluations_beside_training_score_the_weights_from_before(tmp_path, colocated):
    scores, calls = {}, {}
    for overlap in ("false", "true"):
        settings = (f"eval.overlap={overlap}", f"rollout.engine.colocated={colocated}")
        run = Run(tmp_path / overlap, "eval.at_start=true", "eval.interval=1", "eval.at_end=true", *settings)
        await run.go()
        scores[overlap] = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in run.rows()]
        calls[overlap] = [c for c in run.take() if c.startswith(("collect", "sleep", "forward_backward"))]
    assert scores["true"] == scores["false"]
    assert [row["eval/all/episodes"] for row in scores["true"]] == [2] * 5
    first = [call for call in calls["true"] if call.startswith("collect")][:3]
    assert first == ["collect train 0", "collect eval 0", "collect train 1"]


async def test_colocated_engines_do_not_sleep_before_the_evaluation_has_ended(tmp_path):
    run = Run(tmp_path, "eval.at_start=true", "run.steps=1", "eval.overlap=true", "rollout.engine.colocated=true")
    run.rollout.delay_of = lambda request: 0.2 * (request.purpose == "eval")
    slept = run.rollout.sleep

    async def sleep():
        assert run.rollout.under_way == 0
        return await slept()

    run.rollout.sleep = sleep
    await run.go()
    (row,) = [row for row in run.rows() if row["step"] == 0]
    assert row["eval/all/episodes"] == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["timing/eval_wait"] > 0.1


async def test_a_run_calls_everything_in_order_and_learns(tmp_path):
    run = Run(tmp_path, "run.steps=30", "checkpoint.interval=0", "eval.at_start=true", "eval.at_end=true")
    await run.go()
    calls = run.take()
    assert calls[:5] == ["wait_ready", "begin_update", "send_weights 0", "finish_update 0", "collect eval 0"]
    assert calls[5:-2] == step_calls(0, 30, interval=30)
    assert calls[-2:] == ["collect eval 0", "export_hf"]
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(31))
    assert rows[0]["eval/all/episodes"] == rows[30]["eval/all/episodes"] == 2
    assert rows[30]["accounting/attempts_started"] == rows[30]["accounting/episodes"] == 16
    first, last = ([row["reward/avg_raw_reward"] for row in rows[a:b]] for a, b in ((1, 6), (26, 31)))
    assert np.mean(last) > np.mean(first) + 0.2
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 30


class Bill:
    """One US dollar for each episode."""

    def __init__(self, budget_usd: float):
        self.usd, self.budget_usd = 0.0, budget_usd

    def record(self, engines):
        self.usd += engines["engine/generated_tokens"] / TOKENS
        return {"cost/cumulative_usd": self.usd}

    def check(self):
        if self.usd >= self.budget_usd:
            raise BudgetSpent("nothing is left")


async def test_a_run_saves_and_ends_when_its_budget_is_spent(tmp_path, capsys):
    run = Run(tmp_path, "checkpoint.interval=0", "eval.at_end=true")
    run.trainer.spending = bill = Bill(48.0)
    with pytest.raises(BudgetSpent):
        await run.go()
    assert "collect train 2" in run.take()
    run.fresh()
    run.trainer.spending = bill
    with pytest.raises(BudgetSpent):  # before anything is played
        await run.go()
    assert not any(call.startswith("collect") for call in run.take())
    run.fresh()
    run.trainer.spending, bill.budget_usd = bill, 1000.0
    await run.go()
    assert run.take()[:5] == ["load_state", "wait_ready", "begin_update", "send_weights 3", "finish_update 3"]
    assert [row["cost/cumulative_usd"] for row in run.rows()] == [16.0, 32.0, 48.0, 64.0]
    # The evaluation after the last step is counted, too.
    assert json.loads((tmp_path / "summary.json").read_text())["cost_usd"] == 66.0
    assert "mfleet: finished 4 steps, $66.00 at the service; see" in capsys.readouterr().out


async def test_a_resumed_run_ends_like_one_that_was_never_stopped(tmp_path):
    whole = Run(tmp_path / "whole")
    await whole.go()
    cut = Run(tmp_path / "cut")
    cut.trainer.fail_next("export_hf", RuntimeError("power cut"))
    cut.rollout.delays[3] = NEVER_S
    running = asyncio.create_task(cut.go())
    await until(lambda: "collect train 3" in cut.calls)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cut.rollout.under_way == 0, "a stopped run leaves no episodes behind"
    cut.take()
    cut.fresh()
    await cut.go()
    assert cut.take() == [
        "load_state", "wait_ready", "begin_update", "send_weights 2", "finish_update 2", *step_calls(2, 4), "export_hf",
    ]  # fmt: skip
    assert cut.rows() == whole.rows()
    np.testing.assert_array_equal(cut.trainer.weights, whole.trainer.weights)


VERBS = ["forward_backward", "optim_step", "send_weights", "copy_state", "load_state", "export_hf", "memory"]


@pytest.mark.parametrize("verb", VERBS)
async def test_a_lost_trainer_is_started_again_and_the_loop_goes_back(tmp_path, verb):
    whole = Run(tmp_path / "whole")
    await whole.go()
    run = Run(tmp_path / "run")
    if verb == "load_state":  # dies a second time, while it loads
        run.trainer._fail = {"optim_step": {4: TrainerLost("gone")}, "load_state": {1: TrainerLost("gone again")}}
    else:
        number = {"export_hf": 1, "copy_state": 2, "memory": 20}.get(verb, 4)
        run.trainer._fail = {verb: {number: TrainerLost("gone")}}
    await run.go()
    assert run.trainer.restarts == (["gone", "gone again"] if verb == "load_state" else ["gone"])
    assert run.rows() == whole.rows()
    np.testing.assert_array_equal(run.trainer.weights, whole.trainer.weights)


async def test_a_trainer_that_dies_during_a_rollout_stops_it_at_once(tmp_path):
    run = Run(tmp_path)
    run.rollout.delays[1] = NEVER_S
    running = asyncio.create_task(run.go())
    await until(lambda: "collect train 1" in run.calls)
    run.rollout.delays.clear()
    run.trainer.die("rank 3 was killed by SIGKILL")
    await asyncio.wait_for(running, HANG_S)
    assert run.trainer.restarts == ["rank 3 was killed by SIGKILL"]
    assert run.take().count("collect train 1") == 2


async def test_a_cancellation_while_lost_work_is_ended_is_not_forgotten():
    trainer, ending, ended = FakeTrainer(VOCABULARY), asyncio.Event(), asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(NEVER_S)
        finally:
            ending.set()
            await asyncio.sleep(0.05)
            ended.set()

    running = asyncio.create_task(until_lost(trainer, work()))
    await asyncio.sleep(0)
    trainer.die("gone")
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set(), "what the work has open is closed first"


async def test_a_trainer_that_dies_too_often_ends_the_run_resumable(tmp_path):
    run = Run(tmp_path)
    run.trainer._fail = {"optim_step": {n: TrainerLost("out of memory") for n in (3, 4, 5)}}
    with pytest.raises(UserError, match="died 3 times"):
        await run.go()
    run.fresh()
    await run.go()
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]


async def test_an_engine_that_is_given_up_ends_the_run_resumable(tmp_path):
    run = Run(tmp_path)

    finish_update = run.rollout.engines.finish_update

    async def broken(version, message):
        if version == 3:
            raise RolloutFailed("engine 0 died 4 times")
        await finish_update(version, message)

    run.rollout.engines.finish_update = broken
    with pytest.raises(RolloutFailed, match="engine 0 died 4 times"):
        await run.go()
    run.fresh()
    await run.go()
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]


async def test_an_outage_is_not_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.loop.batches.FIRST_PROBE_S", 0.001)
    whole = Run(tmp_path / "whole")
    await whole.go()
    run = Run(tmp_path / "run")
    run.rollout.unknown, run.rollout.outages = {1, 2}, ["connection refused"] * 3
    await run.go()
    played = [call for call in run.take() if call.startswith(("collect", "environment"))]
    probes = ["environment_available"]
    assert played == [
        "collect train 0", "collect train 1", *probes * 4, "collect train 1", *probes, "collect train 1",
        "collect train 2", "collect train 3",
    ]  # fmt: skip
    rows = run.rows()
    assert [rows[1][f"accounting/{name}"] for name in ("attempts_started", "attempts_retried", "episodes")] == [
        48,
        32,
        16,
    ]
    counts = ("accounting/attempts_started", "accounting/attempts_retried")
    assert [{k: v for k, v in row.items() if k not in counts} for row in rows] == [
        {k: v for k, v in row.items() if k not in counts} for row in whole.rows()
    ]


async def test_what_no_attempt_can_change_ends_the_run_at_once(tmp_path):
    run = Run(tmp_path / "run", "checkpoint.interval=10")
    run.rollout.unknown, run.rollout.fate = {1}, Outcome.REFUSED
    with pytest.raises(UserError, match=r"^step 2: no episode can be played, most often refused: the server is gone;"):
        await run.go()
    assert not [call for call in run.take() if call.startswith("environment")]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]


async def test_an_outage_that_lasts_ends_the_run_resumable(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.loop.batches.FIRST_PROBE_S", 0.001)
    whole = Run(tmp_path / "whole", "checkpoint.interval=10")
    await whole.go()
    run = Run(tmp_path / "run", "checkpoint.interval=10", "env.outage_limit_s=0.05")
    run.rollout.unknown = set(range(1, 1000))
    with pytest.raises(UserError, match=r"step 2: not one reward became known .* env_failed: the server is gone"):
        await run.go()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    run.fresh()
    await run.go()
    assert run.rows() == whole.rows()


async def test_an_outage_at_a_saved_step_ends_in_its_sentence_however_often_the_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.loop.batches.FIRST_PROBE_S", 0.001)
    whole = Run(tmp_path / "whole", "checkpoint.interval=1")
    await whole.go()
    run = Run(tmp_path / "run", "checkpoint.interval=1", "env.outage_limit_s=0.05")
    run.rollout.unknown = set(range(1, 1000))
    for _ in range(3):
        with pytest.raises(UserError, match=r"step 2: not one reward became known .* env_failed: the server is gone"):
            await run.go()
        run.fresh()
        run.rollout.unknown = set(range(1000))
    run.fresh()
    await run.go()
    assert run.rows() == whole.rows()


async def test_an_own_environment_server_that_keeps_failing_is_an_outage(tmp_path):
    whole = Run(tmp_path / "whole", "checkpoint.interval=10")
    await whole.go()
    run = Run(tmp_path / "run", "checkpoint.interval=10")
    collect = run.rollout.collect

    async def failing(request, *how):
        if request.step == 1:
            raise EnvironmentFailed("the environment server died 9 times")
        return await collect(request, *how)

    run.rollout.collect = failing
    with pytest.raises(UserError, match="the environment server died 9 times"):
        await run.go()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    run.fresh()
    await run.go()
    assert run.rows() == whole.rows()


async def test_colocated_engines_sleep_before_the_trainer_starts_again(tmp_path):
    run = Run(tmp_path, "rollout.engine.colocated=true", "run.steps=2", "checkpoint.interval=1")
    run.trainer._fail = {"optim_step": {2: TrainerLost("gone")}}
    await run.go()
    calls = run.take("collect", "begin_update", "finish_update")
    again = calls.index("revive")
    to_engines = [
        "offload gradients optimizer", "wake weights", "send_weights {0}", "offload parameters gradients optimizer",
        "wake kv_cache",
    ]  # fmt: skip
    assert calls[:2] == ["wait_ready", "sleep"]
    # The engines slept when the trainer died: it was their turn to wait.
    assert calls[again - 2 : again] == ["forward_backward", "optim_step"]
    assert calls[again + 1 : again + 8] == ["load_state", "wait_ready", *(call.format(1) for call in to_engines)]


async def test_a_restarted_engine_is_sent_the_weights_again(tmp_path):
    run = Run(tmp_path, "rollout.engine.colocated=true", "run.steps=2")
    restarted, collect = FakeEngines(VOCABULARY, []), run.rollout.collect

    async def losing_an_engine(request, *how):
        if (request.step, request.first) == (1, 0):
            run.calls.append("engine lost")
            await run.rollout.resend(restarted, 1)
            run.calls.append("engine back")
        return await collect(request, *how)

    run.rollout.collect = losing_an_engine
    await run.go()
    calls = run.take()
    begin = calls.index("engine lost")
    assert calls[begin + 1 : begin + 5] == [
        "onload parameters", "send_weights 1", "offload parameters", "engine back",
    ]  # fmt: skip
    assert restarted.version == 1 and restarted.weights.any()


async def test_weights_that_are_changing_are_not_sent_under_the_old_version(tmp_path):
    run = Run(tmp_path, "run.steps=2", "checkpoint.interval=100")
    restarted, sending = FakeEngines(VOCABULARY, []), []
    forward_backward = run.trainer.forward_backward

    async def losing_an_engine(data, loss):
        sending.append(asyncio.create_task(run.rollout.resend(restarted, len(sending))))
        await asyncio.sleep(0.01)
        return await forward_backward(data, loss)

    run.trainer.forward_backward = losing_an_engine
    run.rollout.engines.begin_update = lambda: asyncio.sleep(0, [task.cancel() for task in sending])  # as real ones do
    await run.go()
    assert len(sending) == 2 and all(task.cancelled() for task in sending)
    assert restarted.version == 0 and not restarted.weights.any()


async def test_episodes_play_ahead_and_are_never_too_old(tmp_path):
    run = Run(
        tmp_path, "algorithm=importance_weighted", "rollout.max_staleness=2", "run.steps=6", "checkpoint.interval=100"
    )
    forward_backward = run.trainer.forward_backward

    async def slow_forward_backward(data, loss):
        ahead = min(run.calls.count("forward_backward") + 2, 5)
        await until(lambda: f"collect train {ahead}" in run.calls)
        return await forward_backward(data, loss)

    run.trainer.forward_backward = slow_forward_backward
    await run.go()
    order = [call for call in run.take() if call.startswith(("collect", "finish_update"))]
    assert order[:5] == ["finish_update 0", "collect train 0", "collect train 1", "collect train 2", "finish_update 1"]
    assert order.index("collect train 5") < order.index("finish_update 4")
    rows = run.rows()
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert all(row["accounting/attempts_stale"] == 0 for row in rows)


async def test_groups_that_are_too_old_are_played_again_and_counted(tmp_path):
    run = Run(
        tmp_path, "algorithm=importance_weighted", "rollout.max_staleness=1", "run.steps=4", "checkpoint.interval=100"
    )
    spans = run.rollout._episode

    def one_is_old(request, group, sample, weights, version, known):
        before = [r for r in run.rollout.requests if r is not request and (r.step, r.first) == (2, 1)]
        old = (request.step, group) == (2, 1) and not before
        return spans(request, group, sample, weights, version - 5 * old, known)

    run.rollout._episode = one_is_old
    await run.go()
    assert [row["accounting/attempts_stale"] for row in run.rows()] == [0, 0, 4, 0]
    assert [row["async/staleness_max"] <= 1 for row in run.rows()] == [True] * 4
    assert [request.first for request in run.rollout.requests if request.step == 2] == [0, 1, 2, 3, 1]
    rows = Shard.open(tmp_path / "trajectories" / "step_000003.parquet").records()
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


async def test_engines_that_stay_behind_end_the_run(tmp_path):
    run = Run(tmp_path)

    async def forgetful(version, message):
        pass

    run.rollout.engines.finish_update = forgetful
    with pytest.raises(RolloutFailed, match=r"1 versions old although it was given version 1"):
        await run.go()


def tasks_by_step(requests):
    found = defaultdict(list)
    for request in requests:
        found[request.step] += [task.key for task in request.tasks]
    return dict(found)


async def test_groups_that_came_back_before_a_checkpoint_are_kept_and_the_others_played_after_it(tmp_path):
    run = Run(
        tmp_path, "algorithm=importance_weighted", "rollout.max_staleness=2", "run.steps=8", "checkpoint.interval=2"
    )
    run.rollout.delays[5] = NEVER_S
    running = asyncio.create_task(run.go())
    await until((tmp_path / "checkpoints" / "step_000004").exists)
    await until(lambda: "collect train 5" in run.calls)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = tasks_by_step(run.rollout.requests)
    run.fresh()
    await run.go()
    after = tasks_by_step(run.rollout.requests)
    assert min(after) == 5
    assert before[5] == after[5]
    played = {**before, **after}
    assert len([key for step in range(8) for key in played[step]]) == 32
    assert [row["async/staleness_max"] for row in run.rows()] == [0, 1, 2, 2, 2, 1, 2, 2]
    assert all(row["accounting/attempts_started"] == row["accounting/episodes"] == 16 for row in run.rows())


async def test_a_run_that_only_skips_stops_and_can_be_resumed(tmp_path):
    skipping = ("policy.safety.max_skipped_in_a_row=2", "policy.safety.max_dumps=1", "checkpoint.interval=0")
    run = Run(tmp_path, *skipping, "run.steps=6")
    forward_backward, bad = run.trainer.forward_backward, {2, 4, 5}

    async def poisoned(data, loss):
        report = await forward_backward(data, loss)
        if len(run.trainer.data) in bad:
            run.trainer.gradient[:] = np.nan
        return report

    run.trainer.forward_backward = poisoned
    with pytest.raises(UserError, match="2 updates in a row were skipped"):
        await run.go()
    assert [row["policy/skipped_steps"] for row in run.rows()] == [0, 1, 0, 1, 1]
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-000002.0"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]
    run.fresh()
    await run.go()
    rows = run.rows()
    assert [row["policy/skipped_steps_total"] for row in rows] == [0, 1, 1, 2, 3, 3]
