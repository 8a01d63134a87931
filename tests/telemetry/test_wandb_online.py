"""W&B over its protocol: what arrives, a key that is wrong, and a server or a process of its own that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from waiting import HANG_S
from wandb_server import WandbServer

pytestmark = pytest.mark.slow

KEY = "5a" * 20
PROGRAM = """
import sys
from pathlib import Path
import psutil
from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry import trackers
trackers.FINISH_TIMEOUT_S = 1.0
try:
    key, folder = sys.argv[1], Path(sys.argv[2])
    sink = trackers.WandbSink("fleet", None, "online", "mine", folder, {"run": {"seed": 3}}, 4, 60.0, key)
except UserError as error:
    print(f"error: {error}")
    sys.exit(2)
for step in range(5, 8):
    sink.write(step, {"reward/avg": step / 2})
    if step == 5:
        print("training", flush=True)
        order = input()
        if order == "kill":
            for child in psutil.Process().children(recursive=True):
                child.kill()
                child.wait()
print("trained", flush=True)
sink.close()
print("closed")
"""
"""Three steps of training; what happens after the first is read from the input. W&B starts one process in each of ours,
so this is one for each test."""


@pytest.fixture
def server():
    server = WandbServer(KEY)
    yield server
    server.close()


def start(server, tmp_path, key: str = KEY) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, key, str(tmp_path)],
        env=environ | {"WANDB_BASE_URL": server.url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def first_step(process: subprocess.Popen[str]) -> None:
    said = []
    while "training\n" not in said:
        line = process.stdout.readline()
        assert line, said
        said.append(line)


def test_what_arrives_has_the_protocol_s_form(server, tmp_path):
    process = start(server, tmp_path)
    first_step(process)
    output, _ = process.communicate("go on\n", HANG_S)
    assert process.returncode == 0 and output.splitlines() == ["trained", "closed"]
    [begun, *_] = server.operations["UpsertBucket"]
    assert (begun["project"], begun["groupName"], begun["displayName"]) == ("fleet", "mine", "mine 01-01 00:01:00")
    config = json.loads(begun["config"])
    assert config["run"]["value"] == {"seed": 3} and config["attempt"]["value"]["resumed_step"] == 4
    rows = server.rows["wandb-history.jsonl"]
    assert [(row["trainer/global_step"], row["reward/avg"]) for row in rows] == [(5, 2.5), (6, 3.0), (7, 3.5)]
    assert server.exit_codes == [0]


def test_a_key_that_the_server_does_not_know_is_one_sentence(server, tmp_path):
    process = start(server, tmp_path, key="b6" * 20)
    output, _ = process.communicate("", HANG_S)
    assert process.returncode == 2
    assert output.startswith("error: logging.wandb.project=fleet: W&B refuses (") and output.count("\n") == 1
    assert "b6b6" not in output and not server.operations


def test_training_goes_on_without_the_server(server, tmp_path):
    process = start(server, tmp_path)
    first_step(process)
    server.close()
    output, _ = process.communicate("go on\n", HANG_S)
    assert process.returncode == 0 and {"trained", "closed"} <= set(output.splitlines())


def test_training_goes_on_without_the_process_of_wandb(server, tmp_path):
    process = start(server, tmp_path)
    first_step(process)
    output, _ = process.communicate("kill\n", HANG_S)
    assert process.returncode == 0 and {"trained", "closed"} <= set(output.splitlines()), output
    assert output.count("W&B receives no further metrics of this run") == 1
