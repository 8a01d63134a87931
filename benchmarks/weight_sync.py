"""A whole weight sync through shared memory, Megatron TP2 → vLLM, against vLLM's own time to load the tensors. Prints
one line of JSON.

Two Megatron ranks hold a random Qwen3 of about 0.6 billion parameters in BF16, one vLLM engine on CPU has the
environment and the controls of a run's, this process is the controller. ``ratio`` is vLLM's own time to load the
tensors when they lie in its memory already (no waiting, no checksums, one call) ÷ the time of ``sync``: what gathering,
hand-over, checksums and control cost beside it. Both alternate, so that a busy machine disturbs them alike. Rates are
those of the whole sync; ``disk_reload_gbps`` is vLLM loading the same tensors again from its HF folder.

    python benchmarks/weight_sync.py [--layers 28] [--hidden 1024] [--vocab 151936] [--repeats 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import stamp
from safetensors.torch import save_file
from torch.distributed import TCPStore

from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.weight_sync.base import Deliver
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
            "policy": {"micro_batch_tokens": 256, "optimizer": {"lr": 1e-4}},
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
            layout, memory = engine._layout, engine._memory
            engine.load_buckets(layout.tensors(bucket, memory) for bucket in range(len(layout.buckets)))
            engine._round = int(engine._board._begun.max())
            engine.finish_weight_update()
        return time.perf_counter() - began


def engine_process(folder: Path, control: Connection) -> None:
    """One engine as `EngineActor` runs it, driven over a pipe: (verb, arguments) in, seconds and result out."""
    from megatron_fleet.rollout.engine_actor import EngineActor

    class Engine(EngineActor):
        def _arguments(self, *, cpu: bool, can_sleep: bool) -> dict[str, Any]:
            more = {"worker_extension_cls": f"{Path(__file__).stem}.{LoadMapped.__name__}"}
            return super()._arguments(cpu=cpu, can_sleep=can_sleep) | more

    actor = Engine(run_config(folder), "", folder / "engine.log", "shm")

    async def serve() -> None:
        await actor.start()
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


class EngineOverPipe:
    """`WeightReceiver` of `engine_process`.

    Attributes:
        seconds: of the engine's verbs when they were called last.
    """

    def __init__(self, control: Connection) -> None:
        self._control = control
        self.seconds: dict[str, float] = {}

    async def call(self, verb: str, *arguments: Any) -> Any:
        self._control.send((verb, arguments))
        self.seconds[verb], result = await asyncio.to_thread(self._control.recv)
        return result

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        await self.call("open_transport", dict(init_info))

    async def begin_update(self) -> None:
        await self.call("begin_update")

    async def load(self, message: Mapping[str, Any]) -> None:
        await self.call("load", dict(message))

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        await self.call("finish_update", version)


class RanksOverPipes:
    """`WeightSender` of `rank_process`.

    Attributes:
        spent: seconds of rank 0 in parts of the last update.
    """

    def __init__(self, controls: list[Connection]) -> None:
        self._controls = controls
        self.spent: dict[str, float] = {}

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return (await self._all("prepare", dict(options)))[0]

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        self.spent = (await self._all("send", version, dict(options)))[0]

    async def _all(self, *command: Any) -> list[Any]:
        for control in self._controls:
            control.send(command)
        return await asyncio.gather(*(asyncio.to_thread(control.recv) for control in self._controls))


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def rank_process(rank: int, port: int, folder: Path, control: Connection) -> None:
    """One Megatron rank, driven over a pipe: ("prepare", options) or ("send", version, options) until it is closed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already, at the process that starts ranks
    from megatron_fleet.platform import device
    from megatron_fleet.platform.communicator import TorchCommunicator
    from megatron_fleet.trainer.megatron import parallel
    from megatron_fleet.trainer.megatron.build import build_chunks
    from megatron_fleet.weight_sync.registry import make_sender
    from megatron_fleet.weight_sync.shm import sender as shm_sender
    from megatron_fleet.weights.hf_model import open_model
    from megatron_fleet.weights.shards import load_hf
    from megatron_fleet.weights.source import MegatronWeightSource, megatron_place

    device.prepare(1, seed=0)
    layout = ParallelConfig(tensor=RANKS)
    parallel.initialise(layout, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (chunk,) = build_chunks(config, layout, torch.bfloat16, micro_batch_tokens=256)
    load_hf([chunk], folder)
    source = MegatronWeightSource([chunk], config, dtype=torch.bfloat16, place=megatron_place())
    spent = {"write": 0.0, "checksum": 0.0}
    shm_sender.checksum = counted(shm_sender.checksum, spent, "checksum")
    sender: Any = make_sender("shm", source, TorchCommunicator(), torch.device("cpu"), open_model(folder))
    sender._weights.write_local = counted(sender._weights.write_local, spent, "write")
    no_outbox: Any = None
    with suppress(EOFError):
        while True:
            verb, *arguments = control.recv()
            if verb == "prepare":
                control.send(dict(sender.prepare(*arguments)))
                continue
            spent |= dict.fromkeys(spent, 0.0)
            sender.send(*arguments, no_outbox)
            control.send(dict(spent))
    sender.close()
    parallel.shutdown()


def counted(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent[name] += time.perf_counter() - began

    return call


async def repeat(ranks: RanksOverPipes, engine: EngineOverPipe, repeats: int) -> list[dict[str, float]]:
    """Per repeat the seconds of its parts."""
    from megatron_fleet.weight_sync.registry import make_transport

    transport, measured = make_transport("shm"), []
    for version in range(1, repeats + WARM_UP + 1):
        began = time.perf_counter()
        await transport.sync(ranks, engine, version)
        seconds = {"sync": time.perf_counter() - began} | engine.seconds | ranks.spent
        (seconds["own"],) = await engine.call("load_mapped")
        began = time.perf_counter()
        await engine.call("reload_weights")
        measured.append(seconds | {"disk_reload": time.perf_counter() - began})
    transport.close()
    return measured[WARM_UP:]


def measure(folder: Path, repeats: int) -> list[dict[str, float]]:
    """Start everything, and `repeat`."""
    from megatron_fleet.rollout.engine_arguments import environment

    spawn = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [spawn.Pipe() for _ in range(RANKS + 1)]
    processes = [
        spawn.Process(target=rank_process, args=(rank, store.port, folder, theirs))
        for rank, (_, theirs) in enumerate(ends[:RANKS])
    ]
    for process in processes:
        process.start()
    before = dict(os.environ)
    os.environ |= environment(cuda=False)
    processes.append(spawn.Process(target=engine_process, args=(folder, ends[RANKS][1])))
    processes[RANKS].start()
    os.environ.clear()
    os.environ |= before
    for _, theirs in ends:
        theirs.close()
    controls = [ours for ours, _ in ends]
    try:
        measured = asyncio.run(repeat(RanksOverPipes(controls[:RANKS]), EngineOverPipe(controls[RANKS]), repeats))
        controls[RANKS].send(("stop", ()))
        return measured
    except (EOFError, OSError):
        raise RuntimeError(f"a process failed: {(folder / 'engine.log').read_text()[-2000:]}") from None
    finally:
        for control in controls:
            control.close()
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
        measured = measure(Path(folder), args.repeats)
        nbytes = (Path(folder) / "model.safetensors").stat().st_size
    medians = {name: statistics.median(seconds[name] for seconds in measured) for name in measured[0]}
    sync = sorted(seconds["sync"] for seconds in measured)
    own = sorted(seconds["own"] for seconds in measured)
    report = {
        "benchmark": "weight_sync",
        "ratio": round(medians["own"] / medians["sync"], 3),
        "ratio_fastest": round(own[0] / sync[0], 3),
        "gbps": round(nbytes / medians["sync"] / 1e9, 3),
        "memcpy_gbps": round(memcpy_gbps(args.repeats), 2),
        "disk_reload_gbps": round(nbytes / medians["disk_reload"] / 1e9, 3),
        "sync_s": [round(value, 3) for value in sync],
        "own_s": [round(value, 3) for value in own],
        "breakdown_s": {
            "engine_begin": round(medians["begin_update"], 4),
            "engine_load": round(medians["load"], 4),
            "engine_finish": round(medians["finish_update"], 4),
            "rank0_write": round(medians["write"], 4),
            "rank0_checksum": round(medians["checksum"], 4),
        },
        "bytes": nbytes,
        "ranks": RANKS,
        "layers": args.layers,
        "hidden": args.hidden,
        "repeats": args.repeats,
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
