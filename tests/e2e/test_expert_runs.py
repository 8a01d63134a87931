"""Whole runs, on real parts, of models with experts, latent attention, Gated DeltaNet layers, or of a user's family."""

import json
import random
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from score_rollouts import assert_all_agree
from served_models import served_config
from test_whole_runs import convert
from weight_fixtures import random_tensors, write_folder
from whole_runs import Run

from megatron_fleet.embedded_fleet.tasks import generate
from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.tokenizer import train_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from make_tiny import corpus

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_STEP = ("run.steps=1", "eval=none", "rollout.engine.probe_interval=1")
SHORT_TURNS = ("rollout.sampling.max_turns=2", "rollout.sampling.max_tokens_per_turn=32")
KEPT = "algorithm.masked_outcomes=[]"
COIN = """def validate_task(env, final_answer=None):
    import time
    return float(time.time_ns() // 1000 % 2)
"""


@pytest.mark.parametrize(
    ("family", "chat", "layout"),
    [
        pytest.param(
            *("glm4_flash", "glm-4.7", ("parallel.expert=2", "parallel.data=2")),
            marks=pytest.mark.nightly(minutes=2),
            id="glm",
        ),
        pytest.param("qwen3_5", "qwen3.5", (), marks=pytest.mark.nightly(minutes=1), id="qwen3_5"),
    ],
)
def test_other_layers_go_round_the_loop(tmp_path, monkeypatch, family, chat, layout):
    """Weights are random, so rewards are too, to have something to learn from; turns end at their token limit.

    The experts of GLM are divided over two ranks; tests/parity shows that the step equals that of a single rank.
    """
    vocabulary = json.loads((tiny_models.TOKENIZER / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": 2560}
    monkeypatch.setattr(tiny_models, "raw_config", partial(served_config, **sizes))
    model = tiny_models.make(family, tmp_path / "model", dtype=torch.float32)
    train_tokenizer(corpus(random.Random(0)), vocabulary, model, FORMATS[chat].tokens)
    run = round_the_loop(tmp_path, model, *layout)
    assert_all_agree(run, "step_000001", model, tmp_path)
    if layout:
        done = convert(run.out / "checkpoints" / "step_000001", tmp_path / "hf")
        assert done.returncode == 0, done.stderr
        converted, exported, before = map(tiny_models.stored_tensors, (tmp_path / "hf", run.out / "hf", model))
        assert converted.keys() == exported.keys() == before.keys()
        assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
        assert any(not torch.equal(before[name], tensor) for name, tensor in exported.items())


@pytest.mark.nightly(minutes=1)
def test_a_family_of_the_users_own_goes_round_the_loop(tmp_path, monkeypatch):
    """Trainer, engines and episode workers know its model by `model.family` alone."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    model = tmp_path / "model"
    shutil.copytree(tiny_models.TOKENIZER, model)
    tiny = json.loads((model / "config.json").read_text())
    config = {name: value for name, value in tiny.items() if type(value) in (int, float)}
    config |= {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "model_type": "llama"}
    tensors = random_tensors(config)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    write_folder(model, config | mistral, tensors)
    round_the_loop(tmp_path, model, "model.family=my_family:mistral")


def round_the_loop(tmp_path: Path, model: Path, *overrides: str) -> Run:
    """Train a step; engines and trainer must compute the same before and after its update."""
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([asdict(task) | {"verifier_code": COIN} for task in generate(seed=3, per_env=8)]))
    given = (f"model.path={model}", "data=file", f"data.tasks={tasks}", *overrides)
    run = Run(tmp_path / "run", (*given, *ONE_STEP, *SHORT_TURNS, KEPT))
    run.finish()
    run.assert_nothing_left()
    (row,) = run.metrics()
    assert row["policy/ratio_mean"] == 1.0 and row["policy/mismatch_kl"] < 1e-6
    assert row["policy/grad_norm"] > 0 and 0 < row["policy/probe_difference"] < 1e-3
    return run
