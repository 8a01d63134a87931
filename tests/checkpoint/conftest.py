"""The servers of the checkpoint tests."""

from __future__ import annotations

import pytest
from gcs_server import GCS_BUCKET, found_by_google
from s3_server import BUCKET, found_by_boto3


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


@pytest.fixture(scope="module")
def gcs():
    pytest.importorskip("google.cloud.storage")
    with found_by_google() as server:
        yield server


@pytest.fixture(params=["disk", "s3", "gcs"])
def any_url(request, tmp_path):
    """Address of an empty store."""
    if request.param == "disk":
        return str(tmp_path / "store")
    request.getfixturevalue(request.param)
    return f"s3://{BUCKET}/{tmp_path.name}" if request.param == "s3" else f"gs://{GCS_BUCKET}/{tmp_path.name}"
