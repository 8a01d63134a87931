"""Drafts that end where the batch is large, in vLLM itself. Also a program (see ``main``)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from tiny_model import write_tiny_model

from megatron_fleet.agents.token_engine import SamplingParams
from megatron_fleet.rollout.engine_actor import EngineActor
from megatron_fleet.rollout.engine_arguments import environment

PROMPTS = [[5 + i, 6, 7, 6, 7] for i in range(6)]
TOKENS = 160
DRAFTER = {"method": "ngram", "tokens": 3, "ngram": 2, "max_sequences": 2}


async def main(model: Path, folder: Path) -> None:
    """Play a prompt alone, and then beside others: greedy tokens, and what was drafted."""
    config = rollout_config(model, {"speculative": DRAFTER, "kv_cache_bytes": 64 << 20}, max_context=255)
    actor = EngineActor(config, "", folder / "engine.log", "shm")
    await actor.start()
    found = []
    for prompts in (PROMPTS[:1], PROMPTS):
        await actor.read_statistics()
        params = SamplingParams(0.0, TOKENS, (), None)
        results = await asyncio.gather(*(actor._generate(p, params, str(p), []) for p in prompts))
        counts = await actor.read_statistics()
        found.append([results[0].token_ids.tolist(), counts.drafts, counts.accepted_tokens, counts.steps])
    (folder / "results.json").write_text(json.dumps(found))
    await actor.shutdown()


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_tokens_are_the_same_and_a_large_batch_has_no_drafts(tmp_path):
    model = write_tiny_model(tmp_path / "model", 1, context=256)
    subprocess.run([sys.executable, __file__, str(model), str(tmp_path)], check=True, timeout=600)
    (alone, drafts, accepted, steps), (beside, few, *_, many) = json.loads((tmp_path / "results.json").read_text())
    assert alone == beside and len(alone) == TOKENS
    assert drafts > 0 and accepted > 0 and steps < TOKENS * 0.5
    assert few < drafts / 4 and many >= TOKENS - 10


if __name__ == "__main__":
    os.environ |= environment(cuda=False)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
