"""Probes of services and of the model: wrong credentials, servers that are down, damaged files."""

import json
import os
import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from held_ports import held_ports
from hub_server import COMMIT, found_by_hub_client
from s3_server import found_by_boto3
from slack_server import TOKEN as SLACK_TOKEN
from slack_server import slack_server
from tinker_service import BASE_MODEL, running
from tinker_service import KEY as TINKER_KEY
from wandb_server import WandbServer

pytest.importorskip("hydra")

from megatron_fleet.cluster.inventory import Host
from megatron_fleet.config.load import load
from megatron_fleet.doctor import model, network, services
from megatron_fleet.doctor.probe import ProbeContext, Result, ask
from megatron_fleet.weights.fetch.cache import fetch

TINY = Path(__file__).parents[2] / "assets" / "tiny"
KEY, WRONG = "0" * 40, "f" * 40


def here(*overrides: str, quick: bool = False) -> ProbeContext:
    return ProbeContext(load(["experiment=quickstart", *overrides]), os.environ, Host("here"), quick)


def asked(name: str, *overrides: str, quick: bool = False) -> Result:
    probes = [probe for probe in (*services.PROBES, *model.PROBES) if probe.name == name]
    (finding,) = ask(probes, here(*overrides, quick=quick))
    return finding.result


def test_a_run_that_uses_no_service_asks_none():
    findings = ask(services.PROBES, here())
    assert {finding.result.status for finding in findings} == {"skipped"}


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


def test_an_object_store(s3, monkeypatch):
    store = "checkpoint.store.url=s3://bucket/runs"
    assert asked("object store", store) == Result("ok", "can write to s3://bucket/runs")
    missing = asked("object store", store, "eval.upload=s3://nothing/evals")
    assert missing.status == "failed" and missing.detail.startswith("eval.upload: s3://nothing/evals")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.reader_secret)
    reader = asked("object store", store)
    assert reader.status == "failed" and "denies the access" in reader.detail
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0" * 32)
    wrong = asked("object store", store)
    assert wrong.status == "failed" and "refuses the credentials (SignatureDoesNotMatch)" in wrong.detail
    assert wrong.fix == "check key, secret, session token and clock"


def test_weights_and_biases(monkeypatch):
    server, project = WandbServer(KEY), "logging.wandb.project=fleet"
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    try:
        assert asked("W&B", project) == Result("ok", "WANDB_API_KEY")
        monkeypatch.setenv("WANDB_API_KEY", WRONG)
        result = asked("W&B", project)
        assert result.status == "failed" and "W&B rejects the key" in result.detail and WRONG not in result.detail
        assert asked("W&B", project, "logging.wandb.mode=offline").status == "skipped"
    finally:
        server.close()
    with held_ports(1) as (port,):
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        result = asked("W&B", project)
    assert result.status == "warning" and "does not confirm the key (ConnectError)" in result.detail


def test_slack(monkeypatch):
    with slack_server() as server:
        channel = ("logging.slack.channel=#training-runs", f"logging.slack.url={server.url}")
        monkeypatch.setenv("SLACK_BOT_TOKEN", SLACK_TOKEN)
        assert asked("Slack", *channel) == Result("ok", "may post to #training-runs")
        server.scopes = "chat:write"
        assert "lacks the scope files:write" in asked("Slack", *channel).detail
        monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-wrong")
        result = asked("Slack", *channel)
        assert result.status == "failed" and "xoxb-wrong" not in f"{result.detail} {result.fix}"


