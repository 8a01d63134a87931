"""Cost of the agent loop beyond raw vLLM.

    python benchmarks/rollout.py            # in the engine environment; about a quarter of an hour

Real parts: vLLM behind its socket, an EpisodeWorker in the episode environment, the embedded fleet over HTTP. Only what
the policy *says* is scripted: the engine samples as many tokens as the scripted solver's next turn has, at full cost,
and the solver's tokens are returned in their place, so that even random weights play whole episodes.

* ``ratio``: tokens/s of the loop over tokens/s of the same requests replayed inside the engine's process, without
  socket, worker or environment, at the same concurrency; on a random model of Qwen3-0.6B's shape. Runs alternate.
* ``cpu_ms_per_turn``: CPU of everything but the engine proper, on the tiny model's shape, in parts. ``front_end`` is
  the engine actor's process (socket and AsyncLLM), of which ``front_end_raw`` is AsyncLLM's own.
* ``ray_ms_per_episode``: Ray and the controller, measured on a whole RolloutService.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measured import stamp
from roles import Role, children, cpu_seconds

from megatron_fleet.cluster.janitor import marked
from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.embedded_fleet.tasks import SHIPPED_TASKS
from megatron_fleet.envs.embedded_server import EmbeddedFleet
from megatron_fleet.models.chat.tokenizer import train_tokenizer
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS
from megatron_fleet.rollout.engine_arguments import environment
from megatron_fleet.rollout.requests import CollectRequest
from megatron_fleet.rollout.service import RolloutService

TINY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}  # fmt: skip
QWEN3_06B = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}  # fmt: skip
ROLES = Path(__file__).with_name("rollout_roles.py")


class Bench:
    """Engine, worker and environment server around one model."""

    def __init__(self, model: Path, work: Path, episode_python: Path, dtype: str, rollout: dict[str, Any]) -> None:
        self._config = configuration(model, work, dtype, rollout)
        self._fleet = EmbeddedFleet()
        url = self._fleet.start(self._config.env, work / "env.log", str(episode_python))
        settings = {"config": self._config.model_dump(), "url": url, "log": str(work / "engine.log")}
        self.engine = Role(ROLES, Path(sys.executable), "engine", settings, environment(cuda=False))
        settings |= self.engine.started
        self.worker = Role(ROLES, episode_python, "worker", settings, {"OMP_NUM_THREADS": "1"})

    def play(self, episodes: int) -> dict[str, Any]:
        """The agent loop; seconds, tokens, turns and the CPU seconds of each part."""
        self.engine.ask("forget")
        before = self._meters()
        result = self.worker.ask("play", episodes=episodes)
        return result | self._since(before)

    def replay(self, concurrency: int) -> dict[str, Any]:
        """The requests of the last ``play`` given to vLLM alone."""
        self.engine.ask("forget")
        before = self._meters()
        result = self.engine.ask("replay", concurrency=concurrency)
        return result | self._since(before)

    def client(self, episodes: int) -> dict[str, Any]:
        """The environment's part of the episodes alone."""
        before = self._meters()
        return self.worker.ask("client", episodes=episodes) | self._since(before)

    def close(self) -> None:
        self.worker.close()
        self.engine.close()
        self._fleet.stop()

    def _meters(self) -> dict[str, float]:
        return {
            "worker": self.worker.cpu_seconds(),
            "front_end": self.engine.cpu_seconds(),
            "engine": self.engine.children_cpu_seconds(),
            "env_server": cpu_seconds(self._fleet.pid),
            "verifiers": sum(cpu_seconds(pid) for pid in children(self._fleet.pid)),
        }

    def _since(self, before: dict[str, float]) -> dict[str, Any]:
        return {"cpu": {name: value - before[name] for name, value in self._meters().items()}}


def configuration(model: Path, work: Path, dtype: str, rollout: dict[str, Any]) -> Config:
    sampling = {"max_tokens_per_turn": 96, "max_turns": 10}
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "out": str(work), "steps": 0, "deterministic": False},
            "model": {"path": str(model), "dtype": dtype},
            "policy": {"micro_batch_tokens": 4096, "optimizer": {"lr": 1e-4}},
            "data": {"tasks": "embedded"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_context": 2048, "sampling": sampling}
            | rollout,
        }
    )


