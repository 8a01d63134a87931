"""Fixtures for the tests of whole rollouts."""

from __future__ import annotations

from megatron_fleet.rollout import ray_local

# Test modules import ray, which settles the token of every cluster of this process.
ray_local.authenticate()
