"""A whole weight update, Megatron TP2 → vLLM, against vLLM's own time to load the tensors. Prints one line of JSON.

Two Megatron ranks hold a random Qwen3 of about 0.6 billion parameters in BF16, one vLLM engine on CPU has the
environment and the controls of a run's. ``ratio`` is vLLM's own time to load the tensors when they lie in its memory
already (no waiting, no checksums, one call) ÷ the time of ``publish``: what gathering, hand-over, checksums and control
cost beside it. Both alternate, so that a busy machine disturbs them alike. Rates are those of the whole update;
``disk_reload_gbps`` is vLLM loading the same tensors again from its HF folder.

    python benchmarks/weight_sync.py [--layers 28] [--hidden 1024] [--vocab 151936] [--repeats 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from safetensors.torch import save_file

from megatron_fleet.config.schema import Config, Parallel
from megatron_fleet.weights.mapping import WeightTable

RANKS = 2
WARM_UP = 2
"""First updates fault their pages in."""


def make_model(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Qwen3-0.6B's config with other sizes, and random weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 128,
        "head_dim": 128,
        "num_hidden_layers": args.layers,
        "rms_norm_eps": 1e-6,
        "vocab_size": args.vocab,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        for name, shape in WeightTable(config).tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def run_config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "out": str(folder), "steps": 1},
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "policy": {"row_tokens": 256, "optimizer": {"lr": 1e-4}},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": 1024,
                "sampling": {"max_tokens_per_turn": 64, "max_turns": 8},
                "engine": {"kv_cache_bytes": 256 << 20},
            },
            "data": {"tasks": "embedded"},
        }
    )


class LoadMapped:
    """A method more for vLLM's worker: load what the transfer engine has mapped, as vLLM by itself would."""

    def load_mapped(self) -> float:
        """Seconds."""
        from vllm.config import set_current_vllm_config

        worker: Any = self
        engine = worker.weight_transfer_engine
        began = time.perf_counter()
        with set_current_vllm_config(worker.vllm_config):
            engine.start_weight_update()
            buckets = range(len(engine._layout.buckets))
            engine.model.load_weights(pair for bucket in buckets for pair in engine._tensors(bucket))
            engine._loaded = int(engine._board._begun.max())
            engine.finish_weight_update()
        return time.perf_counter() - began


def engine_process(folder: Path, control: Connection) -> None:
    """One engine as `EngineActor` runs it, driven over a pipe: (verb, arguments) in, seconds and result out."""
    from megatron_fleet.rollout.engine_actor import EngineActor

    actor = EngineActor(run_config(folder), "", folder / "engine.log")

    async def serve() -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_args = actor._engine_args()
        engine_args.worker_extension_cls = f"{Path(__file__).stem}.{LoadMapped.__name__}"
        actor._llm = AsyncLLM.from_engine_args(engine_args)
        loop = asyncio.get_running_loop()
        while True:
            verb, arguments = await loop.run_in_executor(None, control.recv)
            if verb == "stop":
                await actor.shutdown()
                return
            began = time.perf_counter()
            if verb in ("load_mapped", "reload_weights"):
                result = await actor._llm.collective_rpc(verb)
            else:
                result = await getattr(actor, verb)(*arguments)
            control.send((time.perf_counter() - began, result))

    asyncio.run(serve())