def write_model(folder: Path, shape: dict[str, int], dtype: str) -> Path:
    """A random Qwen3 HF folder with a small tokenizer trained on the embedded fleet's prompts."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096)
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    train_tokenizer((task.prompt for task in load_tasks(SHIPPED_TASKS)), 1024, folder, QWEN3_TOKENS)
    return folder


def measure_ratio(work: Path, episode_python: Path, pairs: int, episodes: int) -> dict[str, Any]:
    model = write_model(work / "qwen3-0.6b", QWEN3_06B, "bfloat16")
    engine = {"kv_cache_bytes": 2 << 30, "request_timeout_s": 3600}
    bench = Bench(model, work, episode_python, "bfloat16", {"engine": engine, "episode_timeout_s": 3600})
    try:
        bench.play(2)  # first requests pay for allocations and imports
        loops, raws = [], []
        for pair in range(1, pairs + 1):
            for name, runs, run in (("loop", loops, bench.play), ("replay", raws, bench.replay)):
                runs.append(run(episodes))
                print(f"0.6B shape, pair {pair}/{pairs}: {name} took {runs[-1]['seconds']:.0f} s", file=sys.stderr)
    finally:
        bench.close()
    rates = [loop["tokens"] / loop["seconds"] for loop in loops]
    raw_rates = [raw["tokens"] / raw["seconds"] for raw in raws]
    return {
        "ratio": round(statistics.median(rates) / statistics.median(raw_rates), 4),
        "ratio_pairs": [round(a / b, 4) for a, b in zip(rates, raw_rates, strict=True)],
        "loop_tokens_per_s": [round(rate, 2) for rate in rates],
        "raw_tokens_per_s": [round(rate, 2) for rate in raw_rates],
        "ratio_run": {"episodes": episodes, "turns": loops[0]["turns"], "tokens": loops[0]["tokens"]},
    }


def measure_cpu(work: Path, episode_python: Path, episodes: int) -> dict[str, Any]:
    model = write_model(work / "tiny", TINY, "float32")
    bench = Bench(model, work, episode_python, "float32", {"engine": {"kv_cache_bytes": 1 << 30}})
    try:
        bench.play(32)
        loop = bench.play(episodes)
        raw = bench.replay(episodes)
        client = bench.client(episodes)
    finally:
        bench.close()
    per_turn = {name: 1e3 * seconds / loop["turns"] for name, seconds in loop["cpu"].items()}
    env_client = 1e3 * client["cpu_seconds"] / loop["turns"]
    front_end_raw = 1e3 * raw["cpu"]["front_end"] / loop["turns"]
    beyond = sum(per_turn.values()) - per_turn["engine"] - front_end_raw
    parts = {
        "worker_without_env_client": per_turn["worker"] - env_client,
        "env_client": env_client,
        "env_server": per_turn["env_server"],
        "verifiers": per_turn["verifiers"],
        "front_end": per_turn["front_end"],
        "front_end_raw": front_end_raw,
        "engine": per_turn["engine"],
        "engine_raw": 1e3 * raw["cpu"]["engine"] / loop["turns"],
    }
    return {
        "cpu_ms_per_turn": round(beyond, 3),
        "cpu_parts_ms_per_turn": {name: round(value, 3) for name, value in parts.items()},
        "cpu_run": {"episodes": episodes} | {k: loop[k] for k in ("turns", "tokens", "seconds", "waits")},
        "tiny_ratio": round(loop["tokens"] / loop["seconds"] / (raw["tokens"] / raw["seconds"]), 4),
    }


async def measure_ray(work: Path, episode_python: Path, episodes: int) -> dict[str, Any]:
    """Ray's processes and this one, over groups of short episodes that are requested as training does."""
    config = configuration(work / "tiny", work, "float32", {"engine": {"kv_cache_bytes": 1 << 30}})
    tasks = load_tasks(SHIPPED_TASKS)[: episodes // 8]
    requests = [CollectRequest(0, [task], 8, 1.0, "train", None, first=i) for i, task in enumerate(tasks)]
    async with RolloutService(config, work, episode_python) as service:
        await asyncio.gather(*map(service.collect, requests))
        marks = marked(service.run_id)
        engines = [pid for engine in service._pool.engines for pid in await engine.processes()]
        players = {*engines, *(pid for pid in marks if "WorkerActor" in _command(pid))}
        others = [os.getpid(), *(pid for pid in marks if pid not in players and "embedded" not in _command(pid))]
        before = sum(cpu_seconds(pid) for pid in others)
        results = await asyncio.gather(*map(service.collect, requests))
        spent = sum(cpu_seconds(pid) for pid in others) - before
    started = sum(result.accounting.started for result in results)
    return {
        "ray_ms_per_episode": round(1e3 * spent / started, 3),
        "ray_run": {"episodes": started, "seconds": round(max(result.seconds for result in results), 2)},
    }


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="loop and replay runs of the 0.6B shape; 0 leaves it out")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of the 0.6B shape, all at once")
    parser.add_argument("--tiny-episodes", type=int, default=128, help="episodes of the tiny shape, all at once")
    args = parser.parse_args()
    started, python = time.time(), episode_python()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        work = Path(folder)
        result = measure_cpu(work, python, args.tiny_episodes)
        result |= asyncio.run(measure_ray(work, python, args.tiny_episodes))
        if args.pairs:
            result |= measure_ratio(work, python, args.pairs, args.episodes)
    result |= {"seconds": round(time.time() - started), **stamp(__file__)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
