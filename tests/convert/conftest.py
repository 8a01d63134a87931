"""Tiny models made once, and the S3 server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for place in (HERE, HERE.parent / "weights", HERE.parent / "weights" / "torch_dist", HERE.parent):
    sys.path.insert(0, str(place))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Family → its HF folder, not to be changed."""
    root = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        from tiny_models import make

        return root / family if (root / family).exists() else make(family, root / family)

    return get


@pytest.fixture
def copied(made, tmp_path) -> Callable[[str], Path]:
    """Family → a copy of its HF folder."""
    return lambda family: Path(shutil.copytree(made(family), tmp_path / family))


@pytest.fixture
def convert(capsys) -> Callable[..., tuple[int, str, str]]:
    """``mfleet convert …`` in this process: exit code, output, errors."""
    from megatron_fleet import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main(["convert", *map(str, arguments)])
        except SystemExit as e:
            code = int(e.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(convert) -> Callable[..., str]:
    """``mfleet convert …`` that must fail with one line; that line."""

    def run(*arguments: object) -> str:
        code, out, errors = convert(*arguments)
        assert (code, out) == (2, "")
        assert errors.startswith("error: ") and errors.count("\n") == 1
        return errors.removeprefix("error: ").rstrip()

    return run


@pytest.fixture(scope="module")
def s3_running():
    """A real S3 server."""
    from s3_server import s3_server

    with s3_server() as server:
        yield server
