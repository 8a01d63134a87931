"""Local files being written: exact whichever way they go, and there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
from pathlib import Path
from threading import Barrier

import pytest
from storage_helpers import BYTES, fill, has_direct, names_in, python
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import direct, local
from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.storage.open import open_folder


def test_parts_written_by_threads_in_any_order_make_the_file(local_folder, small_steps):
    for size in (0, 1, 4096, 16 << 10, (16 << 10) + 1, len(BYTES)):
        writer = local_folder.create("sub/file", size)
        fill(writer, BYTES[:size], threads=4)
        before = local_folder.sizes()
        writer.commit()
        writer.abort()
        assert local_folder.sizes() == {"sub/file": size}
        assert before in ({}, {"sub/file": before.get("sub/file")})
        assert Path(local_folder.join("sub/file")).read_bytes() == BYTES[:size]
        assert os.listdir(local_folder.path / "sub") == ["file"]
    assert (local_folder.path / "sub" / "file").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_file_is_private_where_its_folder_is(tmp_path):
    for mode in (0o700, 0o755):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        local.write_atomically(folder / "written", b"x")
        fill(writer := open_folder(folder).create("streamed", 1), b"x")
        writer.commit()
        expected = 0o600 if mode == 0o700 else 0o666 & ~_umask()
        assert {name: (folder / name).stat().st_mode & 0o777 for name in os.listdir(folder)} == {
            "written": expected,
            "streamed": expected,
        }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_disk_that_refuses_direct_transfers_after_all_is_served_the_other_way(tmp_path, small_steps, monkeypatch):
    local_folder = open_folder(tmp_path)
    refused = []
    both = Barrier(2)

    def refusing(call):
        def transfer(fd, *arguments):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(call)
                if len(refused) <= 2:
                    both.wait(timeout=HANG_S)
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(fd, *arguments)

        return transfer

    for name in ("preadv", "pwrite"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    writer = local_folder.create("file", len(BYTES))
    fill(writer, BYTES, threads=2)
    writer.commit()
    buffer = memoryview(bytearray(len(BYTES) - 7))
    local_folder.read_into("file", 7, buffer)
    assert buffer == BYTES[7:]
    assert len(refused) > 2 or not has_direct(tmp_path / "file")


def test_short_transfers_are_taken_up_again(local_folder, small_steps, monkeypatch):
    whole = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda fd, view, at: whole[0](fd, view[: max(4096, len(view) // 8192 * 4096)], at)
    )
    writer = local_folder.create("file", len(BYTES))
    fill(writer, BYTES)
    writer.commit()
    assert local_folder.read("file") == BYTES

    def short_preadv(fd, views, at):
        return whole[1](fd, [views[0][: max(4096, len(views[0]) // 8192 * 4096)]], at)

    monkeypatch.setattr(os, "preadv", short_preadv)
    for shift in (99, 100):
        memory = aligned_buffer(300_000 + shift)
        local_folder.read_into("file", 99, memory[shift:])
        assert memory[shift:] == BYTES[99:300_099]


def test_a_write_that_is_no_part_is_refused(local_folder):
    writer = local_folder.create("file", writer_size := (16 << 20) + 10)
    buffer = aligned_buffer(16 << 20)
    for offset, length in ((1, 16 << 20), (0, 4096), (16 << 20, 11), (32 << 20, 0), (-(16 << 20), 16 << 20)):
        with pytest.raises(ValueError, match=f"{length} bytes at {offset} are not part of {writer_size} bytes"):
            writer.write_at(offset, buffer[:length])
    with pytest.raises(ValueError, match="page-aligned"):
        writer.write_at(16 << 20, buffer[1:11])
    with pytest.raises(ValueError, match="read-only"):
        writer.write_at(16 << 20, memoryview(bytes(10)))
    writer.write_at(16 << 20, buffer[:10])
    with pytest.raises(ValueError, match="1 parts were not written, the first at 0"):
        writer.commit()
    assert local_folder.sizes() == {}
    writer.abort()
    writer.abort()
    assert names_in(local_folder) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "500 bytes are needed and the disk has [0-9]+ free; free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "cannot be created"),
    ],
)
def test_a_full_disk_is_told_before_the_first_byte(local_folder, monkeypatch, code, message):
    def full(fd, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local, "allocate", full)
    with pytest.raises(UserError, match=f"file:? .*{message}"):
        local_folder.create("file", 500)
    assert names_in(local_folder) == []


def test_a_file_system_that_cannot_reserve_is_asked_for_its_free_space(local_folder, monkeypatch):
    class Library:
        def fallocate64(self, *arguments):
            direct.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(direct.ctypes, "CDLL", lambda *a, **k: Library())
    with pytest.raises(UserError, match="9000000000000000 bytes are needed and the disk has"):
        local_folder.create("file", 9 * 10**15)
    writer = local_folder.create("file", 5000)
    fill(writer, BYTES[:5000])
    writer.commit()
    assert local_folder.read("file") == BYTES[:5000]


def test_a_file_larger_than_allowed_is_refused_by_the_system_itself(local_folder):
    program = """
import resource, sys
from megatron_fleet.storage.open import open_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_folder(sys.argv[1]).create("file", 2 << 20)
except Exception as e:
    print(type(e).__name__, e)
"""
    told = python(program, local_folder.path).communicate(timeout=HANG_S)[0]
    assert told.startswith(f"UserError {local_folder.path}/file: 2097152 bytes are more than a file may have here")
    assert names_in(local_folder) == []


WRITE_AND_WAIT = """
import sys
from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.storage.open import open_folder
writer = open_folder(sys.argv[1]).create("file", 20 << 20)
writer.write_at(0, aligned_buffer(writer.part))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_leaves_nothing_under_the_name_and_its_bytes_are_freed_later(local_folder):
    process = python(WRITE_AND_WAIT, local_folder.path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    living = names_in(local_folder)
    local_folder.create("file", 10).abort()
    assert names_in(local_folder) == living
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert local_folder.sizes() == {}
    assert names_in(local_folder) == living
    writer = local_folder.create("file", 10)
    assert len(names_in(local_folder)) == 1
    fill(writer, BYTES[:10])
    writer.commit()
    assert names_in(local_folder) == ["file"]
    process.communicate()


def test_two_writers_of_one_name_do_not_mix(local_folder, small_steps):
    first, second = local_folder.create("file", 40_000), local_folder.create("file", 50_000)
    fill(first, BYTES[:40_000])
    fill(second, BYTES[-50_000:])
    first.commit()
    assert local_folder.read("file") == BYTES[:40_000]
    second.commit()
    assert local_folder.read("file") == BYTES[-50_000:]
    assert names_in(local_folder) == ["file"]


def test_a_small_file_is_replaced_whole_or_stays(local_folder, monkeypatch):
    local_folder.write("file", b"old")

    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(UserError, match=r"file cannot be written .Input/output error"):
            local_folder.write("file", b"new")
    assert local_folder.read("file") == b"old"
    assert names_in(local_folder) == ["file"]
    local_folder.write("file", b"new one")
    assert local_folder.read("file") == b"new one"
