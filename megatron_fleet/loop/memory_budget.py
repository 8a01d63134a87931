"""The memory ledger: who holds how much of each rank's memory, compared in every phase with what it may hold.

============== ==================================================================================================
owner          bytes
============== ==================================================================================================
parameters     the sizes of the trainer's tensors on its device, whatever device that is; the reference weights of
gradients      a KL term live in host memory and lie in the parameters' place while they are used
optimizer
temporary      most that came on top of these since the phase began: activations, buffers of transfers (CUDA)
other          what else the allocator of this process keeps: caches, workspaces, fragments (CUDA)
communicators  what NCCL took past that allocator, see `CudaGauge` (CUDA; gloo's are memory of the process)
engine         the rest of what is in use on the device: the engine, and contexts of all processes (CUDA)
process        resident memory of this process (CPU)
============== ==================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_fleet.platform.communicator import Communicator
from megatron_fleet.telemetry.sinks import write_atomically

GIB = 1 << 30

Limits = Mapping[str, Mapping[str, int]]
"""Phase → owner → most bytes. An owner that is not named may hold anything."""


class MemoryExceeded(RuntimeError):
    """An owner holds memory that it may not hold in this phase."""


class Gauge(Protocol):
    """What is to be known of one rank's memory besides the trainer's own tensors."""

    def read(self, held: int) -> dict[str, int]:
        """Bytes by owner, at the beginning of a phase. ``held``: what the trainer's tensors take on the device."""
        ...

    def close(self, quiet: bool) -> dict[str, int]:
        """Bytes by owner that are known at the end of a phase only. ``quiet``: no other process took memory in it."""
        ...


@dataclass(frozen=True, slots=True)
class _Row:
    """What one rank tells. ``held``: owner → bytes and limit; ``closing``: the same of the phase before."""

    held: dict[str, tuple[int, int | None]]
    closing: dict[str, tuple[int, int | None]]
    problems: list[str]


class Ledger:
    """Books over all phases of a run. Every rank calls every method, in the same order.

    ``memory.json`` holds, for each phase and owner, the most bytes so far, with the rank, its limit (``null``: none)
    and the cycle, from 1.

    Attributes:
        remark: why engines keep their memory, when they do; for ``memory.json``.
    """

    def __init__(self, comm: Communicator, gauge: Gauge, limits: Limits, path: Path) -> None:
        """Args: ``limits``: of this rank. ``path``: of ``memory.json``, which rank 0 writes."""
        self.remark: str | None = None
        self._comm, self._gauge, self._limits, self._path = comm, gauge, limits, path
        self._phase = ""
        self._closing: dict[str, tuple[int, int | None]] = {}
        self._cycles: dict[str, int] = {}
        self._last: dict[str, dict[str, int]] = {}
        self._worst: dict[str, dict[str, dict[str, int | None]]] = {}

    def leave(self, quiet: bool) -> None:
        """Measure at the end of a phase, before anything moves. ``quiet``: no engine took memory during it."""
        self._closing = self._with_limits(self._phase, self._gauge.close(quiet))

    def enter(self, phase: str, held: Mapping[str, int]) -> None:
        """Measure at the beginning of ``phase``.

        Args:
            held: bytes of the trainer's tensors on the device, by owner.

        Raises:
            MemoryExceeded: on every rank, when one of them holds too much.
        """
        mine = {**held, **self._gauge.read(sum(held.values()))}
        problems = [
            _problem(self._comm.rank, phase, owner, nbytes, limit)
            for owner, (nbytes, limit) in self._with_limits(phase, mine).items()
            if limit is not None and nbytes > limit
        ]
        row = _Row(self._with_limits(phase, mine), self._closing, problems)
        rows = self._comm.all_gather(row)
        self._note(self._phase, [row.closing for row in rows])
        self._phase, self._closing = phase, {}
        self._cycles[phase] = self._cycles.get(phase, 0) + 1
        self._note(phase, [row.held for row in rows])
        if problems := [problem for row in rows for problem in row.problems]:
            self.write()
            raise MemoryExceeded(problems[0])

    def metrics(self) -> dict[str, float]:
        """``memory/<phase>/<owner>`` in GiB: the rank that holds most, the last time the phase was entered."""
        return {
            f"memory/{phase}/{owner}": nbytes / GIB
            for phase, owners in self._last.items()
            for owner, nbytes in owners.items()
        }

    def write(self) -> None:
        """Write ``memory.json``."""
        if self._comm.rank == 0:
            table = {"unit": "bytes", "engines": self.remark, "phases": self._worst}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(table, indent=1).encode() + b"\n")

    def _with_limits(self, phase: str, nbytes: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
        limits = self._limits.get(phase, {})
        return {owner: (n, limits.get(owner)) for owner, n in nbytes.items()}

    def _note(self, phase: str, rows: list[dict[str, tuple[int, int | None]]]) -> None:
        for owner in dict.fromkeys(owner for row in rows for owner in row):
            rank = max((r for r in range(len(rows)) if owner in rows[r]), key=lambda r: (rows[r][owner][0], -r))
            nbytes, limit = rows[rank][owner]
            self._last.setdefault(phase, {})[owner] = nbytes
            worst = self._worst.setdefault(phase, {})
            if owner not in worst or nbytes > (worst[owner]["bytes"] or 0):
                worst[owner] = {"bytes": nbytes, "limit": limit, "rank": rank, "cycle": self._cycles[phase]}


def _problem(rank: int, phase: str, owner: str, nbytes: int, limit: int) -> str:
    return (
        f"memory in phase {phase}: {owner} holds {nbytes / GIB:.3g} GiB on rank {rank}, {limit / GIB:.3g} GiB are "
        f"allowed; {_advice(owner)}."
    )


def _advice(owner: str) -> str:
    if owner in ("engine", "other", "communicators"):
        return "raise rollout.engine.residual_gib if this is known to fit, else look for what was not given back"
    return "something keeps or makes anew what should be away"


class ProcessGauge:
    """Where devices have no memory of their own."""

    def read(self, held: int) -> dict[str, int]:
        """Resident memory of this process; ``held`` is part of it."""
        import psutil

        return {"process": psutil.Process().memory_info().rss}

    def close(self, quiet: bool) -> dict[str, int]:
        """Nothing counts the peak."""
        return {}


class CudaGauge:
    """One CUDA device, which no other rank uses.

    Communicators take their memory at their first use, in a training step, past PyTorch's allocator. What is in use on
    the device grows by it while the engine sleeps; kernels that are loaded at their first use are counted with them.
    """

    def __init__(self, where: torch.device) -> None:
        self._device = where
        self._held = self._foreign_before = self._communicators = 0

    def read(self, held: int) -> dict[str, int]:
        """See `Gauge.read`."""
        self._held, self._foreign_before = held, self._foreign()
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "other": max(0, torch.cuda.memory_reserved(self._device) - held),
            "communicators": self._communicators,
            "engine": max(0, self._foreign_before - self._communicators),
        }

    def close(self, quiet: bool) -> dict[str, int]:
        """See `Gauge.close`."""
        if quiet:
            self._communicators += max(0, self._foreign() - self._foreign_before)
        peak = torch.cuda.max_memory_allocated(self._device) - self._held
        return {"temporary": max(0, peak), "communicators": self._communicators}

    def _foreign(self) -> int:
        """Bytes in use on the device that PyTorch's allocator of this process did not ask for."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)


def open_gauge(where: torch.device) -> Gauge:
    """The gauge of a rank whose device is ``where``."""
    return CudaGauge(where) if where.type == "cuda" else ProcessGauge()
