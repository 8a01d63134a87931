"""Objects on a real S3 server: exact bytes, refusals in plain words, broken connections survived."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from held_ports import held_ports
from s3_server import BUCKET, Wire
from storage_helpers import fill

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.open import open_folder

BYTES = random.Random(0).randbytes(12_000_017)
LEAST_PART = 5 << 20
"""Bytes of the smallest part that the protocol allows before the last one."""


@pytest.fixture
def folder(s3_url):
    return open_folder(s3_url)


@pytest.fixture
def module(s3, monkeypatch):
    """The module, with small parts and no long waits."""
    from megatron_fleet.storage import s3

    monkeypatch.setattr(s3, "PART", LEAST_PART)
    monkeypatch.setattr(s3.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    return s3


@pytest.fixture
def wire(s3, monkeypatch):
    """Route the clients made hereafter through a wire that cuts answers."""
    wires = []

    def through(cuts: int, after: int = 200_000) -> Wire:
        wires.append(Wire(s3, cuts, after))
        monkeypatch.setenv("AWS_ENDPOINT_URL", wires[-1].endpoint)
        return wires[-1]

    yield through
    for each in wires:
        each.close()


def read(folder, name: str, offset: int, length: int) -> bytes:
    buffer = memoryview(bytearray(length))
    folder.read_into(name, offset, buffer)
    return bytes(buffer)


def test_parts_sent_by_threads_in_any_order_make_the_object(folder, module):
    for size in (len(BYTES), 2 * LEAST_PART, 1, 0):
        writer = folder.create("sub/big", size)
        fill(writer, BYTES[:size], threads=3)
        before = folder.sizes()
        writer.commit()
        writer.abort()
        assert "sub/big" not in before or size < len(BYTES)
        assert folder.sizes() == {"sub/big": size}
        assert folder.read("sub/big") == BYTES[:size]
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


def test_a_folder_is_not_its_neighbour_whose_name_begins_alike(s3_url):
    folder, neighbour = open_folder(f"{s3_url}/a/"), open_folder(f"{s3_url}/ab")
    folder.write("b/c", b"1")
    neighbour.write("x", b"22")
    folder._client.put_object(Bucket=BUCKET, Key=s3_url.removeprefix(f"s3://{BUCKET}/") + "/a/", Body=b"")
    assert folder.sizes() == {"b/c": 1}
    assert neighbour.sizes() == {"x": 2}
    assert folder.join("b/c") == f"{s3_url}/a/b/c"
    assert open_folder(s3_url).sizes() == {"a/b/c": 1, "ab/x": 2}
    with pytest.raises(UserError, match="is not the name of a file inside a folder"):
        folder.read("../ab/x")


def test_what_cannot_be_read_is_told(folder):
    folder.write("file", b"12345")
    for call in (lambda: folder.read("none"), lambda: read(folder, "none", 0, 3)):
        with pytest.raises(UserError, match="none: there is no such file"):
            call()
    for offset, length in ((3, 3), (5, 1), (100, 2)):
        with pytest.raises(UserError, match=f"file: has 5 bytes and byte {offset + length} was asked for"):
            read(folder, "file", offset, length)


def test_a_bucket_that_does_not_exist_is_told(s3):
    folder = open_folder("s3://nobody-has-this/prefix")
    for call in (folder.sizes, lambda: folder.write("x", b"1"), lambda: folder.create("x", 1)):
        with pytest.raises(UserError, match=r"^s3://nobody-has-this/prefix.*: the bucket does not exist"):
            call()


def test_a_bucket_that_cannot_exist_is_told(s3):
    with pytest.raises(UserError, match=r"^s3://a_b\$c/x: .*Invalid bucket name.*; correct the address"):
        open_folder("s3://a_b$c/x").sizes()


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_told_and_not_shown(s3, s3_url, monkeypatch, name):
    monkeypatch.setenv(name, "Wr0ngAndSecret")
    folder = open_folder(s3_url)
    calls = (
        folder.sizes,
        lambda: folder.read("x", 0, 1),
        lambda: folder.write("x", b"1"),
        lambda: folder.create("x", 1),
        lambda: folder.delete("x"),
    )
    for call in calls:
        with pytest.raises(UserError, match=r"the store (refuses the credentials|denies the access)") as caught:
            call()
        assert "Wr0ng" not in str(caught.value)
        assert s3.secret not in str(caught.value)


def test_an_identity_that_may_only_read_is_told_so(s3, folder, s3_url, monkeypatch):
    folder.write("file", b"12345")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.reader_secret)
    reader = open_folder(s3_url)
    assert reader.read("file") == b"12345"
    for call in (lambda: reader.write("file", b"1"), lambda: reader.create("x", 1), lambda: reader.delete("file")):
        with pytest.raises(UserError, match=r"the store denies the access .AccessDenied.; give this identity"):
            call()
    assert folder.sizes() == {"file": 5}


def test_missing_credentials_are_told(s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="no credentials for the store; set AWS_ACCESS_KEY_ID"):
        open_folder("s3://bucket/x").sizes()
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(UserError, match=r"s3: .*absent.*; set up the credentials"):
        open_folder("s3://bucket/x").sizes()


def test_a_store_that_is_not_there_is_told(module, monkeypatch):
    with held_ports(1) as (port,):
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(UserError, match=f"the store does not answer .*{endpoint}.*; check AWS_ENDPOINT_URL"):
            open_folder("s3://bucket/x").sizes()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(UserError, match=r"s3: .*nonsense; check AWS_ENDPOINT_URL"):
        open_folder("s3://bucket/x")


def test_a_connection_that_breaks_is_taken_up_where_it_broke(module, folder, s3_url, wire, monkeypatch):
    folder.write("file", BYTES)
    cut = wire(cuts=3, after=3_000_000)
    through = open_folder(s3_url)
    spans = []
    get = through._get
    monkeypatch.setattr(through, "_get", lambda name, offset, *rest: spans.append(offset) or get(name, offset, *rest))
    assert read(through, "file", 11, len(BYTES) - 11) == BYTES[11:]
    assert cut.cuts_left == 0
    assert len(spans) == 4
    assert spans == sorted(set(spans))


def test_a_connection_that_breaks_every_time_is_given_up(module, folder, s3_url, wire):
    folder.write("file", BYTES)
    wire(cuts=1000, after=70_000)
    with pytest.raises(UserError, match=f"file: the connection broke {module.BODY_ATTEMPTS} times"):
        read(open_folder(s3_url), "file", 0, len(BYTES))


def test_an_object_that_changes_between_two_attempts_is_not_mixed(module, folder, s3_url, wire, monkeypatch):
    folder.write("file", BYTES)
    wire(cuts=1, after=3_000_000)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: seconds and folder.write("file", BYTES[::-1]))
    with pytest.raises(UserError, match=r"file: the store refuses the GetObject request .*412"):
        read(open_folder(s3_url), "file", 0, len(BYTES))


def test_the_store_checks_what_it_receives(module, folder, monkeypatch):
    monkeypatch.setattr(module, "_crc32", lambda data: "AAAAAA==")
    with pytest.raises(UserError, match="file: the store refuses the PutObject request"):
        folder.write("file", b"12345")
    writer = folder.create("file", 5)
    with pytest.raises(UserError, match="file: the store refuses the UploadPart request"):
        fill(writer, b"12345")
    with pytest.raises(ValueError, match="1 parts were not written"):
        writer.commit()
    writer.abort()
    writer.abort()
    assert folder.sizes() == {}


def test_an_upload_that_another_process_removed_is_told(module, folder):
    writer = folder.create("file", 5)
    fill(writer, b"12345")
    folder.abort_uploads()
    with pytest.raises(UserError, match="file: the unfinished upload was removed"):
        writer.commit()
    writer.abort()
    assert folder.sizes() == {}


def test_an_upload_is_aborted_once_and_never_after_its_commit(module, folder, monkeypatch):
    aborted = []

    def gone(**upload):
        aborted.append(upload["Key"].rpartition("/")[2])
        # What the protocol answers when there is no such upload; this server says nothing.
        raise module.exceptions.ClientError({"Error": {"Code": "NoSuchUpload"}}, "AbortMultipartUpload")

    monkeypatch.setattr(folder._client, "abort_multipart_upload", gone)
    for name in ("one", "two", "three"):
        writer = folder.create(name, 5)
        if name == "two":
            fill(writer, b"12345")
            writer.commit()
        writer.abort()
        writer.abort()
    assert aborted == ["one", "three"]
    assert folder.sizes() == {"two": 5}


def test_an_object_of_another_size_does_not_stay(module, folder, monkeypatch):
    writer = folder.create("file", 5)
    fill(writer, b"12345")
    monkeypatch.setattr(folder, "size", lambda name: 4)
    with pytest.raises(UserError, match="file: the store holds 4 bytes of 5"):
        writer.commit()
    assert folder.sizes() == {}


def test_a_write_that_is_no_part_is_refused(module, folder):
    writer = folder.create("file", LEAST_PART + 10)
    for offset, length in ((1, LEAST_PART), (0, 4096), (LEAST_PART, 11)):
        with pytest.raises(ValueError, match=f"{length} bytes at {offset} are not part"):
            writer.write_at(offset, memoryview(bytearray(length)))
    writer.abort()


@pytest.mark.parametrize("size", [0, 1, 16 << 20, 160 << 30, 2 << 40, 5 << 40])
def test_an_upload_of_any_size_has_as_many_parts_as_may_be(size):
    pytest.importorskip("boto3")
    from megatron_fleet.storage.s3 import MOST_PARTS, PART, part_bytes

    part = part_bytes(size)
    assert -(-size // part) <= MOST_PARTS
    assert part % 4096 == 0
    assert part == PART or (part - (1 << 20)) * MOST_PARTS < size
