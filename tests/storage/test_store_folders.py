"""Objects on real servers of each kind: exact bytes, refusals in plain words, broken connections survived."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from s3_faults import Fault, FaultyStore
from storage_helpers import fill

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import remote
from megatron_fleet.storage.open import open_folder

BYTES = random.Random(0).randbytes(12_000_017)
LEAST_PART = 5 << 20
"""Bytes of the smallest part that S3 allows before the last one."""


@pytest.fixture(params=["s3", "gcs"])
def kind(request, monkeypatch):
    """Name of the store, whose module has small parts and makes no long waits."""
    request.getfixturevalue(request.param)
    monkeypatch.setattr(f"megatron_fleet.storage.{request.param}.PART", LEAST_PART)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    return request.param


@pytest.fixture
def url(kind, request):
    return request.getfixturevalue(f"{kind}_url")


@pytest.fixture
def folder(url):
    return open_folder(url)


@pytest.fixture
def faulty(kind, request, monkeypatch):
    """A network that fails, between the server and the folders that are opened hereafter."""
    store = FaultyStore(request.getfixturevalue(kind))
    monkeypatch.setenv("AWS_ENDPOINT_URL" if kind == "s3" else "STORAGE_EMULATOR_HOST", store.endpoint)
    yield store
    store.close()


def read(folder, name: str, offset: int, length: int) -> bytes:
    buffer = memoryview(bytearray(length))
    folder.read_into(name, offset, buffer)
    return bytes(buffer)


def test_parts_sent_by_threads_in_any_order_make_the_object(folder):
    for size in (len(BYTES), 2 * LEAST_PART, 1, 0):
        writer = folder.create("sub/big", size)
        fill(writer, BYTES[:size], threads=3)
        assert folder.sizes() == {}
        writer.commit()
        writer.abort()
        assert folder.sizes() == {"sub/big": size}
        assert folder.read("sub/big") == BYTES[:size]
        folder.delete("sub/big")
        folder.delete("sub/big")
        assert folder.sizes() == {}


def test_any_range_gives_the_bytes_of_the_object(folder):
    folder.write("file", BYTES)
    draw = random.Random(2)
    spans = [(0, 0), (0, 1), (len(BYTES) - 1, 1), (0, len(BYTES)), (7, 3_000_000)]
    spans += [(offset := draw.randrange(len(BYTES)), draw.randrange(min(100_000, len(BYTES) - offset))) for _ in "123"]
    with ThreadPoolExecutor(4) as pool:
        for (offset, length), data in zip(spans, pool.map(lambda s: read(folder, "file", *s), spans), strict=True):
            assert data == BYTES[offset : offset + length]
    assert folder.read("file", 5, 10) == BYTES[5:15]
    assert folder.read("file", len(BYTES) - 3) == BYTES[-3:]


def test_a_folder_is_not_its_neighbour_whose_name_begins_alike(kind, url):
    folder, neighbour = open_folder(f"{url}/a/"), open_folder(f"{url}/ab")
    folder.write("b/c +#%é", b"1")
    neighbour.write("x", b"22")
    bucket, _, key = url.partition("://")[2].partition("/")
    if kind == "s3":
        folder._client.put_object(Bucket=bucket, Key=f"{key}/a/", Body=b"")
    else:
        folder._bucket.blob(f"{key}/a/").upload_from_string(b"")
    assert folder.sizes() == {"b/c +#%é": 1}
    assert folder.read("b/c +#%é") == b"1"
    assert neighbour.sizes() == {"x": 2}
    assert folder.join("b/c") == f"{url}/a/b/c"
    assert open_folder(url).sizes() == {"a/b/c +#%é": 1, "ab/x": 2}
    with pytest.raises(UserError, match="is not the name of a file inside a folder"):
        folder.read("../ab/x")


def test_what_cannot_be_read_is_told(folder):
    folder.write("file", b"12345")
    for call in (lambda: folder.read("none"), lambda: read(folder, "none", 0, 3)):
        with pytest.raises(UserError, match="none: there is no such file"):
            call()
    for offset, length in ((3, 3), (5, 1), (100, 2)):
        with pytest.raises(UserError, match=f"file:? has 5 bytes and byte {offset + length} was asked for"):
            read(folder, "file", offset, length)


def test_a_bucket_that_does_not_exist_is_told(kind):
    address = f"{'s3' if kind == 's3' else 'gs'}://nobody-has-this/prefix"
    folder = open_folder(address)
    for call in (folder.sizes, lambda: folder.write("x", b"1"), lambda: folder.create("x", 1)):
        with pytest.raises(UserError, match=f"^{address}.*: the bucket does not exist"):
            call()


def test_clearing_removes_the_marker_first_and_everything(faulty, url):
    folder = open_folder(url)
    for name in ("a", "marker", "sub/b"):
        folder.write(name, b"1")
    faulty.plan()
    folder.clear("marker")
    assert folder.sizes() == {}
    assert "marker" in next(request for request in faulty.requests if request.startswith(("DELETE", "POST")))


def test_of_writers_at_once_one_succeeds(folder):
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda i: folder.write_new("file", b"%d" % i), range(4))) == 1
    assert not folder.write_new("file", b"another")


@pytest.mark.slow
def test_a_conditional_write_whose_answer_is_lost_has_succeeded(faulty, url):
    folder = open_folder(url)
    faulty.plan(Fault("lose", "^(PUT|POST) ", status=503))
    assert folder.write_new("file", b"mine")
    assert faulty.left() == 0
    assert folder.read("file") == b"mine"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["refuse", "lose", "cut", "flip"])
def test_uploads_arrive_whole(faulty, url, fault):
    folder = open_folder(url)
    writer = folder.create("file", len(BYTES))
    faulty.plan(Fault(fault, "partNumber=|uploadType=", times=2))
    fill(writer, BYTES, threads=3)
    assert faulty.left() == 0
    writer.commit()
    assert folder.read("file") == BYTES
    assert folder.sizes() == {"file": len(BYTES)}


def test_a_connection_that_breaks_is_taken_up_where_it_broke(faulty, url, monkeypatch):
    folder = open_folder(url)
    folder.write("file", BYTES)
    faulty.plan(Fault("cut", "^GET .*file", times=3))
    spans = []
    get = folder._get
    monkeypatch.setattr(folder, "_get", lambda name, offset, *rest: spans.append(offset) or get(name, offset, *rest))
    assert read(folder, "file", 11, len(BYTES) - 11) == BYTES[11:]
    assert faulty.left() == 0
    assert len(spans) == 4
    assert spans == sorted(spans)
    assert spans[-1] > 11


def test_a_connection_that_breaks_every_time_is_given_up(faulty, url):
    folder = open_folder(url)
    folder.write("file", BYTES)
    faulty.plan(Fault("cut", "^GET .*file", times=1000))
    with pytest.raises(UserError, match=f"file: the connection broke {remote.BODY_ATTEMPTS} times"):
        read(folder, "file", 0, len(BYTES))


def test_an_object_that_changes_between_two_attempts_is_not_mixed(folder, url, faulty, monkeypatch):
    folder.write("file", BYTES)
    through = open_folder(url)
    faulty.plan(Fault("cut", "^GET .*file"))
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: seconds and folder.write("file", BYTES[::-1]))
    told = r"file: (the store refuses the GetObject request .*412|another file has replaced)"
    with pytest.raises(UserError, match=told):
        read(through, "file", 0, len(BYTES))


def test_an_object_of_another_size_does_not_stay(folder, monkeypatch):
    writer = folder.create("file", 5)
    fill(writer, b"12345")
    monkeypatch.setattr(folder, "size", lambda name: 4)
    with pytest.raises(UserError, match="file: the store holds 4 bytes of 5"):
        writer.commit()
    assert folder.sizes() == {}


def test_a_file_is_committed_though_its_parts_cannot_be_removed(folder, monkeypatch, caplog):
    def refuse():
        raise UserError("403")

    writer = folder.create("file", 0)
    monkeypatch.setattr(writer, "_remove_parts", refuse)
    writer.commit()
    writer.abort()
    assert folder.sizes() == {"file": 0}
    assert "parts of a finished file stay in the store: 403" in caplog.text


def test_a_write_that_is_no_part_is_refused(folder):
    writer = folder.create("file", LEAST_PART + 10)
    for offset, length in ((1, LEAST_PART), (0, 4096), (LEAST_PART, 11)):
        with pytest.raises(ValueError, match=f"{length} bytes at {offset} are not part"):
            writer.write_at(offset, memoryview(bytearray(length)))
    writer.abort()


def test_a_file_that_is_replaced_has_another_version(folder):
    folder.write("sub/a", b"one")
    folder.write("b", b"two")
    before = folder.versions()
    assert before.keys() == folder.sizes().keys() == {"sub/a", "b"}
    folder.write("b", b"six")
    after = folder.versions()
    assert after["b"] != before["b"] and after["sub/a"] == before["sub/a"]
