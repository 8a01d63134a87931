"""``mfleet eval`` of a model that sees, in an environment that shows screenshots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
if not (Path(sys.prefix) / "torchvision").is_dir():
    pytest.importorskip("torchvision")

from tiny_vision_model import CALL, write_looking_model

from megatron_fleet.cli import main
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import read_vision
from megatron_fleet.telemetry.trajectories import load_trajectories

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
TURNS, TASKS = 3, 2


@pytest.fixture
def url(episode_python):
    command = [episode_python, TESTS / "serve_screens.py", TESTS.parent / "envs"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()


def test_screenshots_reach_the_model_the_records_and_the_report(tmp_path, url):
    model = write_looking_model(tmp_path / "model")
    rows = [
        {"task_key": f"t{i}", "env_key": "screens", "prompt": f"Look {i} times.", "task_modality": "computer_use"}
        for i in range(TASKS)
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    out = tmp_path / "eval"
    command = [
        sys.executable, "-m", "megatron_fleet.cli", "eval", "--tasks", "all", "--out", str(out),
        "experiment=quickstart", f"model.path={model}", "model.dtype=float32", "env=openenv", f"env.url={url}",
        "data=file", f"data.tasks={tmp_path / 'tasks.json'}", "eval.samples=1", "eval.greedy=false",
        "rollout.max_context=3000", f"rollout.sampling.max_turns={TURNS}", "rollout.sampling.max_tokens_per_turn=32",
        "rollout.workers=1", "rollout.renderer=qwen3", "rollout.engine.replicas=1",
        "rollout.engine.kv_cache_bytes=67108864", "env.openenv.reward=sum",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr

    vision, tokenizer = read_vision(model), Tokenizer(model)
    files = sorted((out / "trajectories").glob("*.parquet"))
    episodes = [episode for file in files for episode in load_trajectories(file)]
    assert len(episodes) == TASKS
    for episode in episodes:
        assert episode.outcome == "max_turns" and episode.reward == pytest.approx(0.25 * TURNS), episode.reward_reason
        sampled = tokenizer.decode(episode.token_ids[episode.action_mask].tolist())
        assert sampled == CALL * TURNS
        spans = episode.image_spans
        assert [span.end - span.start for span in spans] == [vision.tokens(200, 96), vision.tokens(96, 128)]
        holders = np.concatenate([np.arange(span.start, span.end) for span in spans])
        np.testing.assert_array_equal(np.flatnonzero(episode.token_ids == vision.placeholder_id), holders)
        assert not episode.action_mask[holders].any()
        for span in spans:
            (file,) = (out / "images").glob(f"{span.digest}.*")
            assert sha256(file.read_bytes()).hexdigest() == span.digest

    assert main(["report", str(out)]) == 0
    page = next(path for path in out.rglob("*.html")).read_text()
    assert page.count("data:image/") >= len({span.digest for span in spans})
