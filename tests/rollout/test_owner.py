"""When the process that owns a rollout ends, by whatever means, nothing of the rollout stays."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

OWNER = """
import asyncio, json, signal, sys
from pathlib import Path
from megatron_fleet.config.schema import Config
from megatron_fleet.cluster.janitor import marked, shared_files
from megatron_fleet.rollout.service import RolloutService

async def own():
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    async with RolloutService(config, Path(sys.argv[2]), Path(sys.argv[3])) as rollout:
        if sys.argv[4] == "ready":
            await rollout.wait_ready()
        pids = marked(rollout.run_id)
        print(json.dumps({"run": rollout.run_id, "pids": pids, "files": list(shared_files(pids))}), flush=True)
        await asyncio.sleep(120)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a background job it would ignore it
    asyncio.run(own())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), 1)


@pytest.mark.parametrize(
    ("how", "when", "within_s"),
    [
        (signal.SIGKILL, "ready", 8),
        (signal.SIGKILL, "starting", 8),
        (signal.SIGTERM, "ready", 8),
        (signal.SIGINT, "ready", 15),
    ],
)
def test_nothing_outlives_the_owner(tmp_path, episode_python, model, how, when, within_s):
    (tmp_path / "config.json").write_text(rollout_config(model).model_dump_json())
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, "owner.py", "config.json", "out", str(episode_python), when]
    # As a torchrun rank would be: what it says about ranks must not reach the engines.
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment |= {"WANDB_API_KEY": "planted", "AWS_SECRET_ACCESS_KEY": "planted"}
    owner = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    try:
        told = json.loads(owner.stdout.readline())
        assert len(told["pids"]) >= 5  # Ray's own and ours
        if when == "ready":  # Ray's agents, too, which would write their title over their environment, mark and all
            started = psutil.Process(owner.pid).children(recursive=True)
            agents = {p.pid: p.cmdline()[0].rstrip() for p in started if "Agent" in p.cmdline()[0]}
            assert set(agents.values()) == {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
            assert agents.keys() <= set(told["pids"])
        (folder,) = Path(tempfile.gettempdir()).glob(f"mf-{told['run']}")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # whatever Ray makes of its folder within
        assert not any(b"planted" in _environment(pid) for pid in told["pids"])
        assert not any(b"MASTER_ADDR=" in _environment(pid) for pid in told["pids"])
        owner.send_signal(how)
        owner.wait(within_s)
        deadline = time.monotonic() + within_s
        while left := _alive(told["run"]):
            assert time.monotonic() < deadline, [Path(f"/proc/{p}/cmdline").read_text()[:80] for p in left]
            time.sleep(0.1)
        while list(Path("/tmp").glob(f"mf-{told['run']}*")) or any(Path(f).exists() for f in told["files"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        owner.kill()
        owner.wait()


def _alive(run_id: str) -> list[int]:
    """Processes with the run's mark or the run's name on their command line; the mark alone would miss a janitor."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if run_id.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
