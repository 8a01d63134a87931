"""A program: one engine actor, without Ray around it, until its standard input ends.

Usage: python serve_vision.py MODEL FOLDER TOKEN     writes the address to FOLDER/endpoint
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from rollout_config import rollout_config

from megatron_fleet.rollout.engine_actor import EngineActor
from megatron_fleet.rollout.engine_arguments import environment


async def main(model: Path, folder: Path, token: str) -> None:
    config = rollout_config(model, engine={"kv_cache_bytes": 64 << 20}, max_context=4000)
    actor = EngineActor(config, token, folder / "engine.log", "shm")
    written = folder / "endpoint.partial"
    written.write_text(await actor.listen("127.0.0.1"))
    written.replace(folder / "endpoint")  # whoever finds the file finds the address in it
    await actor.start()
    await actor.serve()
    await asyncio.to_thread(sys.stdin.read)
    await actor.shutdown()


if __name__ == "__main__":
    os.environ.update(environment(cuda=False))
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
