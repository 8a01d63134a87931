"""Local files being read: the same bytes whichever way they go."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import BYTES, fill, has_direct, python
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import local
from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.storage.open import open_folder


def cached_bytes(path: Path, start: int, end: int) -> int:
    """Bytes between two page boundaries of a file that are in the page cache: mincore(2)."""
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE) as memory:
        first = ctypes.c_char.from_buffer(memory, start)
        pages = (ctypes.c_ubyte * ((end - start) // 4096))()
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(end - start), pages) == 0
        del first
        return 4096 * sum(page & 1 for page in pages)


def test_any_read_gives_the_bytes_of_the_file(local_folder, small_steps):
    local_folder.write("sub/file", BYTES)

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data):
        edges = st.sampled_from([0, 4095, 4096, 8192, 65536, len(BYTES) - 4096, len(BYTES) - 3])
        offset = data.draw(edges | st.integers(0, len(BYTES)))
        length = data.draw(st.integers(0, 9000) | st.integers(0, len(BYTES)).filter(lambda n: n % 4096 == 0 or n % 3))
        length = min(length, len(BYTES) - offset)
        shift = data.draw(st.sampled_from([0, offset % 4096]) | st.integers(0, 4095))
        memory = aligned_buffer(length + 4096 + 16)
        memory[:] = b"\xee" * len(memory)
        local_folder.read_into("sub/file", offset, memory[shift : shift + length])
        assert memory[shift : shift + length] == BYTES[offset : offset + length]
        assert bytes(memory[:shift]) == b"\xee" * shift
        assert bytes(memory[shift + length :]) == b"\xee" * (len(memory) - shift - length)
        assert local_folder.read("sub/file", offset, length) == BYTES[offset : offset + length]

    check()


@pytest.mark.parametrize("shift", [0, 5])
def test_large_reads_leave_the_page_cache_alone_and_small_ones_use_it(tmp_path, shift):
    local_folder = open_folder(tmp_path)
    data = BYTES * 3
    local_folder.write("file", data)
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if not has_direct(path) or cached_bytes(path, 0, 4096 * 292):
        pytest.skip("this file system has no direct reads, or keeps what it is told to drop")
    buffer = aligned_buffer(800_000)[shift:]
    open_folder(tmp_path).read_into("file", 300_000, buffer)
    assert buffer == data[300_000 : 1_100_000 - shift]
    assert cached_bytes(path, 0, 4096 * 292) == 0
    open_folder(tmp_path).read_into("file", 500_000, buffer[:100])
    assert cached_bytes(path, 500_000 // 4096 * 4096, 500_000 // 4096 * 4096 + 4096) == 4096


def test_a_replaced_file_is_read_anew(local_folder, small_steps):
    for round_ in range(3):
        data = bytes([round_]) * 9000
        if round_ == 1:
            writer = local_folder.create("file", len(data))
            fill(writer, data)
            writer.commit()
        else:
            local_folder.write("file", data)
        buffer = memoryview(bytearray(len(data)))
        local_folder.read_into("file", 0, buffer)
        assert buffer == data
    local_folder.delete("file")
    local_folder.delete("file")
    with pytest.raises(UserError, match="file: there is no such file"):
        local_folder.read_into("file", 0, buffer)


@pytest.mark.slow
def test_more_files_than_stay_open_are_read_by_many_threads(local_folder, monkeypatch, small_steps):
    monkeypatch.setattr(local, "OPEN_FILES", 2)
    readers = [open_folder(local_folder.path)]
    for i in range(8):
        local_folder.write(str(i), BYTES[i * 1000 : i * 1000 + 30_000])

    def open_files() -> int:
        gc.collect()
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(local_folder.path)) for link in links if os.path.islink(link))

    def read(i: int) -> bool:
        buffer = memoryview(bytearray(20_000))
        readers[0].read_into(str(i % 8), 123, buffer)
        return buffer == BYTES[i % 8 * 1000 + 123 :][:20_000]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))
    assert 0 < open_files() <= 2 * 2
    readers.clear()
    assert open_files() == 0


def test_listing_tells_finished_files_only(local_folder):
    assert local_folder.sizes() == {}
    assert open_folder(local_folder.path / "absent").sizes() == {}
    local_folder.write("b/c/file", b"12")
    local_folder.write("a", b"")
    local_folder.write(".metadata", b"1")
    writer = local_folder.create("b/big", 10)
    Path(local_folder.join("b/.x.partial")).mkdir()
    Path(local_folder.join("b/.x.partial/file")).touch()
    Path(local_folder.join("broken")).symlink_to("nowhere")
    Path(local_folder.join("link")).symlink_to("b/c/file")
    assert local_folder.sizes() == {".metadata": 1, "a": 0, "b/c/file": 2, "link": 2}
    writer.abort()


@pytest.mark.parametrize("looks", [0, 1])
def test_a_listing_bears_that_another_process_removes_a_file_meanwhile(local_folder, monkeypatch, looks):
    """After so many looks at it."""
    local_folder.write("here", b"1")
    local_folder.write("removed", b"12")
    stat, left = Path.stat, looks

    def seen(path: Path, **more: bool) -> os.stat_result:
        nonlocal left
        if path.name == "removed":
            if left == 0:
                path.unlink(missing_ok=True)
            left -= 1
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", seen)
    assert local_folder.sizes() == {"here": 1} | ({"removed": 2} if looks else {})


@pytest.mark.parametrize("taken", [False, True])
def test_a_file_that_only_one_writer_may_make_is_never_listed_unfinished(local_folder, monkeypatch, taken):
    if taken:
        local_folder.write("number", b"first")
    before, listed, link = local_folder.sizes(), [], os.link

    def seen(source: Path, target: Path) -> None:
        listed.append(local_folder.sizes())
        link(source, target)

    monkeypatch.setattr(os, "link", seen)
    assert local_folder.write_new("number", b"12") is not taken
    assert listed == [before]
    assert local_folder.sizes() == {"number": 5 if taken else 2}
    assert [path.name for path in local_folder.path.iterdir()] == ["number"]


def test_what_cannot_be_read_is_told(local_folder):
    local_folder.write("file", b"12345")
    buffer = memoryview(bytearray(4))
    with pytest.raises(UserError, match="file has 5 bytes and byte 6 was asked for"):
        local_folder.read_into("file", 2, buffer)
    with pytest.raises(UserError, match="file has 5 bytes and byte 9 was asked for"):
        local_folder.read("file", 5, 4)
    with pytest.raises(UserError, match="none: there is no such file"):
        local_folder.read("none")
    with pytest.raises(UserError, match="none: there is no such file"):
        local_folder.read_into("none", 0, buffer)
    with pytest.raises(UserError, match=r"cannot be read .Is a directory"):
        open_folder(local_folder.path.parent).read(local_folder.path.name)
    with pytest.raises(UserError, match="file is a file; give the folder"):
        open_folder(local_folder.path / "file").sizes()
    with pytest.raises(UserError, match="file/x cannot be created"):
        open_folder(local_folder.path / "file").create("x", 1)
    for name in ("../file", "/file", "", ".", "a/../file", "a//file", "./file"):
        with pytest.raises(UserError, match="is not the name of a file inside a folder"):
            local_folder.read(name)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "gs://", "gs:///x", "ftp://bucket/x", "file:///x", ""])
def test_an_address_that_is_none_is_told(url):
    with pytest.raises(UserError, match=r"give a path, s3://bucket/prefix or gs://bucket/prefix"):
        open_folder(url)


def test_local_folders_need_no_boto3(tmp_path):
    program = """
import sys
from megatron_fleet.storage.open import open_folder, open_staging
open_folder(sys.argv[1]).write("file", b"x"), open_staging(sys.argv[1], "marker")
print(sorted({name.split(".")[0] for name in sys.modules} & {"boto3", "botocore", "torch", "numpy"}))
"""
    assert python(program, tmp_path).communicate(timeout=HANG_S)[0] == "[]\n"


def test_files_that_others_read_too_come_through_the_page_cache(tmp_path):
    data = os.urandom(3 << 20)
    (tmp_path / "f").write_bytes(data)
    for cached in (False, True):
        with (tmp_path / "f").open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = cached_bytes(tmp_path / "f", 0, len(data)) == 0  # a kernel may keep what it is told to drop
        buffer = aligned_buffer(len(data))
        open_folder(tmp_path, cached=cached).read_into("f", 0, buffer)
        assert buffer == data
        if has_direct(tmp_path) and dropped:
            assert (cached_bytes(tmp_path / "f", 0, len(data)) > 0) == cached
