"""A rollout that cannot start says why, in one sentence, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from tiny_model import write_tiny_model
from turns import in_turn

from megatron_fleet.cluster.janitor import marked
from megatron_fleet.config.errors import UserError
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.rollout.service import RolloutService

pytestmark = pytest.mark.slow


FAULTS = [
    ("tokenizer.json", "^worker 0 did not start: .*tokenizer.json: no such file"),
    # vLLM loads in a process of its own and passes on only that it failed; its log has the reason.
    ("model.safetensors", "^engine 0 did not start: .*Its log is .*engine-0.log"),
]


@pytest.mark.parametrize(("missing", "sentence"), in_turn(FAULTS, of=2))
async def test_a_rollout_that_cannot_start_says_why(tmp_path, episode_python, missing, sentence):
    model = write_tiny_model(tmp_path / "model", 1)
    (model / missing).unlink()
    service = RolloutService(rollout_config(model), tmp_path, episode_python)
    with pytest.raises(RolloutFailed, match=sentence) as failure:
        async with service:
            await service.wait_ready()
    assert "\n" not in str(failure.value)
    assert marked(service.run_id) == []


@pytest.mark.nightly(minutes=1)
async def test_an_engine_that_hangs_tells_where(tmp_path, episode_python):
    model = write_tiny_model(tmp_path / "model", 1)
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")  # whoever opens it waits
    for limit in (75, 300):  # on busy cores it may not have come that far
        config = rollout_config(model, engine={"start_timeout_s": limit})
        service = RolloutService(config, tmp_path, episode_python)
        with pytest.raises(RolloutFailed, match=rf"not within {limit} s \(rollout\.engine\.start_timeout_s\)"):
            async with service:
                await service.wait_ready()
        assert marked(service.run_id) == []
        stacks = (tmp_path / "logs" / "engine-0.log").read_text()
        if "in load_model" in stacks:
            break
    assert "in from_engine_args" in stacks and "in load_model" in stacks


@pytest.mark.nightly(minutes=0.5)
async def test_ray_gets_a_second_start(tmp_path, episode_python):
    service = RolloutService(rollout_config(write_tiny_model(tmp_path / "model", 1)), tmp_path, episode_python)
    killed = asyncio.create_task(asyncio.to_thread(kill_first, "/raylet", service.run_id))
    await asyncio.sleep(0)  # the thread runs; what follows blocks this one
    async with service:
        assert await killed
    assert list((tmp_path / "logs" / "ray").glob("gcs_server*"))  # of the first start
    assert marked(service.run_id) == []


def kill_first(program: str, run_id: str) -> bool:
    while True:
        for pid in marked(run_id):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].endswith(program):
                    os.kill(pid, signal.SIGKILL)
                    return True
        time.sleep(0.01)


async def test_environments_that_cannot_start_are_known_before_anything_waits(tmp_path):
    config = rollout_config(write_tiny_model(tmp_path / "model", 1))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    config = config.model_copy(update={"env": config.env.model_copy(update={"start_timeout_s": 0.01})})
    service = RolloutService(config, tmp_path, python)
    with pytest.raises(UserError, match=r"env\.start_timeout_s"):
        await service.__aenter__()
    assert marked(service.run_id) == []
