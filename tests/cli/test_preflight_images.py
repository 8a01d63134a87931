"""Tasks on a screen: refused for models that see none, and for training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.data.task import Task
from megatron_fleet.preflight import checks

CLICK = Task("buy-1", "Buy it.", "shop", modality="computer_use")
READ = replace(CLICK, key="read-1", modality="tool_use")
VISION = {"model_type": "qwen3_vl", "image_token_id": 1, "video_token_id": 2}
PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}


@pytest.fixture
def blind(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


@pytest.fixture
def seeing(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path


def config(folder: Path, *overrides: str):
    return load(["experiment=quickstart", f"model.path={folder}", *overrides])


@pytest.mark.parametrize("modality", ["computer_use", "browser_use"])
def test_a_model_without_vision_is_refused_tasks_on_a_screen(blind, modality):
    said = rf"^model.path={blind}: .* takes no images .* task buy-1 of data.tasks=.* is a {modality} task; choose .*$"
    with pytest.raises(UserError, match=said):
        checks.check_images(config(blind), [READ, replace(CLICK, modality=modality)])
    checks.check_images(config(blind), [READ])


def test_a_vision_model_may_be_evaluated_on_them(seeing):
    checks.check_images(config(seeing), [READ, CLICK])


def test_training_on_a_screen_is_refused(seeing, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    rows = [
        {"key": f"t{i}", "prompt": "p", "env_id": "booking", "task_modality": "browser_use", "verifier_func": "x"}
        for i in range(40)
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"is a browser_use task, and training on images is not possible yet; set "):
        checks._tasks(config(seeing, f"data.tasks={tmp_path}/tasks.json"))
