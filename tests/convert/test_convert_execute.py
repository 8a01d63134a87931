"""Folders that appear whole: shares, several runs at once, interruptions, refusals of the disk."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from convert_helpers import Made, Silence, files

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert import execute
from megatron_fleet.convert.execute import Share
from megatron_fleet.convert.plan import Bytes, OutputFile, Plan
from megatron_fleet.storage import local
from megatron_fleet.storage.local import is_unfinished
from megatron_fleet.storage.open import open_folder


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(local, "PART", 8192)


def plan_of(seed=0, count=5, marker="done"):
    """Files of a few parts each, of which bytes are made on demand."""
    random = np.random.default_rng(seed)
    output = []
    for k in range(count):
        file = OutputFile(f"sub/{k}.bin")
        file.append(Bytes(random.bytes(5)))
        file.append(Made(int(random.integers(2000, 4000)), 9, 1, 9))
        output.append(file)
    return Plan(output, {"small.json": b"{}"}, marker, b"whole", {"seed": str(seed)}, "source")


def expected_files(plan):
    made = {}
    for file in plan.files:
        data = bytearray(file.size)
        file.fill(0, memoryview(data))
        made[file.name] = bytes(data)
    return made | plan.small | {plan.marker: plan.marker_data}


def run(plan, out, share=None, workers=2):
    return execute.execute(plan, str(out), workers, share or Share(), Silence())


@pytest.mark.parametrize("workers", [1, 3])
def test_one_run(workers, small_parts, tmp_path):
    assert run(plan_of(), tmp_path / "out", workers=workers) is True
    assert files(tmp_path / "out") == expected_files(plan_of())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shares_in_every_order(order, small_parts, tmp_path):
    for k in order[:-1]:
        assert run(plan_of(), tmp_path / "out", Share(k, 3)) is False
        assert not (tmp_path / "out").exists()
    assert run(plan_of(), tmp_path / "out", Share(order[-1], 3)) is True
    assert files(tmp_path / "out") == expected_files(plan_of())


def test_more_shares_than_files(small_parts, tmp_path):
    done = [run(plan_of(count=2), tmp_path / "out", Share(k, 9)) for k in reversed(range(9))]
    assert done == [False] * 8 + [True]
    assert files(tmp_path / "out") == expected_files(plan_of(count=2))


@pytest.mark.parametrize("shares", [[(0, 1)] * 3, [(0, 2), (1, 2), (1, 2)], [(k, 4) for k in range(4)]])
def test_shares_at_the_same_time(shares, small_parts, tmp_path):
    """Also the same one several times: whoever is late finds the work done."""
    for attempt in range(6):
        out, results = tmp_path / str(attempt), []

        def one(index, count, out=out, results=results):
            try:
                results.append(run(plan_of(), out, Share(index, count), workers=1))
            except BaseException as e:
                results.append(e)

        threads = [threading.Thread(target=one, args=share) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(results) <= {True, False} and True in results, results
        # An unfinished file of one who is late may be renamed along; it is hidden and counts as none.
        visible = {name: data for name, data in files(out).items() if not is_unfinished(Path(name).name)}
        assert visible == expected_files(plan_of())
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(k) for k in range(6)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_writer_leaves_nothing_behind(fails, small_parts, tmp_path, monkeypatch):
    """Another process finishes the folder while this one is in the middle of a file."""
    write, made = execute.write_file, []

    def overtaken(folder, file, workers, progress):
        monkeypatch.setattr(execute, "write_file", write)
        assert run(plan_of(), tmp_path / "out") is True
        monkeypatch.setattr(execute, "write_file", lambda *arguments: made.append(arguments))
        write(folder, file, workers, progress)
        if fails:
            raise UserError("was removed.")

    monkeypatch.setattr(execute, "write_file", overtaken)
    assert run(plan_of(), tmp_path / "out") is True
    assert files(tmp_path / "out") == expected_files(plan_of())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert made == []


@pytest.mark.parametrize("failures", [1, 100])
def test_a_folder_that_another_one_is_about_to_finish(failures, small_parts, tmp_path, monkeypatch):
    """Its sweep takes this one's temporary files: what fails after the last file is done once more, not for ever."""
    write, left = local.LocalFolder.write, [failures]

    def swept(self, name, data):
        if name == "small.json" and left[0]:
            left[0] -= 1
            raise UserError("small.json was removed.")
        write(self, name, data)

    monkeypatch.setattr(local.LocalFolder, "write", swept)
    if failures == 1:
        assert run(plan_of(), tmp_path / "out") is True
        assert files(tmp_path / "out") == expected_files(plan_of())
    else:
        monkeypatch.setattr(execute.time, "sleep", lambda seconds: None)
        with pytest.raises(UserError, match=r"small\.json was removed"):
            run(plan_of(), tmp_path / "out")
        assert left[0] == failures - execute.ATTEMPTS


def test_finished_files_are_not_made_again(small_parts, tmp_path):
    assert run(plan_of(), tmp_path / "out", Share(0, 2)) is False
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".out.partial" / "sub").iterdir()}
    assert len(before) == 3
    assert run(plan_of(), tmp_path / "out") is True
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "sub").iterdir()}
    assert before.items() <= after.items()


