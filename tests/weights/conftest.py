"""Megatron's process groups, for the tests that describe a model to it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def groups():
    """Place of a world of one; `weight_fixtures` needs torch, which not every environment has."""
    from weight_fixtures import megatron_groups

    with megatron_groups():
        yield
