"""The guarded optimizer step with a trainer in memory: what is skipped, reported and kept, and in which order."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from fake_trainer import FakeTrainer
from guards import make_guard
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.debug.dumps import Record, open_dump
from megatron_fleet.loop.guard import FEWEST, describe
from megatron_fleet.trainer.base import AdamParams, LossSpec, MicroBatchLoss, OptimReport, TrainerLost

DUMP = ["examine", "save_state"]


class Guarded:
    """A trainer with its guard."""

    def __init__(self, folder, safety=None, trainer=None):
        tree = make_config(write_config(folder / "model")).model_dump()
        tree["run"]["out"] = str(folder / "out")
        tree["policy"]["safety"] = safety or {}
        self.config = Config.model_validate(tree)
        self.trainer = trainer or FakeTrainer()
        self.guard = make_guard(self.config, self.trainer)
        self.taken = 0
        self.folder = folder / "out" / "dumps"

    async def step(self, data) -> OptimReport:
        """One update."""
        self.taken += 1
        self.trainer.calls.clear()
        return (await self.guard.update(self.taken, 0, 1e-3, data, LossSpec.of(self.config.algorithm)))[1]

    def accustom(self, norm):
        """As if the norms before had all been ``norm``."""
        self.guard.load({"norms": [norm] * FEWEST, "skipped": 0, "skipped_in_a_row": 0})

    @property
    def dumps(self):
        return sorted(path.name for path in self.folder.glob("*"))


@pytest.fixture
def guarded(tmp_path):
    return Guarded(tmp_path)


def healthy():
    return make_batch(count=6, longest=60)


def bad():
    data = healthy()
    data[3].scaled_advantages[-1] = np.nan
    return data


async def test_a_step_that_looks_right_is_one_call_of_each(guarded):
    report = await guarded.step(healthy())
    assert guarded.trainer.calls == ["forward_backward", "optim_step"]
    assert (report.skipped, report.spike, report.held, report.skipped_total) == (False, False, False, 0)
    alone = FakeTrainer()
    await alone.forward_backward(healthy(), LossSpec.of(guarded.config.algorithm))
    assert await alone.optim_step(AdamParams.of(guarded.config.policy.optimizer, 1e-3)) == report
    assert np.array_equal(alone.weights, guarded.trainer.weights)
    assert guarded.dumps == []


async def test_a_step_that_is_not_finite_is_dumped_and_discarded(guarded, caplog):
    await guarded.step(healthy())
    before = guarded.trainer.weights.copy()
    data = bad()
    with caplog.at_level(logging.WARNING):
        report = await guarded.step(data)
    assert guarded.trainer.calls == ["forward_backward", "optim_step", *DUMP, "discard_gradients"]
    assert (report.skipped, report.spike, report.held, report.skipped_total) == (True, False, False, 1)
    assert np.array_equal(guarded.trainer.weights, before) and not guarded.trainer.gradient.any()
    assert guarded.dumps == ["step-000002.0"]
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("step 2: loss nan, gradient norm nan, so the update was skipped; the loss of 1 of 3")
    assert "with sequences 2, 3; 1 of 1 gradients are not finite, from the output on: logits" in message
    assert message.endswith(f"mfleet debug replay {guarded.folder}/step-000002.0`")
    dump = open_dump(guarded.folder / "step-000002.0")
    assert (dump.record.verdict, dump.record.step, dump.record.device) == ("not_finite", 2, "cpu")
    assert [np.isfinite(m.loss) for m in dump.record.micro_batches] == [True, False, True]
    assert [d.scaled_advantages.tobytes() for d in dump.data()] == [d.scaled_advantages.tobytes() for d in data]


async def test_a_loss_that_is_not_finite_is_enough(guarded, monkeypatch):
    """A clamp behind it may stop the nan: the gradient looks as usual."""
    before = guarded.trainer.weights.copy()
    backward = guarded.trainer.forward_backward

    async def not_finite(data, loss):
        return replace(await backward(data, loss), loss=math.nan)

    monkeypatch.setattr(guarded.trainer, "forward_backward", not_finite)
    report = await guarded.step(healthy())
    assert report.skipped and np.isfinite(report.grad_norm)
    assert guarded.trainer.calls == ["forward_backward", "optim_step", *DUMP, "discard_gradients"]
    assert np.array_equal(guarded.trainer.weights, before)


async def test_a_spike_is_taken_reported_and_kept_as_it_was_before(guarded, caplog):
    usual = await guarded.step(healthy())
    guarded.accustom(usual.grad_norm)
    assert not (await guarded.step(healthy())).spike
    guarded.accustom(usual.grad_norm / 100)
    before = guarded.trainer.weights.copy()
    with caplog.at_level(logging.WARNING):
        report = await guarded.step(healthy())
    assert guarded.trainer.calls == ["forward_backward", "optim_step", *DUMP, "optim_step"]
    assert (report.spike, report.skipped, report.held, report.skipped_total) == (True, False, False, 0)
    assert "× the median of the last ones" in caplog.text
    assert not np.array_equal(before, guarded.trainer.weights)
    again = FakeTrainer()
    await again.load_state(open_dump(guarded.folder / guarded.dumps[-1]).state)
    assert np.array_equal(again.weights, before)


async def test_spikes_leave_a_place_for_what_is_not_finite(tmp_path):
    guarded = Guarded(tmp_path, safety={"max_dumps": 2})
    for _ in range(2):
        guarded.accustom(1e-6)
        assert (await guarded.step(healthy())).spike
    assert guarded.dumps == ["step-000001.0"]
    for _ in range(2):
        assert (await guarded.step(bad())).skipped
    assert guarded.dumps == ["step-000001.0", "step-000003.0"]
    # A run that goes on counts what it finds.
    again = Guarded(tmp_path, safety={"max_dumps": 2})
    again.taken = 7
    assert (await again.step(bad())).skipped
    assert again.dumps == ["step-000001.0", "step-000003.0"]


async def test_no_dumps_when_none_are_wanted(tmp_path, caplog):
    guarded = Guarded(tmp_path, safety={"max_dumps": 0, "spike_factor": None})
    guarded.accustom(1e-6)
    assert not (await guarded.step(healthy())).spike
    assert guarded.trainer.calls == ["forward_backward", "optim_step"]
    with caplog.at_level(logging.WARNING):
        assert (await guarded.step(bad())).skipped
    assert guarded.trainer.calls == ["forward_backward", "optim_step", "examine", "discard_gradients"]
    assert guarded.dumps == []
    assert "replay" not in caplog.text


async def test_a_dump_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    guarded = Guarded(tmp_path, trainer=FakeTrainer(fail={"save_state": {1: OSError("disk full")}}))
    with caplog.at_level(logging.WARNING):
        assert (await guarded.step(bad())).skipped
    assert "could not be kept for replay: disk full" in caplog.text
    assert guarded.dumps == []
    assert not (await guarded.step(healthy())).skipped


@pytest.mark.parametrize("verb", ["optim_step", "examine", "save_state", "discard_gradients"])
async def test_a_trainer_that_is_lost_on_the_way_is_not_hidden(tmp_path, verb):
    guarded = Guarded(tmp_path, trainer=FakeTrainer(fail={verb: {1: TrainerLost("rank 1 died")}}))
    before = guarded.guard.state()
    with pytest.raises(TrainerLost, match="rank 1 died"):
        await guarded.step(bad())
    assert guarded.guard.state() == before, "the step is run again from the last checkpoint: it must count once"


async def test_a_run_that_only_skips_stops_and_goes_on_from_its_state(tmp_path):
    guarded = Guarded(tmp_path, safety={"max_skipped_in_a_row": 2, "max_dumps": 0})
    await guarded.step(bad())
    await guarded.step(healthy())
    await guarded.step(bad())
    assert not guarded.guard.stuck
    guarded.guard.stop_if_stuck()
    state = json.loads(json.dumps(guarded.guard.state()))
    assert (await guarded.step(bad())).skipped_total == 3
    assert guarded.guard.stuck
    with pytest.raises(UserError, match=r"2 updates in a row .*policy\.safety\.max_skipped_in_a_row=2.*logits"):
        guarded.guard.stop_if_stuck()
    stopped = json.loads(json.dumps(guarded.guard.state()))
    guarded.guard.load(state)
    assert (await guarded.step(bad())).skipped_total == 3 and guarded.guard.stuck
    guarded.guard.load(stopped)
    assert (await guarded.step(bad())).skipped_total == 4 and not guarded.guard.stuck


def test_a_norm_that_overflows_is_told_from_bad_gradients():
    losses = [MicroBatchLoss([0, 1], 0.5)]
    record = Record(1, 0, "not_finite", "cpu", 1e-3, 0.5, float("inf"), 1.0, losses, [], [], 9)
    assert "each gradient is finite, their norm is too large for float32" in describe(record)
    assert "micro-batches" not in describe(record)
    worse = replace(record, weights=["a", "b", "c", "d"], gradients=["g"])
    assert "weights are not finite: a, b, c and 1 more; 1 of 9 gradients are not finite" in describe(worse)


class Elsewhere(FakeTrainer):
    """A trainer whose steps cannot be held."""

    ranks = None
    spending = None
    tells_norm = True

    async def optim_step(self, adam):
        report = await super().optim_step(adam)
        return report if self.tells_norm else replace(report, grad_norm=None)


async def test_without_ranks_both_calls_are_made_at_once_and_judged_afterwards(tmp_path, caplog):
    guarded = Guarded(tmp_path, trainer=Elsewhere())
    before = guarded.trainer.weights
    report = await guarded.step(bad())
    assert guarded.trainer.calls == ["forward_backward", "optim_step"] and guarded.trainer.weights is before
    assert (report.skipped, report.skipped_total) == (True, 1)
    assert "step 1: loss nan, gradient norm nan, so the update was skipped" in caplog.text
    assert guarded.dumps == []
    assert not (await guarded.step(healthy())).skipped
    assert guarded.trainer.weights is not before


async def test_without_ranks_a_spike_is_reported_when_it_is_over(tmp_path, caplog):
    guarded = Guarded(tmp_path, trainer=Elsewhere())
    guarded.accustom(1e-6)
    report = await guarded.step(healthy())
    assert (report.spike, report.skipped) == (True, False)
    assert "step 1: gradient norm" in caplog.text and guarded.dumps == []


async def test_a_trainer_need_not_tell_the_norm(tmp_path, caplog):
    guarded = Guarded(tmp_path, trainer=Elsewhere())
    guarded.trainer.tells_norm = False
    before = guarded.guard.state()
    report = await guarded.step(healthy())
    assert (report.grad_norm, report.skipped, report.spike) == (None, False, False)
    assert guarded.guard.state() == before and not caplog.text
    assert (await guarded.step(bad())).skipped
    assert "step 2: loss nan, so the update was skipped" in caplog.text


@pytest.mark.parametrize("verb", ["forward_backward", "optim_step"])
async def test_when_one_of_two_calls_fails_the_other_is_not_left_running(tmp_path, verb):
    trainer = Elsewhere()
    trainer.fail_next(verb, UserError("no"))
    guarded = Guarded(tmp_path, trainer=trainer)
    with pytest.raises(UserError, match="no"):
        await guarded.step(healthy())
    await asyncio.sleep(0.01)
    assert len(trainer.calls) <= 2 and len(asyncio.all_tasks()) == 1
