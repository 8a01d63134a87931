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

from battery import shapes, variants
from battery.engines import Engine
from battery.hardware import GIB
from battery.results import Report, Request, Sink, Unavailable
from megatron_fleet.config.schema import Config
from megatron_fleet.weight_sync.base import Deliver
from megatron_fleet.weight_sync.engine_model import fp8_declaration, open_engine_model
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
ENGINES = {"bf16": "none", "fp8": "fp8"}
"""Name → ``rollout.engine.quantization``; the trainer is in BF16."""
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
    """An engine of each kind, each with its trainer in a process of its own."""
    report.figures(transport="cuda_ipc" if shapes.cuda() else "shm")
    common = {"size": request.size, "scratch": request.scratch, "keep": request.keep}
    for name, quantization in ENGINES.items():
        variants.run(report, __name__, name, {**common, "name": name, "quantization": quantization})


def variant(sink: Sink, settings: Mapping[str, Any]) -> None:
    """Write random weights, from which trainer and engine start, and sync them."""
    if settings["quantization"] == "fp8" and not shapes.cuda():
        raise Unavailable("measured on GPUs only")
    size, folder = settings["size"], Path(settings["scratch"]) / "model"
    sizes = SIZES[size]
    hf = shapes.model_config(size, sizes.layers)
    if not folder.exists():
        sink.doing("writing random weights")
        shapes.write_model(folder, hf)
    engine = {
        "colocated": True,
        "quantization": settings["quantization"],
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": (4 << 30) if size == "full" else (64 << 20),
        "max_num_seqs": 64,
        "start_timeout_s": 600.0,
    }
    config = shapes.run_config(folder, 2 * sizes.scored[0] * sizes.scored[1], engine=engine)
    sink.doing(f"{settings['name']}: building the trainer")
    verbs = shapes.make_verbs(config, "hf")
    verbs.offload()
    log = Path(settings["keep"]) / f"sync-{settings['name']}.log"
    asyncio.run(Measurement(sink, settings["name"], verbs, config, sizes).run(log, hf["vocab_size"]))
    verbs.close()


class Measurement:
    """Measurements with one engine. Figures of engines other than BF16 carry its name."""

    def __init__(self, sink: Sink, name: str, verbs: RankVerbs, config: Config, sizes: Sizes) -> None:
        self._sink, self._name, self._verbs, self._config, self._sizes = sink, name, verbs, config, sizes
        held = open_engine_model(
            config.model.path, fp8_declaration(config.model, config.precision, config.rollout.engine)
        )
        self._nbytes = sum(part.nbytes for encoding in held.encodings.values() for part in encoding.parts)

    def _figures(self, **values: Any) -> None:
        prefix = "" if self._name == "bf16" else f"{self._name}_"
        self._sink.figures(**{f"{prefix}{name}": value for name, value in values.items()})

    def _doing(self, what: str) -> None:
        self._sink.doing(f"{self._name}: {what}")

    async def run(self, log: Path, vocabulary: int) -> None:
        """Start the engine, and take it through what a run does."""
        self._doing("starting the engine")
        before, transport = shapes.memory_used(), "cuda_ipc" if shapes.cuda() else "shm"
        engine = Engine(self._config, transport, log, {"worker_extension_cls": WORKER})
        sync = Sync(self._verbs, engine, transport)
        try:
            await engine.call("start")
            self._figures(engine_start_s=round(engine.seconds["start"], 1), bytes=self._nbytes)
            loaded = await engine.call("fingerprints")
            assert loaded, "a model has parameters"
            await engine.call("sleep")  # its weights are lost
            self._verbs.onload(("parameters",))
            await engine.call("wake", "weights")
            await self._syncs(sync)
            self._figures(bit_equal=int(await engine.call("fingerprints") == loaded))
            await engine.call("wake", "kv_cache")
            await self._agreement(engine, vocabulary)
            await self._cycles(sync, before)
        finally:
            sync.close()
            engine.close()

    async def _syncs(self, sync: Sync) -> None:
        """Rows of the table ``syncs``; the first, which makes the buffers, does not count in the medians."""
        whole, sent = [], []
        for _ in range(self._sizes.syncs):
            self._doing(f"sync {sync.version + 1}")
            whole.append(await sync.next())
            sent.append(sync.trainer.seconds)
            self._sink.row(
                "syncs",
                engine=self._name,
                version=sync.version,
                sync_ms=shapes.finite(1e3 * whole[-1]),
                gb_s=shapes.finite(self._nbytes / whole[-1] / 1e9),
                send_ms=shapes.finite(1e3 * sent[-1]),
            )
        self._figures(
            sync_gb_s=shapes.finite(self._nbytes / statistics.median(whole[1:]) / 1e9),
            send_gb_s=shapes.finite(self._nbytes / statistics.median(sent[1:]) / 1e9),
        )

    async def _agreement(self, engine: Engine, vocabulary: int) -> None:
        """Log-probs of the same random tokens by both."""
        self._doing("log-probs of engine and trainer")
        count, length = self._sizes.scored
        data = shapes.random_data(count * length, length, vocabulary)
        theirs = await engine.call("score", [datum.token_ids for datum in data])
        distance = np.abs(shapes.logprobs(self._verbs, data) - np.concatenate([values[1:] for values in theirs]))
        self._figures(agreement=shapes.finite(distance.mean()), agreement_max=shapes.finite(distance.max()))

    async def _cycles(self, sync: Sync, before: int) -> None:
        """Cycles of a colocated run without its training: the trainer offloads, the engine sleeps, and back."""
        seconds = []
        for cycle in range(1, self._sizes.cycles + 1):
            self._doing(f"cycle {cycle}")
            began = time.perf_counter()
            await sync.engine.call("sleep")
            asleep = shapes.memory_used()
            await sync.engine.call("wake", "weights")
            await sync.next()
            await asyncio.to_thread(self._verbs.offload)
            await sync.engine.call("wake", "kv_cache")
            seconds.append(time.perf_counter() - began)
            awake = shapes.memory_used()
            await asyncio.to_thread(self._verbs.onload, ("parameters",))
            self._sink.row(
                "cycles",
                engine=self._name,
                cycle=cycle,
                seconds=round(seconds[-1], 3),
                asleep_gib=round((asleep - before) / GIB, 3),
                awake_gib=round((awake - before) / GIB, 3),
            )
        self._figures(cycle_s=round(statistics.median(seconds), 3))


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
