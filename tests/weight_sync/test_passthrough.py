"""The vision tower of a served model, which the trainer does not hold, after a sleep that dropped it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
if not (Path(sys.prefix) / "torchvision").is_dir():
    pytest.importorskip("torchvision")

sys.path.append(str(Path(__file__).parents[1] / "rollout"))

from engine_process import EngineProcess, Engines
from local_sender import FolderWeights, LocalSender
from tiny_vision_model import write_tiny_vision_model

from megatron_fleet.weight_sync.registry import make_transport
from megatron_fleet.weights.hf_model import open_model

pytestmark = pytest.mark.slow


class LanguageModel(FolderWeights):
    """Weights that Megatron holds of a model with vision."""

    def _tensors(self):
        passthrough = open_model(self.folder).passthrough
        return {name: tensor for name, tensor in super()._tensors().items() if name not in passthrough}


async def test_the_tower_is_there_again_after_the_update_that_follows_a_sleep(tmp_path):
    model = write_tiny_vision_model(tmp_path / "model", seed=1)
    engine = EngineProcess(
        model, tmp_path / "log", skip_tokenizer_init=False, max_model_len=512, limit_mm_per_prompt={"video": 0}
    )
    try:
        before = engine.ask("tower")
        assert all(before[:1])
        sender, engines, transport = LocalSender(LanguageModel(model)), Engines(engine), make_transport("shm")
        await transport.sync(sender, engines, 1)
        assert engines.failures == [] and engine.ask("tower") == before, "an engine that does not sleep keeps it"
        engine.ask("lose tower")
        assert not any(engine.ask("tower"))
        await transport.sync(sender, engines, 2)
        assert engines.failures == [] and engine.ask("tower") == before
        transport.close()
    finally:
        engine.close()