def test_the_same_conversion_again_is_complete(small_parts, tmp_path):
    run(plan_of(), tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert run(plan_of(), tmp_path / "out") is True
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("change", ["identity", "size", "small", "marker"])
def test_another_conversion_is_refused(change, small_parts, tmp_path):
    other = plan_of()
    if change == "identity":
        other.identity = {"seed": "1"}
    elif change == "size":
        other.files[0].append(Bytes(b"x"))
    elif change == "small":
        other.small = {"small.json": b"[]"}
    else:
        other.marker_data = b"hole"
    run(plan_of(), tmp_path / "half", Share(0, 2))
    with pytest.raises(UserError, match=r"half\.partial: an unfinished conversion of source with other settings"):
        run(other, tmp_path / "half")
    run(plan_of(), tmp_path / "out")
    with pytest.raises(UserError, match="out already exists; name another folder or remove it"):
        run(other, tmp_path / "out")
    assert files(tmp_path / "out") == expected_files(plan_of())


def test_other_folders_are_left_alone(small_parts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="out: something else is at this path"):
        run(plan_of(), tmp_path / "out")
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds mine\.txt already"):
        run(plan_of(), tmp_path / "new")
    (tmp_path / ".new.partial" / "conversion.json").write_text("{}")
    with pytest.raises(UserError, match=r"conversion\.json: malformed; remove "):
        run(plan_of(), tmp_path / "new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        ".new.partial",
        "conversion.json",
        "mine.txt",
        "mine.txt",
        "out",
    ]


@pytest.mark.parametrize("failing", ["fill", "write"])
def test_an_error_in_a_thread_is_raised_and_the_rest_resumed(failing, small_parts, tmp_path, monkeypatch):
    plan = plan_of()
    with monkeypatch.context() as patch:
        if failing == "fill":
            made = plan.files[3].contents[1]
            patch.setattr(Made, "make", lambda self, rows: fail_for(self, made, rows))
        else:
            patch.setattr(local.LocalWriter, "write_at", lambda *_: (_ for _ in ()).throw(UserError("no room.")))
        with pytest.raises(UserError, match=r"no room\."):
            run(plan, tmp_path / "out", workers=3)
    assert not (tmp_path / "out").exists()
    left = sorted(p.name for p in (tmp_path / ".out.partial").rglob("*") if p.is_file())
    assert left == (["0.bin", "1.bin", "2.bin", "conversion.json"] if failing == "fill" else ["conversion.json"])
    assert run(plan_of(), tmp_path / "out") is True
    assert files(tmp_path / "out") == expected_files(plan_of())


def fail_for(self, made, rows):
    if self is made:
        raise UserError("no room.")
    return self.whole[slice(*rows)]


def test_ctrl_c_stops_in_the_middle_of_a_file(small_parts, tmp_path):
    begun, interrupted = itertools.count(), threading.Event()

    class Slow(Made):
        def make(self, rows):
            number = next(begun)
            if number == 5:  # a terminal, too, signals the process, not a thread; as often as it takes
                os.kill(os.getpid(), signal.SIGINT)
                while not interrupted.wait(1):
                    os.kill(os.getpid(), signal.SIGINT)
            if number >= 5:
                interrupted.wait()
                time.sleep(0.2)
            return super().make(rows)

    def interrupt(*arguments):
        interrupted.set()
        signal.default_int_handler(*arguments)

    file = OutputFile("f")
    slow = Slow(100, 8192, 1, 8192)
    file.append(slow)
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute.write_file(open_folder(tmp_path), file, 2, Silence())
    finally:
        signal.signal(signal.SIGINT, previous)
    assert len(slow.asked) < 100
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(small_parts, tmp_path, monkeypatch):
    def full(fd, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local, "allocate", full)
    size = plan_of().files[0].size
    with pytest.raises(UserError, match=rf"sub/0\.bin: {size} bytes are needed and the disk has \d+ free"):
        run(plan_of(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert run(plan_of(), tmp_path / "out") is True


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/\.out\.partial cannot be listed \(Not a directory\)"):
        run(plan_of(), tmp_path / "file" / "out")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "/2", "a/b", "1/2/3", "-1/2", "²/3", ""])
def test_shares_that_are_none(text):
    with pytest.raises(UserError, match="give I/N with 1 ≤ I ≤ N"):
        Share.parse(text)


def test_shares_are_counted_from_one():
    assert (Share.parse("1/8"), Share.parse("8/8")) == (Share(0, 8), Share(7, 8))


def test_sources_are_compared_with_their_checksums(tmp_path):
    import hashlib
    from dataclasses import replace

    from megatron_fleet.convert.plan import Checksum

    data = np.random.default_rng(0).bytes((16 << 20) + 77)
    (tmp_path / "a").write_bytes(data)
    good = Checksum(open_folder(tmp_path), "a", len(data), hashlib.sha256(data).hexdigest())
    execute.check_sources([good], 2, Silence())
    with pytest.raises(UserError, match=r"/a is damaged, its SHA-256 is not"):
        execute.check_sources([good, replace(good, sha256="0" * 64)], 2, Silence())


def test_the_journal_says_what_is_being_made(small_parts, tmp_path):
    run(plan_of(), tmp_path / "out", Share(0, 2))
    journal = json.loads((tmp_path / ".out.partial" / "conversion.json").read_text())
    assert (journal["source"], journal["seed"]) == ("source", "0")
