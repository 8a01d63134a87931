"""States of a run that are saved at the service: all are known, and those that no checkpoint needs are deleted."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from megatron_fleet.config.files import read_object
from megatron_fleet.config.sections.run import StoreConfig
from megatron_fleet.storage.local import write_atomically

STATE = "hosted.json"
"""File of a checkpoint with the address of the state at the service."""
SAVED = "hosted_states.txt"
"""File of ``run.out`` with the addresses of all states at the service, one a line, oldest first."""
_STEP = re.compile(r"(\d+)-[0-9a-f]{8}$")
"""End of a state's name: the step of its checkpoint, and random digits that differ for each attempt to save it."""


class States:
    """Saved states, which are recorded before a checkpoint refers to them, so that an interrupted save loses none."""

    def __init__(self, out: Path, store: StoreConfig, delete: Callable[[str], Awaitable[None]]) -> None:
        """Args: ``out``: the run's folder. ``delete``: deletes a state at the service."""
        self._file, self._checkpoints, self._store, self._delete = out / SAVED, out / "checkpoints", store, delete

    def saved(self) -> list[str]:
        """Addresses, oldest first."""
        return self._file.read_text(encoding="utf-8").split() if self._file.exists() else []

    def add(self, *addresses: str) -> None:
        """Record states."""
        saved = self.saved()
        if not set(addresses) <= set(saved):
            self._write([*dict.fromkeys([*saved, *addresses])])

    async def clear(self) -> None:
        """Delete the states that no checkpoint here refers to. Those of checkpoints in a store stay: of the newest
        ``checkpoint.store.keep`` steps and one more, since a new checkpoint is uploaded later; all without a limit.
        """
        saved = self.saved()
        needed = {read_object(file, "remove it")["path"] for file in self._checkpoints.glob(f"*/{STATE}")}
        if self._store.url is not None:
            steps = sorted({_step(address) for address in saved}, reverse=True)
            kept = steps[: self._store.keep + 1] if self._store.keep else steps
            needed.update(address for address in saved if _step(address) in kept)
        for address in [*saved[:-1]]:
            if address not in needed:
                await self._delete(address)
                saved.remove(address)
                self._write(saved)

    def _write(self, addresses: list[str]) -> None:
        write_atomically(self._file, "".join(f"{address}\n" for address in addresses).encode())


def _step(address: str) -> int:
    """Step in the name of a state; −1 of another name."""
    found = _STEP.search(address)
    return int(found[1]) if found else -1
