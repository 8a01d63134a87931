"""Checkpoints exist whole or not at all: commits, kills in the middle, damage, retention, several ranks."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Alone, PeerError


def writer(content: bytes = b"weights"):
    def write_state(path: Path) -> None:
        (path / "policy" / "shards").mkdir(parents=True, exist_ok=True)
        (path / "policy" / "shards" / "0.distcp").write_bytes(content)
        (path / "policy" / ".metadata").write_text("hidden, as torch.distributed names it")

    return write_state


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_saved_checkpoint_is_found_and_read_back(tmp_path):
    store = Checkpoints(tmp_path / "ck", keep=2, comm=Alone())
    assert store.latest() is None
    state = {"step": 3, "cursor": [1, 2], "lr": 0.1}
    saved = store.save(3, writer(), state)
    assert names(tmp_path / "ck") == ["step_000003"]
    found = Checkpoints(tmp_path / "ck", keep=2, comm=Alone()).latest()
    assert found == saved == Checkpoint.open(saved.path, checksums=True)
    assert found.trainer_state() == state
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["policy/.metadata", "policy/shards/0.distcp", "trainer_state.json"]
    assert manifest["files"]["policy/shards/0.distcp"]["bytes"] == 7


def test_old_checkpoints_go_after_the_new_one_stands(tmp_path):
    store = Checkpoints(tmp_path, keep=2, comm=Alone())
    for step in (1, 2, 3):
        store.save(step, writer(), {})
    assert names(tmp_path) == ["step_000002", "step_000003"]

    def failing(path: Path) -> None:
        writer()(path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(4, failing, {})
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=1, comm=Alone())
    store.save(1, writer(), {})
    (tmp_path / "step_000009").mkdir()
    store.save(2, writer(), {})
    assert names(tmp_path) == ["step_000002", "step_000009"]


def test_a_committed_step_is_not_written_twice(tmp_path):
    store = Checkpoints(tmp_path, keep=2, comm=Alone())
    store.save(1, writer(b"first"), {"n": 1})
    again = store.save(1, writer(b"second"), {"n": 2})
    assert again.trainer_state() == {"n": 1}
    assert (again.path / "policy/shards/0.distcp").read_bytes() == b"first"


def test_a_damaged_step_is_written_anew(tmp_path):
    store = Checkpoints(tmp_path, keep=2, comm=Alone())
    (store.save(1, writer(b"first"), {}).path / "policy/shards/0.distcp").unlink()
    assert Checkpoint.open(store.save(1, writer(b"second"), {}).path, checksums=True).step == 1


def test_state_that_is_no_json_is_told_before_anything_is_written(tmp_path):
    store = Checkpoints(tmp_path, keep=2, comm=Alone())
    with pytest.raises(TypeError):
        store.save(1, lambda path: pytest.fail("written"), {"rng": object()})
    assert names(tmp_path) == []


def damage(case: str, path: Path) -> str:
    shard = path / "policy/shards/0.distcp"
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    if case == "missing file":
        shard.unlink()
        return f"{shard}: is missing"
    if case == "truncated file":
        shard.write_bytes(b"weigh")
        return f"{shard}: bytes is 5"
    if case == "flipped bits":
        shard.write_bytes(b"Weights")
        return f"{shard}: sha256 is"
    if case == "no manifest":
        manifest.unlink()
        return "manifest.json is missing"
    if case == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:40])
        return f"{manifest}: malformed"
    if case == "other format":
        manifest.write_text(json.dumps(content | {"format": 2}))
        return f"{manifest}: format is 2"
    if case == "no files":
        del content["files"]
    if case == "outside":
        content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    manifest.write_text(json.dumps(content))
    return f"{manifest}: malformed"


CASES = ["missing file", "truncated file", "no manifest", "torn manifest", "other format", "no files", "outside"]


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_checkpoint_is_explained_and_skipped(tmp_path, caplog, case):
    store = Checkpoints(tmp_path, keep=2, comm=Alone())
    good = store.save(1, writer(), {})
    bad = store.save(2, writer(), {})
    words = damage(case, bad.path)
    with pytest.raises(UserError) as e:
        Checkpoint.open(bad.path)
    assert words in str(e.value)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == good
    assert "skipping checkpoint step_000002" in caplog.text


def test_flipped_bits_are_found_by_checksum(tmp_path):
    saved = Checkpoints(tmp_path, keep=2, comm=Alone()).save(1, writer(), {})
    words = damage("flipped bits", saved.path)
    assert Checkpoint.open(saved.path) == saved
    with pytest.raises(UserError) as e:
        Checkpoint.open(saved.path, checksums=True)
    assert words in str(e.value)


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint, manifest.json is missing"):
        Checkpoint.open(tmp_path / "nowhere")


CHILD = """
import os, signal, sys, time
from pathlib import Path
from megatron_fleet.checkpoint import checkpoints as module
from megatron_fleet.platform.communicator import Alone

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

