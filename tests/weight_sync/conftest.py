"""Megatron's process groups, and an S3 server."""

from __future__ import annotations

import pytest
from s3_server import BUCKET, found_by_boto3


@pytest.fixture(scope="module")
def groups():
    """Megatron's groups of a world of one; `weight_fixtures` needs torch, which not every environment has."""
    from weight_fixtures import megatron_groups

    with megatron_groups():
        yield


@pytest.fixture(scope="module")
def s3_url():
    """A bucket of a real S3 server, which boto3's own chain finds, in processes started meanwhile too."""
    with found_by_boto3():
        yield f"s3://{BUCKET}/weights"
