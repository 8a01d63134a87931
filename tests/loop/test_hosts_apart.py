"""Hosts that share no folder with the controller: their files go to the store, from which the run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_trainer import STATE
from test_training import Run

from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.open import open_folder
from megatron_fleet.trainer import state_files
from megatron_fleet.trainer.base import TrainerLost

NO_EXPORT = "checkpoint.export.last=false"


class Apart(Run):
    """A run whose ranks have a disk of their own."""

    def __init__(self, out: Path, *overrides: str):
        self.place = out.parent
        store = f"checkpoint.store.url={self.place}/store"
        super().__init__(out, "run.id=apart_1", store, NO_EXPORT, *overrides)

    def fresh(self) -> None:
        super().fresh()
        self.trainer.info = self.trainer.info.__class__(512, 4096, part_bytes=(), hosts_apart=True)
        self.trainer.disk = self.place / "other-host"

    def store(self) -> RunStore:
        config = self.config
        return RunStore(f"{self.place}/store/{config.run.project}/{Path(config.model.path).name}/apart_1")


async def test_every_host_sends_its_files_and_the_run_resumes_from_the_store(tmp_path):
    whole = Run(tmp_path / "whole", NO_EXPORT)
    await whole.go()
    run = Apart(tmp_path / "run")
    run.trainer.fail_next("optim_step", RuntimeError("power cut"), after=3)
    with pytest.raises(RuntimeError, match="power cut"):
        await run.go()
    assert run.store().steps() == [2]
    assert STATE in open_folder(run.store().url_of(2)).sizes()
    assert not list((run.out / "checkpoints").iterdir()) and not list((tmp_path / "other-host").glob(".step_000004*"))
    run.fresh()
    run.take()
    await run.go()
    assert "fetch_state step_000002" in run.take()
    assert run.store().steps() == [4, 2]
    assert not list((tmp_path / "other-host").iterdir())
    assert run.rows() == whole.rows()
    np.testing.assert_array_equal(run.trainer.weights, whole.trainer.weights)


@pytest.mark.slow
async def test_a_lost_trainer_goes_on_from_the_store(tmp_path):
    whole = Run(tmp_path / "whole", NO_EXPORT)
    await whole.go()
    run = Apart(tmp_path / "run")
    run.trainer.fail_next("optim_step", TrainerLost("its host is gone"), after=3)
    await run.go()
    assert run.trainer.restarts == ["its host is gone"]
    assert run.rows() == whole.rows() and run.store().steps() == [4, 2]


async def test_a_trainer_that_is_lost_during_an_upload_leaves_no_checkpoint(tmp_path):
    run = Apart(tmp_path / "run", "checkpoint.interval=3", "run.steps=3")
    sent = run.trainer.send_state

    async def die(*what):
        if not run.trainer.restarts:
            run.trainer.die("its host is gone")
        return await sent(*what)

    run.trainer.send_state = die
    await run.go()
    assert run.trainer.restarts == ["its host is gone"] and run.store().steps() == [3]


@pytest.mark.parametrize(
    ("override", "message"),
    [("checkpoint.store.url=null", r"checkpoint\.store\.url is null"), ("checkpoint.export.last=true", "exports need")],
)
async def test_what_needs_a_shared_folder_is_refused_at_the_start(tmp_path, override, message):
    run = Apart(tmp_path / "run", override)
    with pytest.raises(UserError, match=message):
        await run.go()
    assert not (run.out / "metrics.jsonl").exists()


def test_each_file_is_sent_by_the_rank_that_wrote_it():
    sizes = {"__0_0.distcp": 1, "__1_0.distcp": 2, "__10_0.distcp": 3, ".metadata": 4, "records/config.json": 5}
    sent = [state_files.own_files(rank, sizes) for rank in (0, 1, 10)]
    assert sent[1:] == [{"__1_0.distcp": 2}, {"__10_0.distcp": 3}]
    assert sent[0] == {"__0_0.distcp": 1, ".metadata": 4, "records/config.json": 5}