folder, stage = Path(sys.argv[1]), sys.argv[2]
original_write, original_rename = module.write_json, os.rename
def write_json(file, value):
    if stage == file.name:
        file.write_text('{"form')
        die()
    original_write(file, value)
def rename(a, b):
    if stage == "before rename" and ".partial" in str(a): die()
    original_rename(a, b)
    if stage == "after rename" and ".partial" in str(a): die()
    if stage == "removal" and ".removed" in str(b): die()
module.write_json, os.rename = write_json, rename

def write_state(path):
    (path / "a").write_bytes(os.urandom(1000))
    if stage == "shards": die()
    (path / "b").write_bytes(os.urandom(1000))

store = module.Checkpoints(folder, keep=1, comm=Alone())
step = store.latest().step if store.latest() else 0
print("started", flush=True)
while True:
    step += 1
    store.save(step, write_state, {"step": step})
    print(step, flush=True)
"""


def run_child(folder: Path, stage: str) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), stage], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )


@pytest.mark.parametrize(
    ("stage", "survivor"),
    [
        ("shards", 5),
        ("trainer_state.json", 5),
        ("manifest.json", 5),
        ("before rename", 5),
        ("after rename", 6),
        ("removal", 6),
    ],
)
def test_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path, stage, survivor):
    Checkpoints(tmp_path, keep=1, comm=Alone()).save(5, writer(), {"step": 5})
    child = run_child(tmp_path, stage)
    assert child.wait(60) == -signal.SIGKILL
    store = Checkpoints(tmp_path, keep=1, comm=Alone())
    found = store.latest()
    assert found.step == survivor == found.trainer_state()["step"]
    Checkpoint.open(found.path, checksums=True)
    assert not [n for n in names(tmp_path) if n.startswith(".")]
    assert store.save(7, writer(), {}).step == 7
    assert names(tmp_path) == ["step_000007"]


@pytest.mark.slow
def test_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path):
    chance = random.Random(0)
    reached = 0
    for _ in range(8):
        child = run_child(tmp_path, "none")
        child.stdout.readline()
        time.sleep(0.02 + chance.random() * 0.2)
        child.kill()
        committed = [int(line) for line in child.stdout.read().split()]
        child.wait()
        reached = max([reached, *committed])
        found = Checkpoints(tmp_path, keep=1, comm=Alone()).latest()
        if reached:
            assert found.step in (reached, reached + 1)
            assert Checkpoint.open(found.path, checksums=True).trainer_state() == {"step": found.step}
            reached = found.step
    assert reached > 8


class Threads:
    """Ranks as threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, size, barrier, slots

    def all_gather(self, value):
        self._slots[self.rank] = value
        self._barrier.wait(20)
        values = list(self._slots)
        self._barrier.wait(20)
        return values


def on_ranks(size, body):
    barrier, slots, results = threading.Barrier(size), [None] * size, [None] * size

    def run(rank):
        try:
            results[rank] = body(Threads(rank, size, barrier, slots))
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return results


def test_every_rank_writes_and_reads_the_same_checkpoint(tmp_path):
    def body(comm):
        store = Checkpoints(tmp_path, keep=1, comm=comm)
        for step in (1, 2):
            store.save(step, lambda path: (path / f"rank{comm.rank}").write_bytes(b"x"), {"step": step})
        return store.latest()

    first, second, third = on_ranks(3, body)
    assert first == second == third == Checkpoint.open(tmp_path / "step_000002", checksums=True)
    manifest = json.loads((first.path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["rank0", "rank1", "rank2", "trainer_state.json"]


def test_one_failing_rank_fails_the_save_on_all(tmp_path):
    def body(comm):
        store = Checkpoints(tmp_path, keep=1, comm=comm)
        store.save(1, writer(), {})

        def write_state(path):
            if comm.rank == 1:
                raise OSError("disk full")

        try:
            store.save(2, write_state, {})
        finally:
            assert store.latest().step == 1

    first, second = on_ranks(2, body)
    assert isinstance(first, PeerError)
    assert "rank 1: disk full" in str(first)
    assert isinstance(second, OSError)
    assert names(tmp_path) == ["step_000001"]
