"""Weights from the trainer to an engine on the same device, by the transport of a colocated run."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from battery import shapes
from battery.engines import Engine
from battery.hardware import GIB
from battery.results import Report, Request
from megatron_fleet.config.schema import Config
from megatron_fleet.trainer.base import PARTS, Deliver
from megatron_fleet.weight_sync.registry import make_transport

if TYPE_CHECKING:
    from megatron_fleet.trainer.verbs import RankVerbs


@dataclass(frozen=True, slots=True)
class Sizes:
    """``scored``: sequences and tokens of each whose log-probs are compared."""

    layers: int
    scored: tuple[int, int]
    syncs: int
    cycles: int


SIZES = {"full": Sizes(8, (8, 1024), 6, 5), "tiny": Sizes(2, (3, 40), 2, 1)}
WORKER = "battery.engines.Fingerprints"


class Trainer:
    """`weight_sync.base.WeightSender` of the one rank in this process.

    Attributes:
        seconds: of the last send.
    """

    def __init__(self, verbs: RankVerbs) -> None:
        self._verbs = verbs
        self.seconds = 0.0

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return await asyncio.to_thread(self._verbs.prepare_weights, transport, options)

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        began = time.perf_counter()
        outbox = Outbox(deliver, asyncio.get_running_loop())
        await asyncio.to_thread(self._verbs.send_weights, version, options, outbox)
        self.seconds = time.perf_counter() - began


class Outbox:
    """`weight_sync.base.Outbox` that delivers in the event loop of another thread, in order."""

    def __init__(self, deliver: Deliver, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver, self._loop, self._turn = deliver, loop, asyncio.Lock()

    def post(self, message: Mapping[str, Any]) -> Receipt:
        async def deliver() -> None:
            async with self._turn:
                await self._deliver(message)

        return Receipt(asyncio.run_coroutine_threadsafe(deliver(), self._loop))


class Receipt:
    """`weight_sync.base.Receipt`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        self._future.result(timeout_s)


def measure(report: Report, request: Request) -> None:
    """Write random weights, from which trainer and engine start, and sync them."""
    sizes, scratch = SIZES[request.size], Path(request.scratch)
    report.doing("writing random weights")
    hf = shapes.model_config(request.size, sizes.layers)
    model = shapes.write_model(scratch / "model", hf)
    settings = {
        "colocated": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": (4 << 30) if request.size == "full" else (64 << 20),
        "max_num_seqs": 64,
        "start_timeout_s": 600.0,
    }
    config = shapes.run_config(model, 2 * sizes.scored[0] * sizes.scored[1], engine=settings)
    report.doing("building the trainer")
    verbs = shapes.make_verbs(config, "hf")
    verbs.offload(PARTS)
    transport = "cuda_ipc" if shapes.cuda() else "shm"
    report.figures(transport=transport)
    asyncio.run(_with_engine(report, request, verbs, config, hf["vocab_size"]))
    verbs.close()


async def _with_engine(report: Report, request: Request, verbs: RankVerbs, config: Config, vocabulary: int) -> None:
    sizes, transport = SIZES[request.size], report.result.figures["transport"]
    report.doing("starting the engine")
    log = Path(request.keep) / "sync-engine.log"
    before = shapes.memory_used()
    engine = Engine(config, transport, log, {"worker_extension_cls": WORKER})
    sync = Sync(verbs, engine, transport)
    try:
        await engine.call("start")
        nbytes = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
        report.figures(engine_start_s=round(engine.seconds["start"], 1), bytes=nbytes)
        loaded = await engine.call("fingerprints")
        assert loaded, "a model has parameters"
        await engine.call("sleep")  # its weights are lost
        verbs.onload(("parameters",))
        await engine.call("wake", "weights")
        await syncs(report, sync, sizes.syncs)
        report.figures(bit_equal=int(await engine.call("fingerprints") == loaded))
        await engine.call("wake", "kv_cache")
        await agreement(report, verbs, engine, sizes.scored, vocabulary)
        await cycles(report, verbs, sync, sizes.cycles, before)
    finally:
        sync.close()
        engine.close()


class Sync:
    """Syncs of one trainer and one engine, with rising versions.

    Attributes:
        version: of the last one.
    """

    def __init__(self, verbs: RankVerbs, engine: Engine, transport: str) -> None:
        self.trainer, self.engine, self.version = Trainer(verbs), engine, 0
        self._transport = make_transport(transport)

    async def next(self) -> float:
        """Seconds of one more sync."""
        self.version += 1
        began = time.perf_counter()
        await self._transport.sync(self.trainer, self.engine, self.version)
        return time.perf_counter() - began

    def close(self) -> None:
        """Free the transport's resources."""
        self._transport.close()


async def syncs(report: Report, sync: Sync, count: int) -> None:
    """Rows of the table ``syncs``; the first, which makes the buffers, does not count in the medians."""
    nbytes = report.result.figures["bytes"]
    whole, sent = [], []
    for _ in range(count):
        report.doing(f"sync {sync.version + 1}")
        whole.append(await sync.next())
        sent.append(sync.trainer.seconds)
        report.row(
            "syncs",
            version=sync.version,
            sync_ms=shapes.finite(1e3 * whole[-1]),
            gb_s=shapes.finite(nbytes / whole[-1] / 1e9),
            send_ms=shapes.finite(1e3 * sent[-1]),
        )
    report.figures(
        sync_gb_s=shapes.finite(nbytes / statistics.median(whole[1:]) / 1e9),
        send_gb_s=shapes.finite(nbytes / statistics.median(sent[1:]) / 1e9),
    )


async def agreement(report: Report, verbs: RankVerbs, engine: Engine, scored: tuple[int, int], vocabulary: int) -> None:
    """Log-probs of the same random tokens by both."""
    report.doing("log-probs of engine and trainer")
    count, length = scored
    data = shapes.random_data(count * length, length, vocabulary)
    theirs = await engine.call("score", [datum.token_ids for datum in data])
    distance = np.abs(shapes.logprobs(verbs, data) - np.concatenate([values[1:] for values in theirs]))
    report.figures(agreement=shapes.finite(distance.mean()), agreement_max=shapes.finite(distance.max()))


async def cycles(report: Report, verbs: RankVerbs, sync: Sync, count: int, before: int) -> None:
    """Cycles of a colocated run without its training: the trainer offloads, the engine sleeps, and back."""
    seconds = []
    for cycle in range(1, count + 1):
        report.doing(f"cycle {cycle}")
        began = time.perf_counter()
        await sync.engine.call("sleep")
        asleep = shapes.memory_used()
        await sync.engine.call("wake", "weights")
        await sync.next()
        await asyncio.to_thread(verbs.offload, PARTS)
        await sync.engine.call("wake", "kv_cache")
        seconds.append(time.perf_counter() - began)
        awake = shapes.memory_used()
        await asyncio.to_thread(verbs.onload, ("parameters",))
        report.row(
            "cycles",
            cycle=cycle,
            seconds=round(seconds[-1], 3),
            asleep_gib=round((asleep - before) / GIB, 3),
            awake_gib=round((awake - before) / GIB, 3),
        )
    report.figures(cycle_s=round(statistics.median(seconds), 3))
