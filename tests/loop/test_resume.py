"""Where a run begins: damaged checkpoints are passed over, records of an earlier run are never overwritten."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from fake_trainer import STATE
from test_training import OVERRIDES, Run
from waiting import until

from megatron_fleet import cli
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.checkpoint.resume_point import set_aside
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.loop.stopping import Stopped
from megatron_fleet.telemetry.registry import METRICS
from megatron_fleet.trainer.base import TrainerLost


def flip(out: Path, step: int) -> Path:
    """Flip one bit of a checkpoint's weights; the file."""
    file = out / "checkpoints" / f"step_{step:06d}" / STATE
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    return file


async def test_flipped_bits_send_a_run_back_to_the_checkpoint_before(tmp_path, caplog):
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    run = Run(tmp_path / "run", "run.steps=6")
    run.trainer.fail_next("export_hf", RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        await run.go()
    damaged = flip(run.out, 6)
    run.take()
    run.fresh()
    await run.go()
    assert f"{damaged} is damaged, its SHA-256" in caplog.text
    assert "the run resumes from step 4" in caplog.text
    assert run.take()[1:5] == ["wait_ready", "begin_update", "send_weights 4", "finish_update 4"]
    assert run.rows() == whole.rows()
    np.testing.assert_array_equal(run.trainer.weights, whole.trainer.weights)
    Checkpoint.open(damaged.parent).verify()  # saved anew


async def test_a_restarted_trainer_does_not_load_flipped_bits(tmp_path, caplog):
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    run = Run(tmp_path / "run", "run.steps=6")
    collect = run.rollout.collect

    async def flipping(request, *how):
        if (request.step, request.first) == (5, 0) and not run.trainer.restarts:
            await until((run.out / "checkpoints" / "step_000004").exists)
            flip(run.out, 4)
            run.trainer.die("rank 3 was killed by SIGKILL")
        return await collect(request, *how)

    run.rollout.collect = flipping
    await run.go()
    assert run.trainer.restarts == ["rank 3 was killed by SIGKILL"]
    assert "the run resumes from step 2" in caplog.text
    assert run.rows() == whole.rows()


def records(out: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {path.relative_to(out).as_posix(): path.read_bytes() if path.is_file() else None for path in out.rglob("*")}


async def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(tmp_path, capsys):
    run = Run(tmp_path / "run")
    await run.go()
    flip(run.out, 2)
    damaged, before = flip(run.out, 4), records(run.out)
    assert await asyncio.to_thread(cli.main, ["train", *OVERRIDES, f"run.out={run.out}"]) == 2
    printed = capsys.readouterr().err
    assert f"error: {damaged} is damaged, its SHA-256 is not that of the manifest.json, and" in printed
    assert "choose another run.out, or start over with run.resume=never" in printed
    assert records(run.out) == before


async def test_never_to_resume_moves_the_earlier_records_aside(tmp_path):
    first = Run(tmp_path / "run")
    await first.go()
    second = Run(tmp_path / "run", "run.resume=never", "run.seed=7")
    before, earlier = records(first.out), first.rows()
    second.trainer._fail = {"optim_step": {4: TrainerLost("gone")}}
    await second.go()
    assert second.trainer.restarts == ["gone"], "a restart resumes from the checkpoint of the same run"
    assert records(tmp_path / "run.1") == before
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.rows() != earlier
    await Run(tmp_path / "run", "run.resume=never").go()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]


async def test_never_to_resume_does_not_move_what_the_run_needs(tmp_path):
    run = Run(tmp_path / "run")
    await run.go()
    (run.out / "model").mkdir()
    config = load([*OVERRIDES, f"run.out={run.out}", "run.resume=never", f"model.path={run.out}/model"])
    with pytest.raises(UserError, match=r"moves this folder aside, and the run needs .*/model in it; choose another"):
        set_aside(config)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


async def test_a_run_that_never_came_to_a_record_starts_where_it_is(tmp_path):
    config = load([*OVERRIDES, f"run.out={tmp_path}/run", "run.resume=never"])
    (tmp_path / "run" / "logs").mkdir(parents=True)
    set_aside(config)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def stored(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides of the run ``mine_1`` with a store in ``folder``."""
    return ("run.id=mine_1", f"checkpoint.store.url={folder}/store", "run.steps=6", *overrides)


async def test_a_run_goes_on_by_its_id_on_another_machine(tmp_path):
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    first = Run(tmp_path / "here", *stored(tmp_path))
    first.trainer.fail_next("export_hf", RuntimeError("power cut"))
    first.config = first.config.model_copy(update={"run": first.config.run.model_copy(update={"steps": 4})})
    (first.out / "slack.json").write_text("{}")
    with pytest.raises(RuntimeError, match="power cut"):
        await first.go()
    other = Run(tmp_path / "there", *stored(tmp_path, "run.resume=must"))
    await other.go()
    assert other.take()[1:5] == ["wait_ready", "begin_update", "send_weights 4", "finish_update 4"]
    assert other.rows() == whole.rows()
    assert (other.out / "slack.json").read_text() == "{}", "messages go on in the same thread"
    np.testing.assert_array_equal(other.trainer.weights, whole.trainer.weights)
    rows = [json.loads(line) for line in (other.out / "metrics.jsonl").read_text().splitlines()]
    emitted = {name for name in rows[-1] if name.startswith("checkpoint/")}
    wanted = {m.pattern for m in METRICS if m.pattern.startswith("checkpoint/")}
    assert emitted == {name for name in wanted if not name.startswith("checkpoint/export")}  # there are none
    store = tmp_path / "store" / "megatron_fleet" / "tiny" / "mine_1"
    assert sorted(path.name for path in store.glob("global_step_*")) == [f"global_step_{n}" for n in (2, 4, 6)]
    for path in store.glob("global_step_*"):
        Checkpoint.open(path).verify()


async def test_a_damaged_checkpoint_here_is_replaced_by_that_of_the_store(tmp_path, caplog):
    run = Run(tmp_path / "run", *stored(tmp_path))
    await run.go()
    damaged = flip(run.out, 6)
    again = Run(tmp_path / "run", *stored(tmp_path, "run.steps=8"))
    await again.go()
    assert f"{damaged} is damaged" in caplog.text
    assert again.take()[1:5] == ["wait_ready", "begin_update", "send_weights 6", "finish_update 6"]
    Checkpoint.open(damaged.parent).verify()


async def test_a_damaged_checkpoint_of_the_store_is_passed_over(tmp_path, caplog):
    run = Run(tmp_path / "run", *stored(tmp_path))
    await run.go()
    (damaged,) = (tmp_path / "store").rglob(f"global_step_6/{STATE}")
    damaged.write_bytes(damaged.read_bytes()[::-1])
    other = Run(tmp_path / "other", *stored(tmp_path))
    await other.go()
    assert "skipping a damaged checkpoint" in caplog.text and str(damaged) not in other.take()
    assert other.rows() == run.rows()
    Checkpoint.open(damaged.parent).verify()  # sent anew


async def test_a_store_that_refuses_is_an_error_and_no_fresh_start(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", *stored(tmp_path))
    await run.go()

    def refuse(*_):
        raise UserError("s3://bucket: the store does not answer.")

    monkeypatch.setattr(RunStore, "download", refuse)
    other = Run(tmp_path / "other", *stored(tmp_path))
    with pytest.raises(UserError, match="the store does not answer"):
        await other.go()
    assert other.take() == [] and not (other.out / "metrics.jsonl").exists()


async def test_a_given_step_is_gone_on_from_and_later_ones_do_not_count(tmp_path):
    run = Run(tmp_path / "run", *stored(tmp_path), "checkpoint.keep=9")
    await run.go()
    back = Run(tmp_path / "run", *stored(tmp_path), "run.resume=2", "run.steps=3", "run.seed=0")
    await back.go()
    assert back.take()[1:5] == ["wait_ready", "begin_update", "send_weights 2", "finish_update 2"]
    names = sorted(path.name for path in (back.out / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003", "step_000004.superseded", "step_000006.superseded"]
    other = Run(tmp_path / "other", *stored(tmp_path))
    await other.go()
    assert other.take()[1:5] == ["wait_ready", "begin_update", "send_weights 3", "finish_update 3"]


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ("must", r"run.resume=must: there is no checkpoint in .*other and .*mine_2; correct run.out or run.id"),
        ("4", r"run.resume=4: there is no checkpoint of this step in .*other and .*mine_2; choose another step"),
    ],
)
async def test_what_is_asked_for_and_not_there_is_refused(tmp_path, resume, words):
    run = Run(tmp_path / "other", *stored(tmp_path), "run.id=mine_2", f"run.resume={resume}")
    with pytest.raises(UserError, match=words):
        await run.go()
    assert run.take() == []


async def test_a_new_run_does_not_take_the_place_of_a_stored_one(tmp_path):
    await Run(tmp_path / "run", *stored(tmp_path)).go()
    with pytest.raises(UserError, match=r"run.resume=never: .*mine_1 has checkpoints of an earlier run; choose anoth"):
        await Run(tmp_path / "other", *stored(tmp_path), "run.resume=never").go()


async def test_checkpoints_that_never_came_to_the_store_are_sent_by_the_next_attempt(tmp_path, monkeypatch):
    def hang(store, checkpoint, stop):
        stop.wait()
        raise CancelledError

    run = Run(tmp_path / "run", *stored(tmp_path), "checkpoint.store.drain_timeout_s=0")
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "upload", hang)
        await run.go()
    assert len(list((run.out / "checkpoints").iterdir())) == 3  # one more than checkpoint.keep: they are needed still
    assert list((tmp_path / "store").rglob("manifest.json")) == []
    await Run(tmp_path / "run", *stored(tmp_path)).go()
    assert len(list((tmp_path / "store").rglob("manifest.json"))) == 3


async def test_a_run_goes_on_without_a_checkpoint_if_it_may(tmp_path, caplog):
    run = Run(tmp_path / "run", "checkpoint.on_failure=continue", "run.steps=6")
    run.trainer.fail_next("copy_state", OSError("No space left on device"))
    await run.go()
    assert "step 2 has no checkpoint: No space left on device" in caplog.text
    assert [row["checkpoint/failed"] for row in run.rows()] == [0, 1, 1, 1, 1, 1]
    stops = Run(tmp_path / "stops")
    stops.trainer.fail_next("copy_state", OSError("No space left on device"))
    with pytest.raises(UserError, match=r"No space .*; make room in "):
        await stops.go()


async def test_the_best_checkpoint_and_every_third_are_kept(tmp_path):
    keep = ("checkpoint.interval=1", "checkpoint.keep=1", "checkpoint.keep_every=3", "run.steps=8")
    run = Run(tmp_path / "run", *keep, "checkpoint.keep_best=trainer/learning_rate")
    await run.go()
    names = sorted(path.name for path in (run.out / "checkpoints").iterdir())
    assert names == [f"step_00000{n}" for n in (3, 6, 8)]


async def test_a_step_is_trained_while_the_checkpoint_before_is_written(tmp_path):
    run = Run(tmp_path / "run", "run.steps=6")
    written = asyncio.Event()

    async def wait():
        await written.wait()

    def third_step(data, loss):
        assert written.is_set() or not (run.out / "checkpoints" / "step_000002").exists()
        written.set()
        return trained(data, loss)

    trained = run.trainer.forward_backward
    run.trainer.before_writing = wait

    async def collect(request, *how):
        if request.step == 2:
            run.trainer.forward_backward = third_step
        return await played(request, *how)

    played, run.rollout.collect = run.rollout.collect, collect
    await run.go()
    whole = Run(tmp_path / "whole", "run.steps=6", "checkpoint.asynchronous=false")
    await whole.go()
    assert run.rows() == whole.rows()
    for step in (4, 6):
        a, b = (Checkpoint.open(each.out / "checkpoints" / f"step_{step:06d}") for each in (run, whole))
        assert (a.path / STATE).read_bytes() == (b.path / STATE).read_bytes()
        assert a.trainer_state() == b.trainer_state()


async def test_a_checkpoint_that_fails_while_it_is_written(tmp_path, caplog):
    async def fail():
        raise OSError("No space left on device")

    stops = Run(tmp_path / "stops")
    stops.trainer.before_writing = fail
    with pytest.raises(UserError, match=r"No space .*; make room in "):
        await stops.go()
    assert stops.rows()[-1]["step"] == 2 and list((stops.out / "checkpoints").iterdir()) == []
    goes_on = Run(tmp_path / "goes on", "checkpoint.on_failure=continue")
    goes_on.trainer.before_writing = fail
    await goes_on.go()
    assert goes_on.rows()[-1]["checkpoint/failed"] == 1 and "step 4 has no checkpoint: No space" in caplog.text


async def test_a_lost_trainer_ends_the_checkpoint_that_it_was_writing(tmp_path):
    run = Run(tmp_path / "run", "run.steps=6")

    async def die():
        if not run.trainer.restarts and run.trainer.calls.count("copy_state") == 2:
            run.trainer.die("gone")
            raise TrainerLost("gone")

    run.trainer.before_writing = die
    await run.go()
    assert run.trainer.restarts == ["gone"]
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    assert run.rows() == whole.rows()


async def test_a_checkpoint_is_finished_before_a_stopped_run_ends(tmp_path):
    run, writing, written = Run(tmp_path / "run"), asyncio.Event(), asyncio.Event()

    async def wait():
        writing.set()
        await written.wait()

    run.trainer.before_writing = wait
    going = asyncio.create_task(run.go())
    await writing.wait()
    await until(lambda: "collect train 2" in run.calls)
    going.cancel()
    await asyncio.sleep(0.05)
    assert not going.done()
    written.set()
    with pytest.raises(asyncio.CancelledError):
        await going
    Checkpoint.open(run.out / "checkpoints" / "step_000002").verify()


@pytest.mark.parametrize("asked_in", ["rollout", "update", "evaluation"])
async def test_a_run_that_is_to_end_saves_first_and_loses_nothing(tmp_path, asked_in):
    """Episodes and evaluations are abandoned, an update is finished."""
    changes = ("run.steps=6", "checkpoint.interval=9", "eval.interval=3")
    run, whole = Run(tmp_path / "run", *changes), Run(tmp_path / "whole", *changes)
    await whole.go()
    played, trained = run.rollout.collect, run.trainer.forward_backward

    async def collect(request, *callbacks, **named):
        now = "evaluation" if request.purpose == "eval" else "rollout" if request.step == 3 else None
        if now == asked_in:
            run.stop.ask("SIGUSR1")
            await asyncio.sleep(3600)
        return await played(request, *callbacks, **named)

    async def train(*arguments):
        if asked_in == "update" and run.trainer.calls.count("forward_backward") == 3:
            run.stop.ask("SIGUSR1")
        return await trained(*arguments)

    run.rollout.collect, run.trainer.forward_backward = collect, train
    with pytest.raises(Stopped, match="SIGUSR1"):
        await run.go()
    saved = 4 if asked_in == "update" else 3
    assert run.stop.saved_step == saved
    run.take()
    run.fresh()
    await run.go()
    assert run.take()[1:5] == ["wait_ready", "begin_update", f"send_weights {saved}", f"finish_update {saved}"]
    np.testing.assert_array_equal(run.trainer.weights, whole.trainer.weights)
    assert run.rows() == whole.rows()


async def test_a_run_that_is_to_end_before_its_first_step_has_nothing_to_save(tmp_path):
    run = Run(tmp_path / "run")
    run.stop.ask("SIGTERM")
    with pytest.raises(Stopped):
        await run.go()
    assert run.stop.saved_step is None and not (run.out / "checkpoints").exists()


async def test_a_newer_checkpoint_here_goes_before_those_of_the_store(tmp_path, monkeypatch):
    def hang(store, checkpoint, stop):
        stop.wait()
        raise CancelledError

    await Run(tmp_path / "run", *stored(tmp_path), "run.steps=4").go()
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "upload", hang)
        await Run(tmp_path / "run", *stored(tmp_path), "checkpoint.store.drain_timeout_s=0").go()
    again = Run(tmp_path / "run", *stored(tmp_path), "run.steps=8")
    await again.go()
    assert again.take()[1:5] == ["wait_ready", "begin_update", "send_weights 6", "finish_update 6"]


async def test_a_trainer_that_is_lost_before_it_ever_was_ready_is_started_again(tmp_path):
    run = Run(tmp_path / "run")
    info, revive = run.trainer.info, run.trainer.revive
    del run.trainer.info  # known once the ranks are built

    def ready():
        run.trainer.info = info
        revive()

    run.trainer.revive = ready
    run.trainer.fail_next("start", TrainerLost("gone"))
    await run.go()
    assert run.trainer.restarts == ["gone"] and [row["step"] for row in run.rows()] == [1, 2, 3, 4]
