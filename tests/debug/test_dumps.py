"""Dumps on disk: whole or not at all, and how many."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_trainer import FakeTrainer
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet import cli
from megatron_fleet.debug.dumps import Dumps, Record, Verdict, open_dump
from megatron_fleet.trainer.base import MicroBatchLoss

RECORD = Record(1, 0, "spike", "cpu", 1e-3, 0.0, 1.0, 0.1, [MicroBatchLoss([0, 1], 0.0)], [], [], 35)
LOSSES = [MicroBatchLoss([3, 0], 0.5), MicroBatchLoss([1], math.nan), MicroBatchLoss([2], -math.inf)]
BAD = Record(7, 1, "not_finite", "cpu", 1e-3, math.nan, math.inf, 0.1, LOSSES, ["w"], ["g"], 35)


@pytest.fixture
def config(tmp_path):
    return make_config(write_config(tmp_path / "model"))


@pytest.mark.parametrize("record", [RECORD, BAD])
async def test_a_dump_comes_back(tmp_path, config, record):
    data = make_batch(count=4)
    path = await Dumps(tmp_path / "dumps", 1, config).save(FakeTrainer().save_state, data, record)
    assert path.name == f"step-00000{record.step}.{record.part}"
    dump = open_dump(path)
    assert str(dump.record) == str(record)  # nan is nan here
    assert dump.config_file.read_text() == config.model_dump_json(indent=2) + "\n"
    assert (dump.model / "config.json").read_text() == (tmp_path / "model" / "config.json").read_text()
    assert [d.token_ids.tolist() for d in dump.data()] == [d.token_ids.tolist() for d in data]
    again = FakeTrainer()
    again.weights += 1
    await again.load_state(dump.state)
    assert not again.weights.any()


async def test_spikes_leave_a_place_whatever_comes_first(tmp_path, config):
    async def place(verdict, *kept):
        dumps = Dumps(tmp_path / "-".join(["after", *kept]), 2, config)
        for step, name in enumerate(kept):
            await dumps.save(FakeTrainer().save_state, [], replace(RECORD, step=step, verdict=name))
        return dumps.has_place(verdict)

    spike, bad = Verdict.SPIKE.value, Verdict.NOT_FINITE.value
    assert await place(Verdict.SPIKE) and await place(Verdict.SPIKE, bad)
    assert not await place(Verdict.SPIKE, spike) and not await place(Verdict.SPIKE, bad, spike)
    assert await place(Verdict.NOT_FINITE, spike) and await place(Verdict.NOT_FINITE, bad)
    assert not await place(Verdict.NOT_FINITE, bad, bad)


def flipped(file: Path) -> bytes:
    content = file.read_bytes()
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda dump: (dump / "record.json").unlink(),
            "is not a dump, record.json is missing; name a folder below dumps/",
        ),
        (lambda dump: (dump / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda dump: (dump / "data.npz").write_bytes(b"PK"), "data.npz has 2 bytes"),
        (lambda dump: (dump / "state" / "state.json").unlink(), "state.json is missing"),
        (
            lambda dump: (dump / "state" / "state.json").write_bytes(flipped(dump / "state" / "state.json")),
            "state.json is damaged, its SHA-256 is not that of the manifest.json",
        ),
    ],
)
async def test_what_is_no_whole_dump_is_refused(tmp_path, config, capsys, damage, message):
    dump = await Dumps(tmp_path / "dumps", 1, config).save(FakeTrainer().save_state, make_batch(count=1), RECORD)
    damage(dump)
    assert cli.main(["debug", "replay", str(dump)]) == 2
    assert message in capsys.readouterr().err


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from fake_trainer import FakeTrainer
from policy_fixtures import make_batch, make_config, write_config
from megatron_fleet.checkpoint import checkpoints
from megatron_fleet.debug.dumps import Dumps
from megatron_fleet.debug.dumps import Record

def torn(file, data):
    file.write_text('{"form')
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    checkpoints.write_atomically = torn
    folder = Path(sys.argv[1])
    record = Record(1, 0, "spike", "cpu", 1e-3, 0.0, 1.0, 0.1, [], [], [], 1)
    config = make_config(write_config(folder / "model"))
    await Dumps(folder / "dumps", 1, config).save(FakeTrainer().save_state, make_batch(count=1), record)

asyncio.run(main())
"""


def test_a_kill_in_the_middle_of_a_dump_leaves_none(tmp_path, config, capsys):
    shared = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, shared], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "dumps").iterdir()
    assert left.name == ".step-000001.0.partial"
    assert cli.main(["debug", "replay", str(left)]) == 2
    assert "manifest.json: line 1, column" in capsys.readouterr().err
    dumps = Dumps(tmp_path / "dumps", 1, config)
    assert list((tmp_path / "dumps").iterdir()) == []
    assert not dumps.has_place(Verdict.SPIKE)
    assert dumps.has_place(Verdict.NOT_FINITE)
