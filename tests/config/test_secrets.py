"""Children get the secrets that they use, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import HANG_S

from megatron_fleet.cluster.inventory import nvidia_devices
from megatron_fleet.cluster.janitor import Janitor
from megatron_fleet.cluster.joined_nodes import RanksOfHost
from megatron_fleet.cluster.launcher import LocalRanks
from megatron_fleet.config.secrets import STORE, only_secrets, secrets, wandb_key, without_secrets
from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.envs.registry import ServerStart, serve
from megatron_fleet.preflight.own_parts import check_own_part
from megatron_fleet.tuning.tune_precision import Candidate, _trial

SECRETS = (
    *("WANDB_API_KEY", "WANDB_API_KEY_TOOL_USE", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"),
    *("FLEET_API_KEY", "SLACK_WEBHOOK_URL", "SLACK_BOT_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MFLEET_TOKEN"),
    *("OPENAI_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "apikey", "my_secret", "PGPASSWORD", "MYSQL_PWD"),
    *("GITHUB_PAT", "SENTRY_DSN", "DOCKER_AUTH_CONFIG", "AZURE_STORAGE_CONNECTION_STRING", "MY_JWT", "REDISCLI_AUTH"),
    *("SMTP_PASS", "SSH_PASSPHRASE", "RAY_AUTH_TOKEN"),
)
HARMLESS = (
    *("PATH", "HOME", "TOKENIZERS_PARALLELISM", "AWS_REGION", "AWS_ENDPOINT_URL", "CUDA_VISIBLE_DEVICES", "KEYBOARD"),
    *("HF_HOME", "MONKEY", "WANDB_MODE", "PYTHONPATH", "PWD", "OLDPWD", "RAY_AUTH_MODE", "SSH_AUTH_SOCK", "COMPASS"),
)
SECRET_VALUES = {
    "MLFLOW_TRACKING_URI": "https://user:pw@host/path",
    "DATABASE_URL": "postgresql+psycopg://user:p%40w@host:5432/db",
    "CELERY_BROKER": "redis://:pw@host",
    "WANDB_BASE_URL": "HTTPS://a-token@host",
    "AWS_ENDPOINT": "http://user:pw@host:9000",
}
HARMLESS_VALUES = {
    "HTTP_PROXY": "http://user:pw@proxy:3128",
    "https_proxy": "http://user:pw@proxy:3128",
    "AWS_ENDPOINT_URL": "http://host:9000/a@b",
    "MIRROR": "ssh://git@host/repository",
    "SEEN": "a:b@c",
}


def test_what_looks_like_a_secret_goes_and_all_else_stays():
    assert set(without_secrets(dict.fromkeys(SECRETS + HARMLESS, "x"))) == set(HARMLESS)
    kept = secrets(dict.fromkeys(SECRETS + HARMLESS, "x"), ("AWS_", "FLEET_"))
    assert set(kept) == {"AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "FLEET_API_KEY"}
    assert secrets({"FLEET_API_KEY": "x"}, ()) == {}


def test_secrets_are_hidden_from_a_library_only_while_it_starts_its_process(monkeypatch):
    for name in SECRETS + HARMLESS:
        monkeypatch.setenv(name, "planted")
    before = dict(os.environ)
    with only_secrets(("WANDB_",)):
        kept = {name for name, value in os.environ.items() if value == "planted"}
    assert kept == {*HARMLESS, "WANDB_API_KEY", "WANDB_API_KEY_TOOL_USE"}
    assert dict(os.environ) == before


def test_an_address_with_a_password_is_a_secret_whatever_its_name():
    assert without_secrets(SECRET_VALUES | HARMLESS_VALUES) == HARMLESS_VALUES
    assert secrets(SECRET_VALUES | HARMLESS_VALUES, STORE) == {"AWS_ENDPOINT": SECRET_VALUES["AWS_ENDPOINT"]}


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "AWS_", ""])
def test_a_single_variable_is_kept_by_its_whole_name(name):
    environ = dict.fromkeys(("OPENAI_API_KEY", "OPENAI_API_KEY_ADMIN", "AWS_SECRET_ACCESS_KEY"), "x")
    assert without_secrets(environ, names=(name,)).keys() == environ.keys() & {name}


@pytest.mark.parametrize(
    "start",
    [
        "from megatron_fleet import cli; cli.main(['config', '--out', '.'])",
        "from megatron_fleet.config.secrets import take_secrets; take_secrets({'OPENAI_API_KEY': 'planted'})",
    ],
    ids=["command", "actor"],
)
def test_the_command_that_python_starts_for_the_processor_s_name_gets_none(tmp_path, start):
    """In the process of a command, and in one that is sent its secrets."""
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\nexport -p >> {tmp_path}/environment\n")
    uname.chmod(0o755)
    script = f"{start}; import platform; platform.platform()"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_API_KEY": "planted"}
    subprocess.run([sys.executable, "-c", script], env=environ, cwd=tmp_path, check=True, timeout=HANG_S)
    seen = (tmp_path / "environment").read_text()
    assert "PATH=" in seen and "planted" not in seen


@pytest.mark.parametrize("start", ["own part", "fleet's package", "nvidia-smi", "tuning", "janitor"])
def test_short_children_and_the_janitor_get_none(monkeypatch, tmp_path, start):
    """Environment of each process, from the process itself or from the kernel."""
    for name in SECRETS:
        monkeypatch.setenv(name, "planted")
    said = tmp_path / "said"
    if start == "janitor":
        janitor = Janitor("a-run", tmp_path / "folder")
        janitor.look()  # it runs: before, its environment is none yet
        said.write_bytes(Path(f"/proc/{janitor._process.pid}/environ").read_bytes())
        janitor.close()
    else:
        python = tmp_path / "nvidia-smi"
        python.write_text(f"#!/bin/sh\n/usr/bin/env > '{said}'\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        if start == "own part":
            check_own_part("env.kind", "some.module:name", str(python))
        elif start == "fleet's package":
            serve(ServerStart(EnvConfig(kind="fleet"), tmp_path / "log", str(python), seed=0))
        elif start == "nvidia-smi":
            assert nvidia_devices(dict(os.environ) | {"PATH": str(tmp_path)}) == ()
        else:
            row, config = Candidate("name", ()), SimpleNamespace(model_dump=lambda mode: {})
            _trial(tmp_path, row, config, SimpleNamespace(weights=False), 1, {})
            assert "ended with status 0" in row.problem
    assert said.stat().st_size > 0 and b"planted" not in said.read_bytes()


async def test_a_rank_gets_the_store_s_secrets_and_its_token_alone(tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "planted")
    said = "import os; print(sorted(n for n, v in os.environ.items() if v == 'planted'), os.environ['MFLEET_TOKEN'])"
    ranks = LocalRanks(RanksOfHost((0,), 1, 1), tmp_path, [sys.executable, "-c", said])
    await ranks.start("h:1", "the run's")
    await ranks.stop(20)
    assert (tmp_path / "rank_0.log").read_text().split("] ") == [
        "['AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'GOOGLE_APPLICATION_CREDENTIALS'",
        "the run's\n",
    ]


def test_the_key_of_a_modality_comes_before_the_general_one(monkeypatch):
    for name in ("", "_TOOL_USE", "_COMPUTER_USE"):
        monkeypatch.delenv(f"WANDB_API_KEY{name}", raising=False)
    assert wandb_key("tool_use") is None
    monkeypatch.setenv("WANDB_API_KEY", "general")
    monkeypatch.setenv("WANDB_API_KEY_COMPUTER_USE", "screens")
    assert [wandb_key(modality) for modality in ("all", "tool_use", "computer_use")] == [
        "general",
        "general",
        "screens",
    ]
