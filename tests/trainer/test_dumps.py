"""Dumps on disk: whole or not at all, and how many."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet import cli
from megatron_fleet.debug.dumps import Dumps, Record, open_dump
from megatron_fleet.loop.safety import Verdict
from megatron_fleet.platform.communicator import Alone

RECORD = Record(1, 0, "spike", "cpu", 1e-3, 0.0, 1.0, 0.1, [[0.0]], [], [], 35)
BAD = Record(7, 1, "not_finite", "cpu", 1e-3, math.nan, math.inf, 0.1, [[0.5, math.nan], [-math.inf]], ["w"], ["g"], 35)


class Saver:
    """What a dump asks of a policy."""

    dp_rank, dp_size = 0, 1

    def save_state(self, path):
        path.mkdir()
        (path / "0.distcp").write_bytes(b"state")


@pytest.fixture
def config(tmp_path):
    return make_config(write_config(tmp_path / "model"))


@pytest.mark.parametrize("record", [RECORD, BAD])
def test_a_dump_comes_back(tmp_path, config, record):
    rows = [make_batch(count=2), []]
    path = Dumps(tmp_path / "dumps", 1, Alone()).save(config, Saver(), rows, record)
    assert path.name == f"step-00000{record.step}.{record.part}"
    dump = open_dump(path)
    assert str(dump.record) == str(record)  # nan is nan here
    assert dump.config_file.read_text() == config.model_dump_json(indent=2) + "\n"
    assert (dump.model / "config.json").read_text() == (tmp_path / "model" / "config.json").read_text()
    if len(record.row_losses) == 1:
        assert [len(row) for row in dump.rows()[0]] == [2, 0]


def test_spikes_leave_a_place_whatever_comes_first(tmp_path, config):
    def room(verdict, *kept):
        folder = tmp_path / "-".join(["after", *kept])
        dumps = Dumps(folder, 2, Alone())
        for step, name in enumerate(kept):
            dumps.save(config, Saver(), [[]], replace(RECORD, step=step, verdict=name))
        return dumps.room(verdict)

    spike, bad = Verdict.SPIKE.value, Verdict.NOT_FINITE.value
    assert room(Verdict.SPIKE) and room(Verdict.SPIKE, bad)
    assert not room(Verdict.SPIKE, spike) and not room(Verdict.SPIKE, bad, spike)
    assert room(Verdict.NOT_FINITE, spike) and room(Verdict.NOT_FINITE, bad)
    assert not room(Verdict.NOT_FINITE, bad, bad)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda dump: (dump / "record.json").unlink(),
            "is no dump, record.json is missing; name a folder below dumps/",
        ),
        (lambda dump: (dump / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda dump: (dump / "rows_0000.npz").write_bytes(b"PK"), "rows_0000.npz: bytes is 2"),
    ],
)
def test_what_is_no_whole_dump_is_refused(tmp_path, config, capsys, damage, message):
    dump = Dumps(tmp_path / "dumps", 1, Alone()).save(config, Saver(), [make_batch(count=1)], RECORD)
    damage(dump)
    assert cli.main(["debug", "replay", str(dump)]) == 2
    assert message in capsys.readouterr().err


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from policy_fixtures import make_batch, make_config
from megatron_fleet.checkpoint import checkpoints
from megatron_fleet.debug.dumps import Dumps, Record
from megatron_fleet.platform.communicator import Alone

def torn(file, value):
    file.write_text('{"form')
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints.write_json = torn
folder = Path(sys.argv[2])
record = Record(1, 0, "spike", "cpu", 1e-3, 0.0, 1.0, 0.1, [[0.0]], [], [], 1)

class Saver:
    dp_rank, dp_size = 0, 1

    def save_state(self, path):
        path.mkdir()

Dumps(folder / "dumps", 1, Alone()).save(make_config(folder / "model"), Saver(), [make_batch(count=1)], record)
"""


def test_a_kill_in_the_middle_of_a_dump_leaves_none(tmp_path, capsys):
    write_config(tmp_path / "model")
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", KILLED, here, tmp_path], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "dumps").iterdir()
    assert left.name == ".step-000001.0.partial"
    assert cli.main(["debug", "replay", str(left)]) == 2
    assert "manifest.json: malformed" in capsys.readouterr().err
    dumps = Dumps(tmp_path / "dumps", 1, Alone())
    assert (
        list((tmp_path / "dumps").iterdir()) == []
        and dumps.room(Verdict.SPIKE) is False
        and dumps.room(Verdict.NOT_FINITE)
    )
