"""The training loop around the guarded step: a run that only skips stops, resumable, and counts on."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.loop import train
from megatron_fleet.loop.exchange import Exchange
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


class Engines:
    """A rollout and a publisher that do nothing."""

    def weight_client(self):
        return None

    def publish(self, version):
        pass

    def close(self):
        pass


class Books:
    """A driver whose batches are bad in the steps given."""

    def __init__(self, bad):
        self.bad, self.rollout, self.reports = bad, Engines(), {}

    def begin(self, state, started):
        self.resumed = state

    def collect(self, step, data_ranks):
        batch = make_batch(count=2, seed=step)
        if step in self.bad:
            batch[1].weights[-1] = np.nan
        return [[[batch]]]

    def finish_step(self, step, reports, *_):
        ((_, self.reports[step]),) = reports

    def finish_evaluation(self):
        pass

    def state(self, step):
        return {"step": step}

    def saved(self, step, seconds):
        assert seconds > 0

    def finish(self):
        pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train until it ends; the driver, and the message of the stop."""
    monkeypatch.setattr(train, "make_publisher", lambda *_: Engines())
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["run"] |= {"out": str(tmp_path / "out"), "steps": 6}
    tree["policy"]["safety"] = {"max_skipped_in_a_row": 2, "max_dumps": 1}
    tree["checkpoint"] |= {"interval": 0, "export_hf": False}
    tree["eval"]["at_start"] = tree["eval"]["at_end"] = False
    config = Config.model_validate(tree)

    def go(bad):
        books, policy = Books(bad), MegatronPolicy(config, init="random")
        try:
            train.train(config, policy, books, Exchange(), 0.0)
        except UserError as error:
            return books, str(error)
        finally:
            policy.close()
        return books, None

    return go


def test_a_run_that_only_skips_stops_and_can_be_resumed(run, tmp_path):
    books, message = run(bad={1, 3, 4})
    assert "2 updates in a row were skipped" in message
    assert [r.skipped for r in books.reports.values()] == [False, True, False, True, True]
    assert [r.skipped_total for r in books.reports.values()] == [0, 1, 1, 2, 3]
    assert [path.name for path in (tmp_path / "out" / "dumps").iterdir()] == ["step-000002.0"]
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    guard = json.loads((checkpoint / "trainer_state.json").read_text())["guard"]
    norms = [r.grad_norm for r in books.reports.values() if math.isfinite(r.grad_norm)]
    assert guard == {"norms": norms, "skipped": 3, "skipped_in_a_row": 0}

    again, message = run(bad=set())
    assert message is None
    assert again.resumed["step"] == 5
    assert {step: r.skipped_total for step, r in again.reports.items()} == {6: 3}
