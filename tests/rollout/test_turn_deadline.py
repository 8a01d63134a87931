"""A turn that its deadline cuts: what was sampled is returned. Also a program (see ``main``)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from fake_engines import actor_without_vllm
from rollout_config import rollout_config
from tiny_model import write_tiny_model

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.token_engine import EngineLost, SamplingParams
from megatron_fleet.rollout import engine_actor
from megatron_fleet.rollout.engine_actor import EngineActor
from megatron_fleet.rollout.engine_arguments import environment

PROMPT = [5, 6, 7]
CONTEXT = 32_000
"""More than a CPU samples before the deadline."""
TRIES = 60
"""On a machine that stalls, a deadline may pass before the first token; such a request is made again."""


async def main(model: Path, folder: Path) -> None:
    """Start an engine, have a turn cut, ask for a short one. Prints both as JSON."""
    engine = {"kv_cache_bytes": 256 << 20, "request_timeout_s": 1.0, "min_tokens_per_s": 1e6}
    config = rollout_config(model, engine=engine, max_context=CONTEXT)
    actor = EngineActor(config, "", folder / "engine.log", "shm")
    await actor.start()
    results = []
    for tokens in (CONTEXT - len(PROMPT), 3):
        for _ in range(TRIES):
            result = await actor._generate(PROMPT, SamplingParams(1.0, tokens, (), 1), "s", [])
            if len(result.token_ids):
                break
        results.append([result.token_ids.tolist(), result.logprobs.tolist(), result.finish_reason, result.versions])
    (folder / "results.json").write_text(json.dumps(results))
    await actor.shutdown()


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
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
    """vLLM with requests that get no token, and a core process that answers if ``core`` is set."""

    errored = False

    def __init__(self):
        self.aborted, self.core = asyncio.Event(), asyncio.Event()

    async def generate(self, request, params, name):
        await self.aborted.wait()
        empty = {"token_ids": [], "finish_reason": "abort", "logprobs": None, "weight_versions": None}
        yield SimpleNamespace(outputs=[SimpleNamespace(**empty, routed_experts=None)])

    async def abort(self, name):
        self.aborted.set()

    async def is_paused(self):
        await self.core.wait()
        return False


def silent(tmp_path, monkeypatch, **engine):
    llm = SilentLlm()
    return actor_without_vllm(tmp_path, monkeypatch, rollout_config(tmp_path, engine=engine), llm), llm


async def test_a_turn_without_a_token_at_its_deadline_is_an_empty_truncated_turn(tmp_path, monkeypatch):
    actor, _ = silent(tmp_path, monkeypatch, request_timeout_s=0.01, min_tokens_per_s=1e6)
    turn = await actor._generate(PROMPT, SamplingParams(1.0, 3, ()), "s", [])
    assert (turn.token_ids.tolist(), turn.logprobs.tolist(), turn.finish_reason) == ([], [], "deadline")
    assert (turn.token_ids.dtype, turn.logprobs.dtype, turn.versions) == (np.int32, np.float32, ())
    assert await actor.usable()
    builder = TrajectoryBuilder()
    builder.begin(PROMPT)
    builder.add_action(turn)
    assert builder.turns == 1 and builder.ids == PROMPT


async def test_the_deadline_follows_from_the_tokens(tmp_path, monkeypatch):
    limits = []

    class Deadline(engine_actor._TurnDeadline):
        def __init__(self, llm, name, seconds):
            limits.append(seconds)
            super().__init__(llm, name, 0.0)

    monkeypatch.setattr(engine_actor, "_TurnDeadline", Deadline)
    actor, _ = silent(tmp_path, monkeypatch, request_timeout_s=60, min_tokens_per_s=20)
    for tokens in (1, 8192):
        await actor._generate(PROMPT, SamplingParams(1.0, tokens, ()), "s", [])
    assert limits == [60.05, 469.6]


async def test_a_core_that_does_not_answer_makes_its_engine_unusable(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_actor, "HEALTH_INTERVAL_S", 0.01)
    actor, _ = silent(tmp_path, monkeypatch, health_timeout_s=0.05)
    await actor.serve()
    assert await actor.watch() == "its core process did not answer within 0.05 s (rollout.engine.health_timeout_s)"
    with pytest.raises(EngineLost, match="did not answer"):
        await actor._generate(PROMPT, SamplingParams(1.0, 3, ()), "s", [])


async def test_a_core_that_is_busy_with_an_update_is_not_asked(tmp_path, monkeypatch):
    actor, _ = silent(tmp_path, monkeypatch, health_timeout_s=0.05)
    async with actor._updating():
        await actor._ask_core()
    assert await actor.usable()
    asking = asyncio.create_task(actor._ask_core())  # an update that begins after the question is an excuse, too
    await asyncio.sleep(0)
    async with actor._updating():
        await asking
    assert await actor.usable()
    await actor._ask_core()
    assert not await actor.usable()


async def test_a_core_that_answers_lives(tmp_path, monkeypatch):
    actor, llm = silent(tmp_path, monkeypatch, health_timeout_s=300)
    llm.core.set()
    await actor._ask_core()
    assert await actor.usable()


if __name__ == "__main__":
    os.environ.update(environment(cuda=False))
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
