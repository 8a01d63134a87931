"""A run that is interrupted anywhere and resumed ends like an undisturbed one: each ``await``, three signals.

Each attempt is a process of its own with the trainer and the rollout in memory, and gets a real signal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from interruptions import Interruptions, Moment, Place, awaits
from test_training import Run
from turns import in_turn

from megatron_fleet.config.errors import UserError
from megatron_fleet.loop.stopping import REQUEUE, StopRequest, until_stopped
from megatron_fleet.storage.open import open_folder
from megatron_fleet.telemetry.shards import Shard
from megatron_fleet.trainer.base import TrainerLost

pytestmark = pytest.mark.slow

SETTINGS = (
    "env.outage_limit_s=0.05",
    "run.steps=3", "checkpoint.interval=2", "checkpoint.export.check=true", "algorithm.kl.coef=0.1",
    "eval.at_start=true", "eval.interval=1", "eval.at_end=true", "eval.greedy=true",
)  # fmt: skip
COLOCATED, OVERLAPPED = ("rollout.engine.colocated=true",), ("eval.overlap=true",)
BOTH, APART = (*COLOCATED, *OVERLAPPED), ("eval.engines=1",)


def attempt(
    settled: Run, out: Path, *moments: Moment, lost: bool = False, outage: bool = False, writing_s: float = 0.01
) -> tuple[int, list[Place]]:
    """One process: its exit status (negative: killed), and where it waited, in order.

    Args:
        settled: the run, but for its folder; composing the configuration takes longest.
        lost: the trainer dies in its third optimizer step.
        outage: no reward is known from the second step on.
        writing_s: seconds until a copied checkpoint is written.
    """
    log = out.with_suffix(".places")
    process = os.fork()
    if process == 0:
        status = 99
        try:
            with log.open("w", buffering=1) as places:
                output = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                interruptions = Interruptions(*moments, told=lambda place: print(*place, sep="\t", file=places))
                os.fsync = lambda file: None  # the machine does not die
                run = settled.moved(out)
                run.trainer.before_writing = lambda: asyncio.sleep(writing_s)
                run.rollout.delays = dict.fromkeys(range(4), 0.005)  # of evaluations, too
                if lost:
                    run.trainer.fail_next("optim_step", TrainerLost("gone"), after=2)
                if outage:
                    run.rollout.unknown = set(range(1, 1000))

                async def go(stop: StopRequest) -> None:
                    interruptions.install()
                    run.stop = stop
                    await asyncio.create_task(run.go())  # the task that runs this one was made before
                    (out / "weights.json").write_text(json.dumps(run.trainer.weights.tolist()))

                status = asyncio.run(until_stopped(go))
        except UserError:
            status = 2
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return status, [Place(*line.split("\t")) for line in log.read_text().splitlines()]


def outcome(settled: Run, out: Path) -> dict[str, Any]:
    """All that a run leaves, without what clocks say."""
    summary = json.loads((out / "summary.json").read_text())
    folder = open_folder(out / "trajectories")
    shards = {name: Shard(folder, name, size) for name, size in sorted(folder.sizes().items())}
    return {
        "rows": settled.moved(out).rows(),
        "summary": {name: value for name, value in summary.items() if "seconds" not in name},
        "episodes": {name: shard.records() for name, shard in shards.items()},
        "tokens": {name: shard.arrays()["token_ids"].tolist() for name, shard in shards.items()},
        "dumps": sorted(path.relative_to(out).as_posix() for path in (out / "dumped_evals").rglob("*")),
        "weights": (out / "weights.json").read_text(),
        "hf": (out / "hf" / "model.json").read_text(),
        "checkpoints": sorted(path.name for path in (out / "checkpoints").iterdir()),
    }


PARTS = 4


def moments(places: Sequence[Place], part: int) -> Iterator[Moment]:
    """One moment at each place. All parts together have its first and its last suspension, with each signal once."""
    for number, place in enumerate(dict.fromkeys(places)):
        last = places.count(place)
        once = [Moment(place, 1, signal.SIGTERM), Moment(place, last, signal.SIGKILL), Moment(place, 1, signal.SIGINT)]
        kinds = [*once, *([Moment(place, last, signal.SIGTERM)] if last > 1 else [])]
        if (kind := (number + part) % PARTS) < len(kinds):
            yield kinds[kind]


def statement(place: Place) -> str:
    """The innermost ``await`` of ``train.py`` at a place."""
    return awaits()[int(place.outer.rpartition(":")[2])]


STATUS = {signal.SIGTERM: (REQUEUE, 143, 0), signal.SIGINT: (130,), signal.SIGKILL: (-signal.SIGKILL,)}
"""Exit statuses after a signal: a run that is asked to end once nothing is left to abandon comes to its end."""


@pytest.fixture
def undisturbed(setting, tmp_path):
    """A run of three steps, where it waited, and what it left."""
    whole = Run(tmp_path / "whole", *SETTINGS, *setting)
    status, places = attempt(whole, whole.out)
    assert status == 0, whole.out.with_suffix(".log").read_text()
    expected = outcome(whole, whole.out)
    assert [row["step"] for row in expected["rows"] if "eval/all/episodes" in row] == [0, 1, 2, 3]
    return whole, places, expected


@pytest.mark.parametrize(
    ("setting", "part"),
    in_turn([(setting, part) for part in range(PARTS) for setting in (COLOCATED, OVERLAPPED, BOTH)], of=3 * PARTS),
)
def test_a_run_that_is_interrupted_anywhere_ends_like_an_undisturbed_one(undisturbed, tmp_path, part):
    whole, places, expected = undisturbed
    wrong, missed, number = interrupted(whole, places, part, tmp_path, lambda found: found == expected)
    assert wrong == [] and missed <= 1 + number // 20


def interrupted(
    whole: Run, places: Sequence[Place], part: int, folder: Path, same: Callable[[dict[str, Any]], bool]
) -> tuple[list[str], int, int]:
    """Interrupt and resume a run at each moment; returns what went wrong, how many moments were missed, and the number
    of the last. ``same``: whether a resumed run left what it should.
    """
    wrong, missed, number = [], 0, 0
    for number, (place, count, sent) in enumerate(moments(places, part)):
        out = folder / str(number)
        first, waited = attempt(whole, out, Moment(place, count, sent))
        if waited.count(place) < count:
            missed += bool(place.outer)
            continue  # a task beside the loop did not wait as often, or the loop not for one that was faster
        then, _ = attempt(whole, out)
        if first not in STATUS[sent] or then != 0 or not same(outcome(whole, out)):
            wrong.append(f"{sent.name} at {place}, time {count}: ended with {first}, then with {then}")
    return wrong, missed, number


def parted(found: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What training leaves, and the metrics of evaluations by step."""
    evaluations = {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in found["rows"]}
    training = {
        "rows": [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in found["rows"] if row["step"]],
        "weights": found["weights"],
        "hf": found["hf"],
        "checkpoints": found["checkpoints"],
    }
    for kind in ("episodes", "tokens"):
        training[kind] = {name: value for name, value in found[kind].items() if name.startswith("step_")}
    lags = ("eval/lag_steps", "eval/lag_s")
    scores = {step: {k: v for k, v in row.items() if k not in lags} for step, row in evaluations.items()}
    return training, {step: row for step, row in scores.items() if row}


