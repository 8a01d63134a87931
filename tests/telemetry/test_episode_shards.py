"""The one format of episodes: read whole or by parts, and refused whenever it is not what was written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from run_maker import groups, trajectory
from waiting import wait_until

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.telemetry import shards
from megatron_fleet.telemetry.shards import RECORD, SCALARS, Shard, encode
from megatron_fleet.telemetry.trajectories import TrajectoryLog


@pytest.fixture
def some(tmp_path, monkeypatch):
    """Five episodes in row groups of two."""
    monkeypatch.setattr(shards, "ROWS", 2)
    path = tmp_path / "step_000001.parquet"
    path.write_bytes(encode([trajectory(sample=i, ids=list(range(4, 9 + i)), reward=i / 4) for i in range(5)]))
    return path


def test_single_rows_and_columns_are_read(some):
    shard = Shard.open(some)
    whole, arrays = shard.records(), shard.arrays()
    assert (shard.rows, len(whole), len(arrays["offsets"])) == (5, 5, 6)
    assert shard.records(SCALARS, [1, 4]) == [{name: whole[row][name] for name in SCALARS} for row in (1, 4)]
    assert shard.records(RECORD, []) == []
    own = shard.arrays([3])
    for name in ("token_ids", "action_mask", "behaviour_logprobs"):
        assert np.array_equal(own[name], arrays[name][arrays["offsets"][3] : arrays["offsets"][4]]), name


def test_only_what_is_asked_for_is_read(some):
    class Counting(LocalFolder):
        def read(self, name, offset=0, length=None):
            read.append((offset, length))
            return super().read(name, offset, length)

    some.write_bytes(
        encode([trajectory(sample=i, ids=np.random.default_rng(i).permutation(50_000).tolist()) for i in range(9)])
    )
    read, size = [], some.stat().st_size
    shard = Shard(Counting(some.parent), some.name, size)
    assert [row["sample"] for row in shard.records(("sample",))] == list(range(9))
    assert sum(length for _, length in read) < size / 2 > 500_000


@pytest.mark.slow
def test_a_shard_that_is_cut_anywhere_or_changed_is_never_data(some):
    content, whole = some.read_bytes(), Shard.open(some)
    rows, arrays = whole.records(), whole.arrays()
    for end in range(0, len(content), 41):
        some.write_bytes(content[:end])
        with pytest.raises(UserError, match="is cut off, damaged or not a file of episodes"):
            Shard.open(some)
    for place in range(0, len(content), 29):
        some.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            found = Shard.open(some)
            same = found.records() == rows, all(np.array_equal(found.arrays()[n], arrays[n]) for n in arrays)
        except UserError:
            continue
        assert same == (True, True), place  # bits that mean nothing to a reader, such as the name of the writer


WRITING = """
import sys
from pathlib import Path

import numpy as np
from run_maker import trajectory

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.telemetry.trajectories import TrajectoryLog

log = TrajectoryLog(Path(sys.argv[1]), None)
ids = np.random.default_rng(0).integers(0, 1 << 20, 400_000).tolist()
for step in range(1, 1000):
    log.write(step, [Group(0, "t", "e", [trajectory(ids=ids)])])
    print(step, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_shards(tmp_path):
    command = [sys.executable, "-c", WRITING, str(tmp_path)]
    tests = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | tests) as writer:
        steps = [int(writer.stdout.readline()) for _ in range(3)]
        wait_until(lambda: list(tmp_path.glob(".*.partial")), lambda: writer.poll() is None)
        writer.kill()
    shards = sorted(tmp_path.glob("*.parquet"))
    assert steps == [1, 2, 3] and len(shards) >= 3
    assert [Shard.open(path).arrays()["offsets"].tolist() for path in shards] == [[0, 400_000]] * len(shards)
    TrajectoryLog(tmp_path, resumed_step=3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_00000{step}.parquet" for step in (1, 2, 3)]


def test_another_table_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"task": ["a"]}), tmp_path / "tasks.parquet")
    with pytest.raises(UserError, match=r"tasks\.parquet .* \(other columns\)"):
        Shard.open(tmp_path / "tasks.parquet")
    with pytest.raises(UserError, match="there is no such file"):
        Shard.open(tmp_path / "none.parquet")


def test_an_episode_takes_a_fraction_of_its_json():
    """Groups repeat their prompt, and tokens repeat the text."""
    text = "The order of the customer was shipped on Tuesday, and its number is 1234. " * 40
    said = [("system", text), ("user", "do it"), ("assistant", text[:500])]
    own = [
        t
        for g in groups({f"t{i}": [0.0] * 8 for i in range(4)}, messages=said, ids=[7, 8, 9] * 400)
        for t in g.trajectories
    ]
    assert len(encode(own)) / len(own) < 400
