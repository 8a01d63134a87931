"""Checkpoints exist whole or not at all: commits, kills in the middle, damage, retention, what the trainer wrote."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from fake_trainer import FakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import fingerprint, list_files
from megatron_fleet.trainer.base import TrainerLost


def writer(content: bytes = b"weights"):
    async def write_state(path: Path) -> Files:
        (path / "policy" / "shards").mkdir(parents=True, exist_ok=True)
        (path / "policy" / "shards" / "0.distcp").write_bytes(content)
        (path / "policy" / ".metadata").write_text("hidden, as torch.distributed names it")
        return {file.relative_to(path).as_posix(): fingerprint(file) for file in list_files(path)}

    return write_state


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


async def test_a_saved_checkpoint_is_found_and_read_back(tmp_path):
    store = Checkpoints(tmp_path / "ck", keep=2)
    assert store.newest() is None
    state = {"step": 3, "cursor": [1, 2], "lr": 0.1}
    saved = await store.save(3, writer(), state)
    assert names(tmp_path / "ck") == ["step_000003"]
    found = Checkpoints(tmp_path / "ck", keep=2).newest()
    assert found == saved == Checkpoint.open(saved.path)
    assert found.trainer_state() == state
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["policy/.metadata", "policy/shards/0.distcp", "trainer_state.json"]
    assert manifest["files"]["policy/shards/0.distcp"]["bytes"] == 7


async def test_old_checkpoints_go_after_the_new_one_stands(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        await store.save(step, writer(), {})
    assert names(tmp_path) == ["step_000002", "step_000003"]

    async def failing(path: Path) -> Files:
        await writer()(path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.save(4, failing, {})
    assert names(tmp_path) == ["step_000002", "step_000003"]


async def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    await store.save(1, writer(), {})
    (tmp_path / "step_000009").mkdir()
    await store.save(2, writer(), {})
    assert names(tmp_path) == ["step_000002", "step_000009"]


async def test_a_committed_step_is_not_written_twice(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    await store.save(1, writer(b"first"), {"n": 1})
    assert await store.save(1, writer(b"second"), {"n": 2}) is None
    found = store.newest()
    assert found.trainer_state() == {"n": 1}
    assert (found.path / "policy/shards/0.distcp").read_bytes() == b"first"


async def test_a_damaged_step_is_written_anew(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    ((await store.save(1, writer(b"first"), {})).path / "policy/shards/0.distcp").unlink()
    (await store.save(1, writer(b"second"), {})).verify()


async def test_a_commit_that_has_begun_is_finished_before_a_cancellation(tmp_path, monkeypatch):
    committing, go_on = threading.Event(), threading.Event()
    rename = os.rename

    def slow_rename(before, after):
        committing.set()
        go_on.wait(HANG_S)
        rename(before, after)

    monkeypatch.setattr(os, "rename", slow_rename)
    store = Checkpoints(tmp_path, keep=2)
    saving = asyncio.create_task(store.save(1, writer(), {}))
    await asyncio.to_thread(committing.wait, HANG_S)
    saving.cancel()
    await asyncio.sleep(0.05)
    assert not saving.done(), "the thread would rename the folder after the newest checkpoint was chosen"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert store.newest().step == 1


async def test_checkpoints_that_are_links_are_read_and_only_their_links_removed(tmp_path, caplog):
    store, elsewhere = Checkpoints(tmp_path / "ck", keep=1), tmp_path / "another disk"
    await store.save(1, writer(), {})
    (tmp_path / "ck" / "step_000001").rename(elsewhere)
    for name in ("step_000001", ".step_000003.removed"):
        (tmp_path / "ck" / name).symlink_to(elsewhere)
    assert store.newest().step == 1
    for step in (2, 3):
        assert (await store.save(step, writer(), {})).step == step
    assert names(tmp_path / "ck") == ["step_000003"]
    assert f"step_000001 is a symbolic link: only the link is removed, {elsewhere} stays" in caplog.text
    Checkpoint.open(elsewhere).verify()


async def test_state_that_is_no_json_and_a_copy_that_is_given_up_leave_no_checkpoint(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    with pytest.raises(TypeError):
        await store.save(1, writer(), {"rng": object()})
    assert store.newest() is None
    copied = await store.copy(1, FakeTrainer().copy_state)
    copied.writing.cancel()
    await store.save(2, writer(), {})
    assert names(tmp_path) == ["step_000002"], "the next save removes what it left"


async def test_a_checkpoint_holds_the_records_at_its_commit(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("at the copy")
    store = Checkpoints(tmp_path / "ck", keep=2, records=[metrics])
    copied = await store.copy(1, FakeTrainer().copy_state)
    metrics.write_text("at the commit")
    committing = store.commit(copied, {})
    metrics.write_text("later")
    assert ((await committing).path / "records" / "metrics.jsonl").read_text() == "at the commit"


def damage(case: str, path: Path) -> str:
    shard = path / "policy/shards/0.distcp"
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    if case == "missing file":
        shard.unlink()
        return f"{shard} is missing"
    if case == "truncated file":
        shard.write_bytes(b"weigh")
        return f"{shard} has 5 bytes"
    if case == "flipped bits":
        shard.write_bytes(b"Weights")
        return f"{shard} is damaged, its SHA-256 is not that of the manifest.json"
    if case == "no manifest":
        manifest.unlink()
        return "manifest.json is missing"
    if case == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:40])
        return f"{manifest}: "
    if case == "other format":
        manifest.write_text(json.dumps(content | {"format": 2}))
        return f"{manifest}: format is 2"
    if case == "no files":
        del content["files"]
    if case == "outside":
        content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    manifest.write_text(json.dumps(content))
    return f"{manifest}: "


CASES = [
    "missing file", "truncated file", "flipped bits", "no manifest", "torn manifest", "other format", "no files",
    "outside",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_damaged_checkpoint_is_explained_and_passed_over(tmp_path, caplog, case):
    store = Checkpoints(tmp_path, keep=2)
    good = await store.save(1, writer(), {})
    words = damage(case, (await store.save(2, writer(), {})).path)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == good
    assert words in caplog.text
    assert f"the run resumes from step 1, {good.path}" in caplog.text


@pytest.mark.parametrize("case", CASES)
async def test_when_all_are_damaged_nothing_starts_over(tmp_path, case):
    store = Checkpoints(tmp_path, keep=2)
    damage("missing file", (await store.save(1, writer(), {})).path)
    words = damage(case, (await store.save(2, writer(), {})).path)
    (tmp_path / ".step_000003.partial").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(UserError) as e:
        Checkpoints(tmp_path, keep=2).newest()
    assert words in str(e.value)
    assert "choose another run.out, or start over with run.resume=never" in str(e.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


async def test_a_damaged_checkpoint_neither_displaces_a_good_one_nor_stays_when_its_step_comes_again(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    await store.save(10, writer(), {})
    damage("flipped bits", (await store.save(20, writer(), {})).path)
    store = Checkpoints(tmp_path, keep=1)
    assert store.newest().step == 10
    await store.save(15, writer(), {})
    assert store.newest().step == 15
    await store.save(20, writer(), {})
    assert store.newest().step == 20
    assert names(tmp_path) == ["step_000020"]


async def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    saved = await Checkpoints(tmp_path, keep=2).save(1, writer(), {})
    opened = Path.open

    def failing(self, *args, **kwargs):
        if self.name == "0.distcp":
            raise OSError(errno.EIO, "Input/output error")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(UserError, match=r"0\.distcp cannot be read \(Input/output error\)"):
        saved.verify()


async def test_hashing_ends_when_it_is_given_up(tmp_path):
    saved = await Checkpoints(tmp_path, keep=2).save(1, writer(), {})
    stop = threading.Event()
    stop.set()
    with pytest.raises(CancelledError):
        saved.verify(stop)


@given(st.integers(0), st.integers(1, 255))
def test_every_flipped_byte_is_found(checkpoint_once, where, flip):
    folder, content = checkpoint_once
    file, data = content[where % len(content)]
    position = where // len(content) % len(data)
    try:
        file.write_bytes(data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :])
        with pytest.raises(UserError, match=re.escape(str(file))):
            Checkpoint.open(folder).verify()
    finally:
        file.write_bytes(data)
    Checkpoint.open(folder).verify()


@pytest.fixture(scope="module")
def checkpoint_once(tmp_path_factory):
    """A checkpoint's folder, and the files that its manifest lists with their content."""
    saved = asyncio.run(Checkpoints(tmp_path_factory.mktemp("once"), keep=1).save(1, writer(), {"n": 1}))
    files = [file for file in list_files(saved.path) if file.name != "manifest.json"]
    return saved.path, [(file, file.read_bytes()) for file in files]


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(UserError, match=r"not a checkpoint, manifest.json is missing"):
        Checkpoint.open(tmp_path / "nowhere")


CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from megatron_fleet.checkpoint import checkpoints as module

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

folder, stage = Path(sys.argv[1]), sys.argv[2]
original_write, original_rename = module.write_atomically, os.rename
def write_atomically(file, data):
    if stage == file.name:
        file.write_text('{"form')
        die()
    original_write(file, data)
def rename(a, b):
    if stage == "before rename" and ".partial" in str(a): die()
    original_rename(a, b)
    if stage == "after rename" and ".partial" in str(a): die()
    if stage == "removal" and ".removed" in str(b): die()
module.write_atomically, os.rename = write_atomically, rename

async def write_state(path):
    (path / "a").write_bytes(os.urandom(1000))
    if stage == "shards": die()
    (path / "b").write_bytes(os.urandom(1000))
    return {}

async def main():
    store = module.Checkpoints(folder, keep=1)
    step = store.newest().step if store.newest() else 0
    print("started", flush=True)
    while True:
        step += 1
        await store.save(step, write_state, {"step": step})
        print(step, flush=True)

asyncio.run(main())
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
async def test_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path, stage, survivor):
    await Checkpoints(tmp_path, keep=1).save(5, writer(), {"step": 5})
    child = run_child(tmp_path, stage)
    assert child.wait(HANG_S) == -signal.SIGKILL
    store = Checkpoints(tmp_path, keep=1)
    found = store.newest()
    assert found.step == survivor == found.trainer_state()["step"]
    assert (await store.save(7, writer(), {})).step == 7
    assert names(tmp_path) == ["step_000007"]


