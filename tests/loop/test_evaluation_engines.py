"""Evaluations by engines of their own: training goes on, and each result is that of the weights that were asked for."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from test_training import NEVER_S, Run
from waiting import HANG_S, until

from megatron_fleet.config.errors import UserError
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.trainer.base import TrainerLost

OWN = "eval.engines=1"
PLACES = ("eval/lag", "timing/")


def scores(run):
    """Metrics of evaluations by step, but for the time that they took."""
    found = {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in run.rows()}
    plain = {step: {k: v for k, v in row.items() if not k.startswith(PLACES)} for step, row in found.items() if row}
    return {step: row for step, row in plain.items() if row}


def raw(run):
    return {row["step"]: row for row in map(json.loads, (run.out / "metrics.jsonl").read_text().splitlines())}


class Held:
    """Keeps the evaluation of a step from ending until it is told."""

    def __init__(self, run, version):
        self.run, self.version = run, version
        self.playing, self.go, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._collect, run.rollout.collect = run.rollout.collect, self.collect

    async def collect(self, request, *arguments, **named):
        if request.engines == "eval" and self.run.rollout.eval_engines.version == self.version:
            self.playing.set()
            try:
                await self.go.wait()
            finally:
                self.ended.set()
        return await self._collect(request, *arguments, **named)


async def between_steps(tmp_path, *overrides):
    run = Run(tmp_path / "between", *overrides)
    await run.go()
    return run


ALWAYS = ("eval.at_start=true", "eval.interval=1", "eval.at_end=true")


async def test_the_scores_are_those_between_the_steps(tmp_path):
    expected = await between_steps(tmp_path, *ALWAYS)
    run = Run(tmp_path / "own", *ALWAYS, OWN)
    await run.go()
    assert list(scores(expected)) == [0, 1, 2, 3, 4] and scores(run) == scores(expected)
    assert run.rollout.eval_calls == [
        call for v in range(4) for call in ("begin_update", f"finish_update {v}", f"collect {v}")
    ]
    assert run.calls.count("collect eval 0") == 1  # after the last step, by the engines of the rollout
    np.testing.assert_array_equal(run.trainer.weights, expected.trainer.weights)
    assert all(0 <= row["eval/lag_steps"] <= 1 and row["eval/lag_s"] >= 0 for row in map(raw(run).get, range(4)))


async def test_an_evaluation_may_last_for_steps_and_is_recorded_under_its_own(tmp_path):
    best = ("checkpoint.interval=1", "checkpoint.keep=1", "checkpoint.keep_best=eval/all/pass_at_1")
    settings = ("run.steps=8", "eval.interval=4", *best)
    expected = await between_steps(tmp_path, *settings)
    run = Run(tmp_path / "own", *settings, OWN)
    held = Held(run, 4)
    collect = run.rollout.collect

    async def until_recorded(request, *arguments, **named):
        if (request.purpose, request.step) == ("train", 7):  # three steps after the fourth are trained
            assert (run.out / "checkpoints" / "step_000004").is_dir()  # it may be the best
            held.go.set()
            await until(lambda: "eval/all/episodes" in raw(run)[4])
        return await collect(request, *arguments, **named)

    run.rollout.collect = until_recorded
    async with asyncio.timeout(HANG_S):
        await run.go()
    assert scores(run) == scores(expected) and list(scores(run)) == [4]
    assert raw(run)[4]["eval/lag_steps"] == 3
    assert list(raw(run)) == list(range(1, 9))
    np.testing.assert_array_equal(run.trainer.weights, expected.trainer.weights)


async def test_the_next_one_that_is_due_waits_just_before_the_weights_change(tmp_path):
    settings = ("run.steps=6", "eval.interval=2")
    expected = await between_steps(tmp_path, *settings)
    run = Run(tmp_path / "own", *settings, OWN)
    held = Held(run, 2)
    running = asyncio.create_task(run.go())
    await until(lambda: "collect train 4" in run.calls)
    await asyncio.sleep(0.1)
    assert run.take()[-1] == "collect train 4" and not any("4" in call for call in run.rollout.eval_calls)
    held.go.set()
    await asyncio.wait_for(running, HANG_S)
    assert scores(run) == scores(expected) and list(scores(run)) == [2, 4]
    assert raw(run)[2]["eval/lag_steps"] == 2 and raw(run)[2]["timing/eval_wait"] > 0.05


async def test_the_one_that_plays_after_the_last_step_is_waited_for(tmp_path):
    run = Run(tmp_path, "eval.interval=3", OWN)
    held = Held(run, 3)
    running = asyncio.create_task(run.go())
    await until(lambda: "finish_update 4" in run.calls)
    await asyncio.sleep(0.05)
    assert not running.done()
    held.go.set()
    await asyncio.wait_for(running, HANG_S)
    assert list(scores(run)) == [3] and raw(run)[3]["eval/lag_steps"] == 1


class Restarted:
    """An engine that was restarted, and asks for its weights."""

    begun = False

    def __init__(self):
        self.calls = []

    async def begin_update(self):
        self.calls.append("begin_update")

    async def load(self, message):
        self.calls.append("load")

    async def finish_update(self, version, message):
        self.calls.append(f"finish_update {version}")


async def test_a_lost_engine_gets_its_weights_again_while_the_trainer_has_them(tmp_path):
    run = Run(tmp_path, "eval.at_start=true", OWN)
    held, engine = Held(run, 0), Restarted()
    run.rollout.delays[0] = 1.0  # the first step, and so the trainer's weights, wait
    running = asyncio.create_task(run.go())
    await held.playing.wait()
    await run.rollout.eval_resend(engine, 0)
    assert engine.calls == ["begin_update", "load", "finish_update 0"]
    held.go.set()
    await asyncio.wait_for(running, HANG_S)
    assert list(scores(run)) == [0]


async def test_without_its_weights_the_next_step_is_evaluated_instead(tmp_path, caplog):
    run = Run(tmp_path, "run.steps=7", "eval.interval=4", OWN)
    held, engine, asking = Held(run, 4), Restarted(), []
    collect = run.rollout.collect

    async def lose(request, *arguments, **named):
        if (request.purpose, request.step, request.first) == ("train", 5, 0):
            asking.append(asyncio.create_task(run.rollout.eval_resend(engine, 4)))
            await held.ended.wait()
        return await collect(request, *arguments, **named)

    run.rollout.collect = lose
    await asyncio.wait_for(run.go(), HANG_S)
    assert engine.calls == [] and not asking[0].done()  # until the next update of its slot
    asking[0].cancel()
    assert list(scores(run)) == [6]
    assert "the evaluation of step 4 could not be made: an evaluation engine was lost" in caplog.text
    assert "The weights of step 6 are evaluated instead" in caplog.text


async def test_the_next_one_makes_up_for_one_that_was_lost_before_it(tmp_path, caplog):
    run = Run(tmp_path, "run.steps=6", "eval.interval=2", OWN)
    held, asking = Held(run, 2), []
    collect = run.rollout.collect

    async def lose(request, *arguments, **named):
        if (request.purpose, request.step, request.first) == ("train", 4, 0):  # when that of step 4 is due
            asking.append(asyncio.create_task(run.rollout.eval_resend(Restarted(), 2)))
            await held.ended.wait()
        return await collect(request, *arguments, **named)

    run.rollout.collect = lose
    await asyncio.wait_for(run.go(), HANG_S)
    asking[0].cancel()
    assert list(scores(run)) == [4] and "instead" not in caplog.text
    assert "step 2 could not be made: an evaluation engine was lost" in caplog.text
    assert "That of step 4 follows" in caplog.text


async def test_training_does_not_wait_for_an_engine_that_is_replaced(tmp_path, caplog):
    run = Run(tmp_path, "run.steps=5", "eval.interval=2", OWN)
    run.rollout.eval_engines.take_weights = lambda: len(raw(run)) >= 3
    await asyncio.wait_for(run.go(), HANG_S)
    assert "the evaluation of step 2 could not be made: an evaluation engine is being replaced" in caplog.text
    assert list(scores(run)) == [3, 4]


@pytest.mark.parametrize("where", ["take_weights", "finish_update", "collect"])
async def test_without_its_engines_a_run_evaluates_between_the_steps(tmp_path, caplog, where):
    expected = await between_steps(tmp_path, "eval.interval=1", "run.steps=5")
    run = Run(tmp_path / "own", "eval.interval=1", "run.steps=5", OWN)
    engines = run.rollout.eval_engines
    collect, finish = run.rollout.collect, engines.finish_update

    def fail():
        raise RolloutFailed("evaluation engine 0 died 4 times")

    async def collected(request, *arguments, **named):
        if where == "collect" and request.engines == "eval" and engines.version >= 2:
            fail()
        return await collect(request, *arguments, **named)

    async def finished(version, message):
        await finish(version, message)
        if where == "finish_update" and version >= 2:
            fail()

    run.rollout.collect, engines.finish_update = collected, finished
    if where == "take_weights":
        engines.take_weights = lambda: fail() if len(raw(run)) >= 2 else True
    await asyncio.wait_for(run.go(), HANG_S)
    found = scores(run)
    assert found == {step: row for step, row in scores(expected).items() if step in found}
    assert set(found) >= {1, 3, 4} and run.calls.count("collect eval 0") >= 2
    assert caplog.text.count("are played by the engines of the rollout from now on") == 1
    assert "evaluation engine 0 died 4 times" in caplog.text


async def test_what_ends_an_evaluation_for_good_ends_the_run(tmp_path):
    run = Run(tmp_path, "eval.at_start=true", OWN)
    collect = run.rollout.collect

    async def refused(request, *arguments, **named):
        if request.engines == "eval":
            raise UserError("no reward can be known; correct it.")
        return await collect(request, *arguments, **named)

    run.rollout.collect = refused
    with pytest.raises(UserError, match="no reward can be known"):
        await asyncio.wait_for(run.go(), HANG_S)


@pytest.mark.parametrize("verb", ["forward_backward", "send_weights", "copy_state"])
async def test_a_lost_trainer_costs_no_evaluation(tmp_path, verb):
    settings = (*ALWAYS, "checkpoint.interval=1")
    expected = await between_steps(tmp_path, *settings)
    run = Run(tmp_path / "own", *settings, OWN)
    run.trainer._fail = {verb: {4: TrainerLost("gone")}}
    await asyncio.wait_for(run.go(), HANG_S)
    assert run.trainer.restarts == ["gone"]
    found = scores(run)
    assert found == {step: row for step, row in scores(expected).items() if step in found} and 4 in found
    np.testing.assert_array_equal(run.trainer.weights, expected.trainer.weights)


async def cut(run, call):
    """End a run as a kill does, once it made a call."""
    run.trainer.fail_next("export_hf", RuntimeError("power cut"))
    running = asyncio.create_task(run.go())
    await until(lambda: call in run.calls)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert run.rollout.under_way == 0
    run.fresh()


@pytest.mark.parametrize(("interval", "evaluated"), [(2, 2), (1, 2)])
async def test_a_resumed_run_makes_the_evaluation_of_its_checkpoint(tmp_path, caplog, interval, evaluated):
    """The weights of the checkpoint are those that were being evaluated, or it is too late for these."""
    settings = ("run.steps=3", f"eval.interval={interval}")
    expected = await between_steps(tmp_path, *settings)
    run = Run(tmp_path / "own", *settings, OWN)
    Held(run, evaluated)
    run.rollout.delays[2] = NEVER_S
    await cut(run, "collect train 2")
    await asyncio.wait_for(run.go(), HANG_S)
    assert scores(run) == scores(expected) and "had not ended" not in caplog.text


async def test_a_resumed_run_whose_weights_are_gone_evaluates_those_of_the_checkpoint(tmp_path, caplog):
    settings = ("run.steps=5", "eval.interval=3", "checkpoint.interval=2")
    run = Run(tmp_path, *settings, OWN)
    Held(run, 3)
    run.rollout.delays[4] = NEVER_S
    await cut(run, "collect train 4")
    await asyncio.wait_for(run.go(), HANG_S)
    assert list(scores(run)) == [4]
    assert "the evaluation of step 3 had not ended; the weights of step 4 are evaluated" in caplog.text
