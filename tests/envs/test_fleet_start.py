"""Failures to start the embedded fleet are one sentence; nothing stays behind."""

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.envs.embedded_server import EmbeddedFleet


def interpreter(tmp_path, script):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_server_that_ends_at_once(tmp_path):
    fleet = EmbeddedFleet()
    with pytest.raises(UserError, match=r"status 3.*no OpenEnv here") as failed:
        fleet.start(EnvConfig(), tmp_path / "env.log", interpreter(tmp_path, "echo no OpenEnv here; exit 3"))
    assert "env.log" in str(failed.value)
    assert fleet.pid is None


def test_a_server_that_never_is_ready(tmp_path):
    fleet = EmbeddedFleet()
    with pytest.raises(UserError, match=r"env\.start_timeout_s"):
        fleet.start(
            EnvConfig(start_timeout_s=0.2), tmp_path / "logs" / "env.log", interpreter(tmp_path, "exec sleep 60")
        )
    assert fleet.pid is None


def test_an_interpreter_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        EmbeddedFleet().start(EnvConfig(), tmp_path / "env.log", tmp_path / "nowhere")