class PipeClient:
    """`WeightClient` of `engine_process`.

    Attributes:
        seconds: of the engine's verbs since the last look.
    """

    def __init__(self, control: Connection) -> None:
        self._control = control
        self.seconds: dict[str, float] = {}

    def call(self, verb: str, *arguments: Any) -> Any:
        self._control.send((verb, arguments))
        self.seconds[verb], result = self._control.recv()
        return result

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer", init_info)

    def start_weight_update(self) -> None:
        self.call("start_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_update", int(weight_version or 0))


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def rank_process(rank: int, port: int, folder: Path, repeats: int, control: Connection, results: Connection) -> None:
    """One Megatron rank; rank 0 has the engine and measures."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from megatron_fleet.platform import device
    from megatron_fleet.platform.communicator import TorchCommunicator
    from megatron_fleet.trainer.megatron import parallel
    from megatron_fleet.trainer.megatron.build import build_chunks
    from megatron_fleet.weights import publish_shm
    from megatron_fleet.weights.load import load_hf
    from megatron_fleet.weights.source import MegatronWeightSource, megatron_place

    device.prepare(1, seed=0)
    layout = Parallel(tensor=RANKS)
    parallel.initialise(layout, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (chunk,) = build_chunks(config, layout, torch.bfloat16, row_tokens=256)
    load_hf([chunk], folder)
    world = TorchCommunicator()
    source = MegatronWeightSource([chunk], config, dtype=torch.bfloat16, place=megatron_place())
    spent = {"write": 0.0, "checksum": 0.0}
    source.write_local = counted(source.write_local, spent, "write")  # type: ignore[method-assign]
    publish_shm.checksum = counted(publish_shm.checksum, spent, "checksum")
    client = PipeClient(control) if rank == 0 else None
    with closing(publish_shm.ShmPublisher(source, client, world)) as publisher:
        rows = []
        for version in range(1, repeats + WARM_UP + 1):
            spent |= dict.fromkeys(spent, 0.0)
            row = {"publish": timed(lambda version=version: publisher.publish(version))}
            if client is not None:
                row |= client.seconds | spent
                (row["own"],) = client.call("load_mapped")
                row["disk_reload"] = timed(lambda: client.call("reload_weights"))
                rows.append(row)
            world.all_gather(None)
        if rank == 0:
            results.send((sum(m.nbytes for m in source.metadata()), rows[WARM_UP:]))
            control.send(("stop", ()))
    parallel.shutdown()


def counted(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent[name] += time.perf_counter() - began

    return call


def measure(folder: Path, repeats: int) -> tuple[int, list[dict[str, float]]]:
    """Bytes of one update, and per repeat the seconds of its parts."""
    from megatron_fleet.rollout.engine_actor import environment

    spawn = multiprocessing.get_context("spawn")
    engine_end, rank_end = spawn.Pipe()
    results, results_end = spawn.Pipe(duplex=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        spawn.Process(target=rank_process, args=(rank, port, folder, repeats, rank_end, results_end))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    before = dict(os.environ)
    os.environ |= environment(cuda=False)
    engine = spawn.Process(target=engine_process, args=(folder, engine_end))
    engine.start()
    os.environ.clear()
    os.environ |= before
    results_end.close()
    engine_end.close()
    rank_end.close()
    processes = [engine, *ranks]
    try:
        while not results.poll(1):
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"a process failed: {(folder / 'engine.log').read_text()[-2000:]}")
        return results.recv()
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def memcpy_gbps(repeats: int) -> float:
    source = np.ones(256 << 20, np.uint8)
    target = np.empty_like(source)
    return source.nbytes / min(timed(lambda: np.copyto(target, source)) for _ in range(repeats + 1)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        nbytes, rows = measure(Path(folder), args.repeats)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    publish = sorted(row["publish"] for row in rows)
    own = sorted(row["own"] for row in rows)
    report = {
        "benchmark": "weight_sync",
        "ratio": round(medians["own"] / medians["publish"], 3),
        "ratio_fastest": round(own[0] / publish[0], 3),
        "gbps": round(nbytes / medians["publish"] / 1e9, 3),
        "memcpy_gbps": round(memcpy_gbps(args.repeats), 2),
        "disk_reload_gbps": round(nbytes / medians["disk_reload"] / 1e9, 3),
        "publish_s": [round(value, 3) for value in publish],
        "own_s": [round(value, 3) for value in own],
        "breakdown_s": {
            "engine_start": round(medians["start_update"], 4),
            "engine_load": round(medians["update_weights"], 4),
            "engine_finish": round(medians["finish_update"], 4),
            "rank0_write": round(medians["write"], 4),
            "rank0_checksum": round(medians["checksum"], 4),
        },
        "bytes": nbytes,
        "ranks": RANKS,
        "layers": args.layers,
        "hidden": args.hidden,
        "repeats": args.repeats,
        "machine": describe(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