@pytest.mark.parametrize(("setting", "part"), in_turn([(APART, part) for part in range(PARTS)], of=PARTS))
def test_an_interruption_costs_evaluation_engines_at_most_an_evaluation(undisturbed, tmp_path, part):
    """Weights between two checkpoints are gone when a run is resumed; those of a checkpoint are evaluated."""
    whole, places, expected = undisturbed
    training, scores = parted(expected)

    def same(found: dict[str, Any]) -> bool:
        trained, evaluated = parted(found)
        known = all(scores[step] == row for step, row in evaluated.items())
        return trained == training and {2, 3} <= evaluated.keys() and known

    wrong, missed, number = interrupted(whole, places, part, tmp_path, same)
    assert wrong == [] and missed <= 1 + number // 10


@pytest.mark.parametrize("setting", [COLOCATED])
def test_a_run_that_is_killed_while_it_saves_before_its_end_ends_like_an_undisturbed_one(undisturbed, tmp_path):
    whole, places, expected = undisturbed
    evaluating = next(place for place in places if "_one_step" in place.outer and "catch_up" in statement(place))
    stopped = Moment(evaluating, 1, signal.SIGTERM)  # after step 1, which has no checkpoint
    status, waited = attempt(whole, tmp_path / "saved", stopped)
    assert status == REQUEUE
    saving = waited[waited.index(evaluating) + 1 :]
    assert any("_save_now" in place.outer for place in saving)
    wrong = []
    for number, place in enumerate(dict.fromkeys(saving)):
        out = tmp_path / str(number)
        first, _ = attempt(whole, out, stopped, Moment(place, 1, signal.SIGKILL))
        then, _ = attempt(whole, out)
        if first != -signal.SIGKILL or then != 0 or outcome(whole, out) != expected:
            wrong.append(f"killed at {place}: ended with {first}, then with {then}")
    assert wrong == []


@pytest.mark.parametrize("setting", [COLOCATED])
def test_each_await_of_the_loop_is_one_at_which_a_run_waits(undisturbed, tmp_path):
    """So the tests above interrupt them all, but those behind a lost trainer and an outage."""
    whole, places, _ = undisturbed
    waited = {*places}
    rollout = next(place for place in places if "_one_step" in place.outer and "next_batch" in statement(place))
    last = (rollout, places.count(rollout))  # while the checkpoint of step 2 is written
    for name, status, moment, how in (
        ("lost", 0, [], {"lost": True}),
        ("outage", 2, [], {"outage": True}),
        ("stopped", REQUEUE, [Moment(*last, signal.SIGTERM)], {"writing_s": 0.3}),
        ("cancelled", 130, [Moment(*last, signal.SIGINT)], {"writing_s": 0.3}),
    ):
        found, there = attempt(whole, tmp_path / name, *moment, **how)
        assert found == status, name
        waited.update(there)
    lines = {int(line.rpartition(":")[2]) for place in waited for line in place.outer.split()}
    assert {line: text for line, text in awaits().items() if line not in lines} == {}
