"""Published weights as a real vLLM engine uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from weight_fixtures import stage_chunks, tiny_config  # noqa: E402

from megatron_fleet.platform.communicator import Alone  # noqa: E402
from megatron_fleet.weight_sync.publish_shm import ShmPublisher  # noqa: E402
from megatron_fleet.weights.load import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource, Place  # noqa: E402

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45], [99, 7]]
TOKENS = 24


class EngineProcess:
    """The weight client of a `vllm_process.py`."""

    def __init__(self, folder: Path, log: Path, dtype: str = "float32") -> None:
        script = Path(__file__).with_name("vllm_process.py")
        answers, end = os.pipe()
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, script, folder, str(end), dtype],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=[end],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
            )
        os.close(end)
        self._answers = os.fdopen(answers)

    def ask(self, *command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answers.readline())

    def init_weight_transfer_engine(self, init_info):
        self.ask("rpc", "init_weight_transfer_engine", init_info)

    def start_weight_update(self):
        self.ask("rpc", "start_weight_update")

    def update_weights(self, update_info):
        self.ask("rpc", "update_weights", update_info)

    def finish_weight_update(self, weight_version=None):
        self.ask("rpc", "finish_weight_update")

    def close(self):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._answers.close()


def make_model(folder: Path, seed: int, tied: bool):
    torch.manual_seed(seed)
    sizes = tiny_config(
        hidden_size=64, head_dim=32, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3
    )
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | {"tie_word_embeddings": tied}))
    model.save_pretrained(folder)
    return model.eval()


def greedy(model) -> list[list[int]]:
    out = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        out.append(ids[len(prompt) :])
    return out


def store_rotary_frequencies(file: Path) -> None:
    """As folders of old transformers versions do; an update that leaves them out is whole."""
    tensors = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_speaks_with_the_published_weights(tmp_path, tied):
    before, after = (greedy(make_model(tmp_path / name, seed, tied)) for seed, name in enumerate("ab"))
    assert before != after
    store_rotary_frequencies(tmp_path / "a" / "model.safetensors")
    engine = EngineProcess(tmp_path / "a", tmp_path / "engine.log")
    try:
        assert engine.ask("generate", PROMPTS, TOKENS) == before, (tmp_path / "engine.log").read_text()[-3000:]
        config = json.loads((tmp_path / "a" / "config.json").read_text())
        chunks = stage_chunks(config, (0, 1), 0, 1)
        load_hf(chunks, tmp_path / "b")
        source = MegatronWeightSource(chunks, config, dtype=torch.float32, place=Place())
        publisher = ShmPublisher(source, engine, Alone())
        publisher.publish(1)
        assert engine.ask("generate", PROMPTS, TOKENS) == after
        load_hf(chunks, tmp_path / "a")
        publisher.publish(2)
        assert engine.ask("generate", PROMPTS, TOKENS) == before
        publisher.close()
    finally:
        engine.close()
