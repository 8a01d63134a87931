"""A rollout that cannot start says why, in one sentence, and leaves nothing behind."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from tiny_model import write_tiny_model

from megatron_fleet.cluster.janitor import marked
from megatron_fleet.config.errors import UserError
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.rollout.service import RolloutService

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("tokenizer.json", "^worker 0 did not start: .*tokenizer.json: no such file"),
        # vLLM loads in a process of its own and passes on only that it failed; its log has the reason.
        ("model.safetensors", "^engine 0 did not start: .*Its log is .*engine-0.log"),
    ],
)
async def test_a_rollout_that_cannot_start_says_why(tmp_path, episode_python, missing, sentence):
    model = write_tiny_model(tmp_path / "model", 1)
    (model / missing).unlink()
    service = RolloutService(rollout_config(model), tmp_path, episode_python)
    with pytest.raises(RolloutFailed, match=sentence) as failure:
        async with service:
            await service.wait_ready()
    assert "\n" not in str(failure.value)
    assert marked(service.run_id) == []


async def test_environments_that_cannot_start_are_known_before_anything_waits(tmp_path, episode_python):
    config = rollout_config(write_tiny_model(tmp_path / "model", 1))
    config = config.model_copy(update={"env": config.env.model_copy(update={"start_timeout_s": 0.01})})
    service = RolloutService(config, tmp_path, episode_python)
    with pytest.raises(UserError, match=r"env\.start_timeout_s"):
        await service.__aenter__()
    assert marked(service.run_id) == []
