"""Settings of Ray's processes, on the controller's host and on the others."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray

from megatron_fleet.cluster import node_process
from megatron_fleet.cluster.inventory import Host
from megatron_fleet.cluster.joined_nodes import RayHead
from megatron_fleet.rollout import ray_local

MEMORY, NICENESS = "RAY_memory_monitor_refresh_ms", "RAY_worker_niceness"


@pytest.fixture
def started(monkeypatch):
    """The environment with which Ray's processes on the controller's host would start."""
    environment = {}
    monkeypatch.setattr(ray, "init", lambda **_: environment.update(os.environ))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in (MEMORY, NICENESS):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield environment
    ray_local._replace_environment(before)


def test_rays_monitor_of_memory_is_off_on_the_controllers_host(started, tmp_path):
    ray_local.start("run", tmp_path, "10.0.0.1")
    assert (started[MEMORY], started[NICENESS]) == ("0", "0")


def test_settings_of_the_user_are_kept_there(started, tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, "250")
    ray_local.start("run", tmp_path, "10.0.0.1")
    assert started[MEMORY] == "250"


@pytest.mark.parametrize("mode", [None, "disabled"])
@pytest.mark.parametrize("token", [None, "file", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_users_token_is_sent_to_an_existing_cluster_unless_the_user_says_otherwise(
    started, tmp_path, monkeypatch, token, mode
):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    elif token is not None:
        monkeypatch.setenv(token, "t")
    with ray_local.children_environment("run"):
        assert ray_local.start("run", tmp_path, "10.0.0.1") is None
    assert started.get("RAY_AUTH_MODE") == (mode or (token and "token"))


def test_rays_monitor_of_memory_is_off_on_other_hosts(monkeypatch, tmp_path):
    spawned = []
    monkeypatch.setattr(node_process, "spawn", lambda command, environment, log: spawned.append(environment))
    member = node_process.Node(Host("b", "10.0.0.2", ()), tmp_path, io.BytesIO())
    member._start_ray(RayHead("10.0.0.1:6379", {"RAY_AUTH_TOKEN": "t"}, str(tmp_path), "run"))
    assert (spawned[0][MEMORY], spawned[0][NICENESS], spawned[0]["RAY_AUTH_TOKEN"]) == ("0", "0", "t")
