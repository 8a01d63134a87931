"""When the process that owns a rollout is killed, nothing of the rollout stays. (Whole runs are stopped by signals that
they heed in tests/e2e.)"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from tiny_model import write_tiny_model
from turns import in_turn
from waiting import HANG_S, wait_until

from megatron_fleet.cluster.janitor import marked

pytestmark = pytest.mark.slow

OWNER = """
import asyncio, json, sys
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
        await asyncio.sleep(3600)

if __name__ == "__main__":
    asyncio.run(own())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), 1)


@pytest.mark.parametrize("when", in_turn(["ready", "starting"], of=2))
def test_nothing_outlives_a_killed_owner(tmp_path, episode_python, model, when):
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
            wait_until(lambda: set(_agents(owner.pid).values()) == {"ray::DashboardAgent", "ray::RuntimeEnvAgent"})
            assert _agents(owner.pid).keys() <= set(marked(told["run"]))
        (folder,) = Path(tempfile.gettempdir()).glob(f"mf-{told['run']}")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # whatever Ray makes of its folder within
        commands = {p.pid: p.cmdline() for p in psutil.Process(owner.pid).children(recursive=True)}
        assert any("janitor.py" in part for command in commands.values() for part in command)
        assert not any("monitor.py" in part for command in commands.values() for part in command)  # Ray's
        assert not any(b"planted" in _environment(pid) for pid in {*told["pids"], *commands})
        assert not any(b"MASTER_ADDR=" in _environment(pid) for pid in told["pids"])
        owner.kill()
        owner.wait(HANG_S)
        wait_until(lambda: not _alive(told["run"]))
        wait_until(lambda: not [*Path("/tmp").glob(f"mf-{told['run']}*"), *filter(os.path.exists, told["files"])])
    finally:
        owner.kill()
        owner.wait()


def _agents(owner: int) -> dict[int, str]:
    """Titles of Ray's agents below a process."""
    found = {}
    for process in psutil.Process(owner).children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if "Agent" in (title := process.cmdline()[0].rstrip()):
                found[process.pid] = title
    return found


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