@pytest.fixture
def fleet(monkeypatch):
    """A control plane that knows one key; ``account`` is what it says of that one's team."""

    class Handler(BaseHTTPRequestHandler):
        account: ClassVar[dict[str, Any]] = {
            "team_id": "t",
            "team_name": "Team",
            "instance_limit": 500,
            "instance_count": 20,
        }

        def do_GET(self):
            known = self.headers.get("Authorization") == f"Bearer {KEY}" and self.path == "/v1/account"
            data = json.dumps(self.account if known else {"detail": "no"}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("FLEET_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    yield Handler
    server.shutdown()
    server.server_close()


def test_fleet(fleet, monkeypatch):
    hosted = ("env.kind=fleet", "rollout.episodes_in_flight=32")
    assert asked("Fleet", *hosted) == Result("ok", "Team, 20 of 500 instances in use")
    fleet.account = fleet.account | {"instance_limit": 40}
    scarce = asked("Fleet", *hosted)
    assert scarce.status == "warning" and "and the run needs 32 at once" in scarce.detail
    monkeypatch.setenv("FLEET_API_KEY", WRONG)
    wrong = asked("Fleet", *hosted)
    assert wrong.status == "failed" and wrong.fix == "correct FLEET_API_KEY" and WRONG not in wrong.detail
    monkeypatch.delenv("FLEET_API_KEY")
    assert asked("Fleet", *hosted).fix == "set FLEET_API_KEY in the environment of the run"
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    with held_ports(1) as (port,):
        monkeypatch.setenv("FLEET_BASE_URL", f"http://127.0.0.1:{port}")
        assert "does not answer (ConnectError)" in asked("Fleet", *hosted).detail


def test_an_environment_server_that_is_down():
    with held_ports(1) as (port,):
        result = asked("environment server", "env=openenv", f"env.url=http://127.0.0.1:{port}")
    assert result.status == "failed" and "is not reachable" in result.detail
    assert result.fix == "start the server, or correct the address"


def test_a_server_of_experiments_that_is_down():
    pytest.importorskip("mlflow")
    with held_ports(1) as (port,):
        result = asked("MLflow", f"logging.mlflow.uri=http://127.0.0.1:{port}")
    assert result.status == "failed" and "nothing answers there" in result.detail


@pytest.fixture
def hub(tmp_path):
    with found_by_hub_client(TINY, tmp_path / "hf") as server:
        yield server


def test_a_damaged_file_of_a_model_from_the_hub(hub):
    path = "model.path=fleet/tiny"
    before = asked("model files", path)
    assert before.status == "warning" and "0.0 GB are not here yet" in before.detail
    assert before.fix.endswith("`mfleet model fetch fleet/tiny@main` does it now") and hub.downloads() == []
    fetch("fleet/tiny")
    good = asked("model files", path)
    assert good.status == "ok" and good.detail.endswith("5 hashes are right")
    weights = Path(os.environ["HF_HOME"], "hub", "models--fleet--tiny", "snapshots", COMMIT, "model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.resolve().chmod(0o600)
    weights.resolve().write_bytes(data)
    damaged = asked("model files", path)
    assert damaged.status == "failed" and damaged.detail.startswith("model.safetensors in ")
    assert damaged.fix == "remove it and run `mfleet model fetch fleet/tiny` again"
    assert asked("model files", path, quick=True).status == "ok"  # sizes alone


def test_a_model_that_the_hub_does_not_know_or_that_is_not_here_offline(hub, monkeypatch):
    unknown = asked("model files", "model.path=fleet/other")
    assert unknown.status == "failed" and "has no such model" in unknown.detail
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in asked("model files", "model.path=fleet/tiny").detail


def test_a_folder_that_is_not_whole(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    assert asked("model files", f"model.path={folder}").detail.endswith("their hashes are not known")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = asked("model files", f"model.path={folder}")
    assert result.status == "failed" and "model.safetensors" in result.detail
    assert asked("engine", f"model.path={folder}") == Result("skipped", "the model is not here")


OWN_ENVIRONMENT = """
from megatron_fleet.envs.base import EnvRefused, Observation

class Maps:
    def __init__(self, config, episode):
        pass

    async def reset(self, task):
        if task.env_key != "maps":
            raise EnvRefused(f"there is no {task.env_key}")
        return Observation("a map")

    async def step(self, call): ...
    async def verify(self, final_answer, conversation): ...
    async def close(self): ...
"""


@pytest.mark.slow
def test_a_step_in_an_environment(episode_python):
    result = asked("environment", "env.start_timeout_s=300", "env.reset_timeout_s=299", "rollout.episode_timeout_s=900")
    said = re.findall(r"(\w+), task [\w-]+: \d+ tools, \w+ answered", result.detail)
    assert result.status == "ok" and len(said) > 1 and said == sorted({*said}), result


@pytest.mark.slow
def test_an_environment_that_the_backend_does_not_have_is_named(episode_python, tmp_path, monkeypatch):
    (tmp_path / "own_env.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = [{"key": f"{env}{i}", "prompt": "p", "env_key": env} for env in ("maps", "malls") for i in range(20)]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    result = asked("environment", "env.kind=own_env:Maps", "data=file", f"data.tasks={tmp_path / 'tasks.json'}")
    assert (result.status, result.detail) == ("failed", "malls does not start (there is no malls)")


@pytest.mark.slow
def test_an_environment_that_does_not_start(episode_python, tmp_path):
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"key": f"k{i}", "prompt": "p", "env_key": "e"} for i in range(40)]))
    with held_ports(1) as (port,):
        openenv = ("env=openenv", f"env.url=http://127.0.0.1:{port}", f"data.tasks={tasks}", "data=file")
        result = asked("environment", *openenv)
    assert result.status == "failed" and "does not start" in result.detail, result


def test_an_engine_that_fails_says_why(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\ncat >/dev/null; echo noise; echo \'{"problem": "the engine failed (no room); try less."}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert asked("engine") == Result("failed", "the engine failed (no room)", "try less")


HOSTED = ("trainer=hosted", f"hosted.base_model={BASE_MODEL}")
PRICES = [f"hosted.prices.{name}=0.5" for name in ("prefill", "cached_prefill", "sample", "train")]


@pytest.fixture(scope="module")
def tinker(tmp_path_factory):
    pytest.importorskip("tinker")
    with running(tmp_path_factory.mktemp("service")) as client:
        yield f"hosted.url={client.url}"


def test_the_service_of_a_hosted_trainer(tinker, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", TINKER_KEY)
    found = asked("Tinker", *HOSTED, tinker)
    assert found.status == "ok"
    assert re.fullmatch(rf"{BASE_MODEL}, 4096 tokens, in \d+\.\d s; prices not known, .*", found.detail)
    assert "$0.5 (cached $0.5), $0.5 and $0.5 for a million" in asked("Tinker", *HOSTED, tinker, *PRICES).detail
    without = asked("Tinker", *HOSTED, tinker, "hosted.budget_usd=5")
    assert without.status == "failed" and "its prices are not known" in without.detail
    assert "does not train this model" in asked("Tinker", *HOSTED[:1], "hosted.base_model=other", tinker).detail
    monkeypatch.setattr("megatron_fleet.hosted.service.time.time", lambda: 1e9)
    late = asked("Tinker", *HOSTED, tinker)
    assert late.status == "warning" and "ahead of this machine's" in late.detail


def test_a_hosted_run_needs_neither_a_models_weights_nor_an_engine():
    findings = {f.name: f.result.status for f in ask([*model.PROBES, network.ALONE], here(*HOSTED, quick=True))}
    assert findings["model files"] == findings["engine"] == findings["all-reduce"] == "skipped"
