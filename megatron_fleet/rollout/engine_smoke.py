"""Start one engine and sample one token: ``python -m megatron_fleet.rollout.engine_smoke``, for `mfleet doctor`.

Reads a resolved configuration from standard input; the last line of the output is an object with ``token`` and
``seconds``, or with the ``problem``.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_fleet.agents.token_engine import SamplingParams
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.registry import use_family
from megatron_fleet.rollout.engine_arguments import environment
from megatron_fleet.rollout.engine_toolkit import toolkit_environment

PROMPT = (1, 2, 3, 4)
"""Token ids that every vocabulary has."""


async def sample(config: Config, log: Path, devices: bool) -> int:
    """Return the token. Raises what the engine raises."""
    from megatron_fleet.rollout.engine_actor import EngineActor
    from megatron_fleet.rollout.engine_client import connect

    token = secrets.token_hex(16)
    actor = EngineActor(config, token, log, "cuda_ipc" if devices else "shm")
    address = await actor.listen("127.0.0.1")
    await actor.start()
    await actor.serve()
    engine = connect([address], token, config.rollout.engine.health_timeout_s)
    generation = await engine.generate(list(PROMPT), SamplingParams(1.0, 1, (), seed=0), "doctor")
    await actor.shutdown()
    return int(generation.token_ids[0])


def main() -> int:
    """Answer the request on standard input."""
    config = Config.model_validate_json(sys.stdin.read())
    use_family(config.model.family)
    devices = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ.update(environment(devices) | (toolkit_environment(os.environ) if devices else {}))
    answers, begun = os.dup(1), time.monotonic()  # the engine's output goes to its log
    with tempfile.TemporaryDirectory(prefix="mfleet-doctor-") as folder:
        log = Path(folder, "engine.log")
        try:
            answer: dict[str, Any] = {"token": asyncio.run(sample(config, log, devices))}
        except UserError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            reason = _reason(log) or f"{type(error).__name__}: {error}"
            answer = {"problem": f"the engine failed ({reason}); follow vLLM's advice."}
    os.write(answers, f"{json.dumps(answer | {'seconds': time.monotonic() - begun})}\n".encode())
    return 0


def _reason(log: Path) -> str | None:
    """Return the first error in the engine's log: later ones follow from it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = [line.strip() for line in lines if "Error: " in line]
    return found[0].split("] ", 1)[-1] if found else None


if __name__ == "__main__":
    sys.exit(main())
