"""A trainer in memory: the whole protocol with a tiny policy that really learns, and failures on demand."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import fingerprint
from megatron_fleet.trainer import state_files
from megatron_fleet.trainer.base import (
    PARTS,
    AdamParams,
    Examination,
    Files,
    LossReport,
    LossSpec,
    MicroBatchLoss,
    OptimReport,
    Part,
    RanksInfo,
    Spending,
    TrainerLost,
)
from megatron_fleet.weight_sync.base import Deliver

PART_BYTES: dict[str, int] = {"parameters": 20, "gradients": 40, "optimizer": 120}
STATE = "state.json"


class FakeTrainer:
    """A policy that draws every token from one softmax, trained by REINFORCE with plain gradient descent.

    The loss of a Datum is −Σ ``weights`` · log π, whatever `LossSpec` names. A verb whose parts are offloaded raises
    RuntimeError, so that a wrong order of moves fails a test.

    Attributes:
        calls: verbs in the order in which they ran, some with an argument: ``forward reference``,
            ``send_weights 3``, ``offload gradients optimizer``, ``memory begin``. Pass a list to share it.
        data: what each `forward_backward` was given.
        weights: the policy's logits, float64 ``[V]``.
        held: bytes of each part on the device.
        before_writing: awaited before a copied state is written; may raise.
        disk: folder of checkpoints on the host of the ranks; ``None``: the controller's.
        restarts: reasons for which it was started again; the third is refused.
    """

    def __init__(
        self,
        vocab_size: int = 512,
        calls: list[str] | None = None,
        fail: Mapping[str, Mapping[int, Exception]] | None = None,
        sequences_per_micro_batch: int = 2,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Args: ``fail``: verb → number of the call, from 1 → what it raises instead. ``info``: changes of `info`."""
        settings = {"vocab_size": vocab_size, "max_tokens": 4096, "part_bytes": [PART_BYTES]}
        self.info = RanksInfo(**settings | dict(info or {}))
        self.calls = [] if calls is None else calls
        self.data: list[list[Datum]] = []
        self.weights = np.zeros(vocab_size)
        self.gradient = np.zeros(vocab_size)
        self.reference: np.ndarray | None = None
        self.held = dict(PART_BYTES)
        self.closed = False
        self.before_writing: Callable[[], Awaitable[None]] | None = None
        self.disk: Path | None = None
        self.restarts: list[str] = []
        self._fail = {verb: dict(calls) for verb, calls in (fail or {}).items()}
        self._counts: dict[str, int] = {}
        self._sequences_per_micro_batch = sequences_per_micro_batch
        self._micro_batches: list[MicroBatchLoss] = []
        self._turn = asyncio.Lock()
        self._death = asyncio.Event()
        self._lost: TrainerLost | None = None

    def fail_next(self, verb: str, error: Exception, after: int = 0) -> None:
        """Make ``verb`` raise ``error`` once, after that many good calls; `TrainerLost` leaves the trainer dead."""
        self._fail.setdefault(verb, {})[self._counts.get(verb, 0) + after + 1] = error

    def die(self, reason: str = "rank 0 died") -> None:
        """Die now, as by ``kill -9``: verbs in flight and later ones raise `TrainerLost`."""
        self._lost = self._lost or TrainerLost(reason)
        self._death.set()

    def revive(self) -> None:
        """Start again after a death: initial weights, everything on the devices."""
        self.calls.append("revive")
        self._lost, self._death = None, asyncio.Event()
        self.weights, self.gradient = np.zeros_like(self.weights), np.zeros_like(self.gradient)
        self.held = dict(PART_BYTES)

    spending: Spending | None = None

    @property
    def ranks(self) -> FakeTrainer:
        return self

    @property
    def processes(self) -> list[tuple[str, int]]:
        return []

    async def start(self, reason: TrainerLost | None) -> None:
        await asyncio.sleep(0)
        if reason is None:
            if error := self._fail.get("start", {}).pop(1, None):
                raise error
            return
        self.restarts.append(str(reason))
        if len(self.restarts) > 2:
            raise UserError("the trainer died 3 times")
        self.revive()

    async def lost(self) -> TrainerLost:
        await self._death.wait()
        assert self._lost is not None
        return self._lost

    @asynccontextmanager
    async def _verb(self, name: str, *arguments: object, needs: Collection[str] = ()) -> AsyncIterator[None]:
        async with self._turn:
            self._raise_if_lost()
            self.calls.append(" ".join(map(str, (name, *arguments))))
            self._counts[name] = self._counts.get(name, 0) + 1
            if error := self._fail.get(name, {}).pop(self._counts[name], None):
                if isinstance(error, TrainerLost):
                    self.die(str(error))
                raise error
            if away := [part for part in needs if not self.held[part]]:
                raise RuntimeError(f"{name}: {' and '.join(away)} are offloaded")
            await asyncio.sleep(0)  # ranks answer later
            yield

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise TrainerLost(str(self._lost))

    async def forward(
        self,
        data: Sequence[Datum],
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        async with self._verb("forward", which, needs=("parameters",)):
            weights = self.weights if which == "current" else self.reference
            if weights is None:
                raise ValueError("no reference weights: keep_reference() was not called")
            values = log_softmax(weights)
            return [np.where(d.loss_mask, values[d.token_ids], 0).astype(np.float32) for d in data]

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        async with self._verb("forward_backward", needs=("parameters", "gradients")):
            self.data.append(list(data))
            values = log_softmax(self.weights)
            losses = [-float((d.scaled_advantages * values[d.token_ids])[d.loss_mask].sum()) for d in data]
            for datum in data:
                trained = datum.loss_mask
                np.add.at(self.gradient, datum.token_ids[trained], -datum.scaled_advantages[trained])
                with np.errstate(invalid="ignore"):  # tests pass infinite weights
                    self.gradient += datum.scaled_advantages[trained].sum() * np.exp(values)
            starts = range(0, len(data), self._sequences_per_micro_batch)
            groups = [list(range(len(data)))[a : a + self._sequences_per_micro_batch] for a in starts]
            self._micro_batches = [MicroBatchLoss(group, sum(losses[i] for i in group)) for group in groups]
            trained_tokens = sum(int(np.count_nonzero(d.loss_mask)) for d in data)
            return LossReport(
                loss=sum(losses),
                metrics={"policy_loss": sum(losses), "tokens": float(trained_tokens), "entropy": 0.0},
                tokens=sum(len(d) for d in data),
                sequence_losses=losses if loss.per_sequence else None,
            )

    async def optim_step(self, adam: AdamParams, hold_above: float = math.inf) -> OptimReport:
        async with self._verb("optim_step", needs=PARTS):
            norm = float(np.linalg.norm(self.gradient))
            if hold_above < math.inf and not norm <= hold_above:
                return OptimReport(norm, adam.lr, skipped=False, held=True)
            if math.isfinite(norm):
                self.weights = self.weights - adam.lr * self.gradient * min(1.0, adam.clip_grad / max(norm, 1e-12))
            self.gradient = np.zeros_like(self.gradient)
            return OptimReport(norm, adam.lr, skipped=not math.isfinite(norm))

    async def discard_gradients(self) -> None:
        async with self._verb("discard_gradients"):
            self.gradient = np.zeros_like(self.gradient)

    async def examine(self) -> Examination:
        async with self._verb("examine", needs=("parameters", "gradients")):
            bad = [["logits"] if not np.isfinite(v).all() else [] for v in (self.weights, self.gradient)]
            return Examination(*bad, parameters=1, micro_batches=self._micro_batches)

    async def keep_reference(self) -> None:
        async with self._verb("keep_reference", needs=("parameters",)):
            self.reference = self.weights.copy()

    async def save_state(self, path: Path) -> Files:
        async with self._verb("save_state", needs=("parameters", "optimizer")):
            (path / STATE).write_text(json.dumps({"weights": self.weights.tolist()}))
            return {STATE: fingerprint(path / STATE, flush=True)}

    async def copy_state(self, path: Path) -> Awaitable[Files]:
        async with self._verb("copy_state", needs=("parameters", "optimizer")):
            content = json.dumps({"weights": self.weights.tolist()})

        async def write() -> Files:
            if self.before_writing is not None:
                await self.before_writing()
            here = self._here(path)
            here.mkdir(parents=True, exist_ok=True)
            (here / STATE).write_text(content)
            return {STATE: fingerprint(here / STATE, flush=True)}

        return write()

    async def send_state(
        self, path: Path, url: str, sizes: Mapping[str, int], bytes_per_s: float | None
    ) -> Collection[str]:
        if self.disk is None:
            return []
        self._raise_if_lost()
        self.calls.append(f"send_state {path.name}")
        return state_files.send(self._here(path), url, sizes, bytes_per_s, threading.Event())

    async def fetch_state(self, url: str, path: Path, files: Files) -> None:
        async with self._verb("fetch_state", path.name):
            state_files.fetch(url, self._here(path), files, threading.Event())

    async def clear_state(self, folder: Path) -> None:
        assert self.disk is not None
        state_files.clear(self.disk)

    def _here(self, path: Path) -> Path:
        """Place of a folder of the controller on the host of the ranks."""
        return path if self.disk is None else self.disk / path.name

    async def load_state(self, path: Path) -> None:
        async with self._verb("load_state", needs=("parameters", "optimizer")):
            here = path if self.disk is None else state_files.fetched(self._here(path))
            self.weights = np.array(json.loads((here / STATE).read_text())["weights"])
            self.gradient = np.zeros_like(self.gradient)

    async def export_hf(self, path: Path) -> None:
        async with self._verb("export_hf", needs=("parameters",)):
            path.mkdir(parents=True, exist_ok=True)
            (path / "model.json").write_text(json.dumps(self.weights.tolist()))

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        async with self._verb("prepare_weights", transport):
            return {}

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        async with self._verb("send_weights", version, needs=("parameters",)):
            await deliver({"version": version, "weights": self.weights.tolist()})

    async def offload(self, parts: Collection[Part] = PARTS) -> None:
        async with self._verb("offload", *parts):
            self.held |= dict.fromkeys(parts, 0)
            if "gradients" in parts:
                self.gradient = np.zeros_like(self.gradient)

    async def onload(self, parts: Collection[Part] = PARTS) -> None:
        async with self._verb("onload", *parts):
            self.held |= {part: PART_BYTES[part] for part in parts}

    async def memory(self, moment: Literal["begin", "end"], quiet: bool = False) -> list[dict[str, int]]:
        async with self._verb("memory", moment):
            return [dict(self.held) | {"process": 1000}] if moment == "begin" else [{}]

    async def close(self) -> None:
        self.closed = True


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[V]`` → ``[V]``."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
