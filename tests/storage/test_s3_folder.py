"""Objects on a real S3 server: what S3 alone does. ``test_store_folders.py`` has what all stores do."""

from __future__ import annotations

import hashlib
import io

import pytest
from held_ports import held_ports
from refusing_proxy import refusing_proxy
from storage_helpers import fill

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.open import open_folder

LEAST_PART = 5 << 20
"""Bytes of the smallest part that the protocol allows before the last one."""


@pytest.fixture
def folder(s3_url):
    return open_folder(s3_url)


@pytest.fixture
def module(s3, monkeypatch):
    """The module, with small parts and no long waits."""
    from megatron_fleet.storage import remote, s3

    monkeypatch.setattr(s3, "PART", LEAST_PART)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    return s3


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


@pytest.fixture
def own_client(module):
    """Other tests use other clients."""
    module._connect.cache_clear()
    yield
    module._connect.cache_clear()


def test_a_store_without_the_new_checksum_headers_is_told_how_and_checks_md5(own_client, module, s3_url, monkeypatch):
    from botocore.awsrequest import AWSResponse
    from urllib3 import HTTPResponse

    new = ("x-amz-checksum-crc", "x-amz-checksum-algorithm", "x-amz-sdk-checksum", "x-amz-trailer")

    def old_store(request, **_):
        if any(name.lower().startswith(new) for name in request.headers):
            body = io.BytesIO(b"<Error><Code>NotImplemented</Code><Message>A header</Message></Error>")
            return AWSResponse(request.url, 501, {}, HTTPResponse(body=body, preload_content=False))
        return None

    def opened():
        found = open_folder(s3_url)
        found._client.meta.events.register("before-send.s3", old_store)
        return found

    for call in (lambda f: f.write("file", b"1"), lambda f: f.create("file", 1)):
        with pytest.raises(UserError, match="set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, which uses MD5"):
            call(opened())
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    folder = opened()
    folder.write("small", b"12345")
    assert folder.write_new("new", b"1") and not folder.write_new("new", b"2")
    writer = folder.create("large", LEAST_PART + 5)
    fill(writer, bytes(LEAST_PART) + b"12345")
    writer.commit()
    assert folder.read("small") + folder.read("large", LEAST_PART, 5) == b"1234512345"
    monkeypatch.setattr(module.hashlib, "md5", lambda data, **_: hashlib.sha256(data))
    with pytest.raises(UserError, match="refuses the PutObject request"):
        folder.write("damaged", b"12345")
    folder.clear("small")
    assert folder.sizes() == {}


def test_a_store_nearby_needs_no_proxy(own_client, s3_url):
    with refusing_proxy() as asked:
        folder = open_folder(s3_url)
        folder.write("file", b"12345")
        assert folder.read("file") == b"12345" and asked == []


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


@pytest.mark.parametrize("size", [0, 1, 16 << 20, 160 << 30, 2 << 40, 5 << 40])
def test_an_upload_of_any_size_has_as_many_parts_as_may_be(size):
    pytest.importorskip("boto3")
    from megatron_fleet.storage.s3 import MOST_PARTS, PART, part_bytes

    part = part_bytes(size)
    assert -(-size // part) <= MOST_PARTS
    assert part % 4096 == 0
    assert part == PART or (part - (1 << 20)) * MOST_PARTS < size
