"""One candidate of the engine's in a process of its own: ``python -m megatron_fleet.tuning.engine_trial FOLDER``.

Reads ``FOLDER/request.json``; writes ``FOLDER/result.json`` and ``scores.npy``. vLLM's log is ``FOLDER/engine.log``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.agents.token_engine import SamplingParams
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.registry import use_family
from megatron_fleet.rollout.engine_actor import EngineActor
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.engine_statistics import EngineStatistics, engine_metrics
from megatron_fleet.tuning.search import describe_failure
from megatron_fleet.tuning.tune_engine import Load

TRANSPORT = "shm"
"""Transport with which the engine is made; nothing is sent."""
SCORED = 4, 64
"""Number and tokens of the sequences whose log-probs are compared."""
FIGURES = {
    "preempted": "engine/preemptions",
    "KV used": "engine/kv_cache_usage_max",
    "running": "engine/running_mean",
}
"""Column → metric, see `engine_metrics`."""


def main(folder: Path) -> int:
    """Run the trial. A failure with a known reason is a result too."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        config = Config.model_validate(request["config"])
        use_family(config.model.family)
        load, log = Load(*request["load"]), folder / "engine.log"
        result, scores = asyncio.run(measure(config, load, request["repeats"], log))
        np.save(folder / "scores.npy", scores)
    except UserError as error:
        result = {"problem": str(error)}
    except Exception as error:
        result = {"problem": _from_log(folder / "engine.log") or describe_failure(error)}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


async def measure(config: Config, load: Load, repeats: int, log: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Seconds of each round, in which all sequences are answered, and figures; log-probs float32 ``[N]``."""
    token = secrets.token_hex(16)
    actor = EngineActor(config, token, log, TRANSPORT)
    address = await actor.listen("127.0.0.1")
    await actor.start()
    await actor.serve()
    engine = connect([address], token, config.rollout.engine.health_timeout_s)
    rng, vocabulary = np.random.default_rng(0), _vocabulary(config)
    seconds, statistics = [], EngineStatistics()
    for number in range(1 + repeats):
        prompts = rng.integers(0, vocabulary, (load.sequences, load.prompt)).astype(np.int32)
        params = SamplingParams(config.rollout.sampling.temperature, load.answer, (), seed=number)
        await actor.read_statistics()
        start = time.perf_counter()
        turns = [engine.generate(ids.tolist(), params, f"{number}-{i}") for i, ids in enumerate(prompts)]
        answers = await asyncio.gather(*turns)
        if number:  # the first round warms up
            seconds.append(time.perf_counter() - start)
            statistics += await actor.read_statistics()
        if short := sum(len(turn.token_ids) < load.answer for turn in answers):
            raise UserError(
                f"{short} of {load.sequences} answers were cut off at their deadline; lower --sequences or --answer, "
                f"or raise rollout.engine.request_timeout_s."
            )
    scored = rng.integers(0, vocabulary, (SCORED[0], min(SCORED[1], config.rollout.max_context))).astype(np.int32)
    scores = np.concatenate([values[1:] for values in await actor.score(list(scored))])
    taken = _device_bytes()
    await actor.shutdown()
    metrics = engine_metrics([statistics])
    figures = {column: metrics[name] for column, name in FIGURES.items() if name in metrics}
    return {"seconds": seconds, "peak_bytes": taken, "device": _device(), "figures": figures}, scores


def _vocabulary(config: Config) -> int:
    from megatron_fleet.models.hf_config import read_model
    from megatron_fleet.weights.hf_folder import read_config

    return read_model(read_config(config.model.folder)).vocab


def _device_bytes() -> int:
    """Memory in use on the device by all processes; 0 on CPUs."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _from_log(log: Path) -> str | None:
    """Return the reason why vLLM's process did not start, if its log says that memory was short."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    short = [line for line in lines if "out of memory" in line.lower() or "No available memory" in line]
    return f"out of memory: {short[-1].strip()}" if short else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
