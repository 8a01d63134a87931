"""Memory budget: check each rank's memory against its limits in every phase, and keep the peaks in a file.

Owners of memory: see `trainer.megatron.memory`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_fleet.storage.local import write_atomically
from megatron_fleet.trainer.base import Ranks

GIB = 1 << 30

Limits = Mapping[str, Mapping[str, int]]
"""Phase → owner → most bytes. An owner without an entry is unlimited."""


class MemoryExceeded(RuntimeError):
    """An owner holds more memory than its limit in this phase."""


class MemoryBudget:
    """Memory of all ranks over the phases of a run.

    ``memory.json`` holds, for each phase and owner, the peak bytes so far, with the rank, its limit (``null``: none)
    and the cycle, from 1.

    Attributes:
        remark: reason why the engines freed no memory, if so; for ``memory.json``.
    """

    def __init__(self, ranks: Ranks | None, limits: Sequence[Limits], path: Path) -> None:
        """Args: ``ranks``: ``None``: there are none, and nothing is measured. ``limits``: one per rank; empty: no
        limits. ``path``: path of ``memory.json``.
        """
        self.remark: str | None = None
        self._ranks, self._limits, self._path = ranks, limits, path
        self._phase = ""
        self._cycles: dict[str, int] = {}
        self._last: dict[str, dict[str, int]] = {}
        self._worst: dict[str, dict[str, dict[str, int | None]]] = {}

    async def leave(self, quiet: bool) -> None:
        """Measure at the end of a phase, before anything moves. ``quiet``: no engine allocated memory during it."""
        if self._ranks is not None:
            self._record(self._phase, await self._ranks.memory("end", quiet))

    async def enter(self, phase: str) -> None:
        """Measure at the beginning of ``phase``.

        Raises:
            MemoryExceeded: an owner on a rank exceeds its limit.
        """
        held = [] if self._ranks is None else await self._ranks.memory("begin")
        self._phase = phase
        self._cycles[phase] = self._cycles.get(phase, 0) + 1
        self._record(phase, held)
        for rank, owners in enumerate(held):
            for owner, nbytes in owners.items():
                limit = self._limit(rank, phase, owner)
                if limit is not None and nbytes > limit:
                    self.write()
                    raise MemoryExceeded(_problem(rank, phase, owner, nbytes, limit))

    def metrics(self) -> dict[str, float]:
        """``memory/<phase>/<owner>`` in GiB: the maximum over the ranks at the last measurement of the phase."""
        return {
            f"memory/{phase}/{owner}": nbytes / GIB
            for phase, owners in self._last.items()
            for owner, nbytes in owners.items()
        }

    def write(self) -> None:
        """Write ``memory.json``."""
        table = {"unit": "bytes", "engines": self.remark, "phases": self._worst}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(table, indent=1).encode() + b"\n")

    def _limit(self, rank: int, phase: str, owner: str) -> int | None:
        return self._limits[rank].get(phase, {}).get(owner) if self._limits else None

    def _record(self, phase: str, ranks: Sequence[Mapping[str, int]]) -> None:
        for owner in dict.fromkeys(owner for owners in ranks for owner in owners):
            rank = max((r for r in range(len(ranks)) if owner in ranks[r]), key=lambda r: (ranks[r][owner], -r))
            nbytes = ranks[rank][owner]
            self._last.setdefault(phase, {})[owner] = nbytes
            worst = self._worst.setdefault(phase, {})
            if owner not in worst or nbytes > (worst[owner]["bytes"] or 0):
                limit = self._limit(rank, phase, owner)
                worst[owner] = {"bytes": nbytes, "limit": limit, "rank": rank, "cycle": self._cycles[phase]}


def _problem(rank: int, phase: str, owner: str, nbytes: int, limit: int) -> str:
    return (
        f"memory in phase {phase}: {owner} holds {nbytes / GIB:.3g} GiB on rank {rank}, {limit / GIB:.3g} GiB are "
        f"allowed; {_advice(owner)}."
    )


def _advice(owner: str) -> str:
    if owner in ("engine", "other", "communicators"):
        return "raise rollout.engine.residual_gib if this is known to fit, else look for memory that was not freed"
    return "memory that should be offloaded is kept or allocated again"
