"""The S3 server of the checkpoint tests."""

from __future__ import annotations

import pytest
from s3_server import BUCKET, found_by_boto3


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def any_url(request, tmp_path):
    """Address of an empty store."""
    if request.param == "disk":
        return str(tmp_path / "store")
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}"
