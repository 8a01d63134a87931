"""A turn that its deadline cuts: what was sampled is returned. Also a program (see ``main``)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from fake_engines import actor_without_vllm
from rollout_config import rollout_config
from tiny_model import write_tiny_model

from megatron_fleet.agents.engine import EngineLost, SamplingParams
from megatron_fleet.rollout.engine_actor import EngineActor, environment

PROMPT = [5, 6, 7]
CONTEXT = 32_000
"""More than a CPU samples before the deadline."""
TRIES = 60
"""On a machine that stalls, a deadline may pass before the first token; such a request is made again."""


async def main(model: Path, folder: Path) -> None:
    """Start an engine, have a turn cut, ask for a short one. Prints both as JSON."""
    config = rollout_config(model, engine={"kv_cache_bytes": 256 << 20, "request_timeout_s": 1.0}, max_context=CONTEXT)
    actor = EngineActor(config, "", folder / "engine.log", "shm")
    await actor.start()
    results = []
    for tokens in (CONTEXT - len(PROMPT), 3):
        for _ in range(TRIES):
            try:
                result = await actor._generate(PROMPT, SamplingParams(1.0, tokens, (), 1), "s", [])
            except EngineLost:
                continue
            if result.finish_reason == "deadline" or tokens == 3:
                break
        results.append([result.token_ids.tolist(), result.logprobs.tolist(), result.finish_reason, result.versions])
    (folder / "results.json").write_text(json.dumps(results))
    await actor.shutdown()


@pytest.mark.slow
def test_vllm_returns_what_it_sampled_until_the_deadline(tmp_path):
    model = write_tiny_model(tmp_path / "model", 1, context=CONTEXT)
    subprocess.run([sys.executable, __file__, str(model), str(tmp_path)], check=True, timeout=600)
    (ids, logprobs, reason, versions), (after, *_, short_reason, _) = json.loads(
        (tmp_path / "results.json").read_text()
    )
    assert reason == "deadline" and 0 < len(ids) == len(logprobs) < CONTEXT - len(PROMPT)
    assert versions == [[0, 0, len(ids)]] and np.all(np.array(logprobs) < 0)
    assert short_reason == "length" and after == ids[:3]  # equal seeds: the engine lives, and nothing was lost


class SilentLlm:
    """vLLM with a request that gets no token; aborting ends it."""

    def __init__(self):
        self.aborted = asyncio.Event()

    async def generate(self, request, params, name):
        await self.aborted.wait()
        yield type("Output", (), {"outputs": [type("Completion", (), {"token_ids": [], "finish_reason": "abort"})]})

    async def abort(self, name):
        self.aborted.set()


async def test_a_turn_without_a_token_at_its_deadline_is_nobodys_sample(tmp_path, monkeypatch):
    config = rollout_config(tmp_path, engine={"request_timeout_s": 0.01})
    actor = actor_without_vllm(tmp_path, monkeypatch, config, SilentLlm())
    with pytest.raises(EngineLost, match="sampled no token"):
        await actor._generate(PROMPT, SamplingParams(1.0, 3, ()), "s", [])


if __name__ == "__main__":
    os.environ.update(environment(cuda=False))
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