@pytest.mark.slow
def test_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path):
    chance = random.Random(0)
    reached = 0
    for _ in range(8):
        child = run_child(tmp_path, "none")
        child.stdout.readline()
        child.stdout.readline()  # it has committed one, however slow the disk is
        time.sleep(chance.random() * 0.2)
        child.kill()
        committed = [int(line) for line in child.stdout.read().split()]
        child.wait()
        reached = max([reached + 1, *committed])
        found = Checkpoints(tmp_path, keep=1).newest()
        assert found.step in (reached, reached + 1)
        assert found.trainer_state() == {"step": found.step}
        reached = found.step


async def test_files_of_the_trainer_are_trusted_and_not_read_again(tmp_path):
    """The ranks have hashed them; the controller hashes what they did not mention, and its own."""

    async def write_state(path: Path) -> Files:
        (path / "huge").write_bytes(b"x" * 5)
        (path / "small").write_bytes(b"y")
        return {"huge": {"bytes": 5, "sha256": "by a rank"}}

    saved = await Checkpoints(tmp_path, keep=1).save(1, write_state, {})
    files = json.loads((saved.path / "manifest.json").read_text())["files"]
    assert list(files) == ["huge", "small", "trainer_state.json"]
    assert files["huge"]["sha256"] == "by a rank"
    assert files["small"] == fingerprint(saved.path / "small")


@pytest.mark.parametrize("content", [None, b"part"])
async def test_files_that_the_controller_does_not_see_end_the_save(tmp_path, content):
    """As on several hosts without a common file system."""

    async def write_state(path: Path) -> Files:
        if content is not None:
            (path / "1.distcp").write_bytes(content)
        return {"1.distcp": {"bytes": 100, "sha256": ""}}

    store = Checkpoints(tmp_path, keep=1)
    with pytest.raises(UserError, match=r"1\.distcp: a rank wrote 100 bytes .* put run\.out on a file system that all"):
        await store.save(2, write_state, {})
    assert names(tmp_path) == []


async def test_a_trainer_that_is_lost_in_a_save_leaves_the_checkpoint_before(tmp_path):
    trainer = FakeTrainer(fail={"save_state": {2: TrainerLost("rank 1 died")}})
    store = Checkpoints(tmp_path, keep=1)
    await store.save(1, trainer.save_state, {})
    with pytest.raises(TrainerLost, match="rank 1 died"):
        await store.save(2, trainer.save_state, {})
    assert names(tmp_path) == ["step_000001"]
    found = store.newest()
    assert found.step == 1
    again = FakeTrainer()
    await again.load_state(found.path)
    assert (await store.save(2, again.save_state, {})).step == 2
