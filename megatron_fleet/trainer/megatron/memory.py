"""One rank's memory by owner: the trainer's tensors, which it counts, and the rest, which a gauge reads.

============== ==================================================================================================
owner          bytes
============== ==================================================================================================
parameters     the sizes of the trainer's tensors on its device, whatever device that is; the reference weights of
gradients      a KL term are in host memory and take the parameters' place while they are used
optimizer
temporary      most that came on top of these since the phase began: activations, buffers of transfers (CUDA)
other          what else the allocator of this process keeps: caches, workspaces, fragments (CUDA)
communicators  what NCCL took past that allocator, see `CudaGauge` (CUDA; gloo's are memory of the process)
engine         the rest of what is in use on the device: the engine, and contexts of all processes (CUDA)
process        resident memory of this process (CPU)
============== ==================================================================================================
"""

from __future__ import annotations

from typing import Literal, Protocol

import psutil
import torch

from megatron_fleet.trainer.megatron.offload import TrainState


class Gauge(Protocol):
    """Reads one rank's memory besides the trainer's own tensors."""

    def read(self, held: int) -> dict[str, int]:
        """Bytes by owner, at the beginning of a phase. ``held``: what the trainer's tensors take on the device."""
        ...

    def close(self, quiet: bool) -> dict[str, int]:
        """Bytes by owner that are known at the end of a phase only. ``quiet``: no other process took memory in it."""
        ...


class RankMemory:
    """Answers `trainer.base.Trainer.memory` for one rank."""

    def __init__(self, where: torch.device, state: TrainState | None) -> None:
        """
        Args:
            where: this rank's device.
            state: counts the trainer's tensors; ``None``: they never move and are not counted one by one.
        """
        self._gauge, self._state = open_gauge(where), state

    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part when it is on the device; empty without a state."""
        return self._state.sizes() if self._state is not None else {}

    def memory(self, moment: Literal["begin", "end"], quiet: bool) -> dict[str, int]:
        """Bytes by owner at the beginning or the end of a phase.

        Args:
            quiet: at the end: no other process took device memory during the phase.
        """
        if moment == "end":
            return self._gauge.close(quiet)
        held = self._state.held() if self._state is not None else {}
        return {**held, **self._gauge.read(sum(held.values()))}


class ProcessGauge:
    """Where devices have no memory of their own."""

    def read(self, held: int) -> dict[str, int]:
        """Resident memory of this process; ``held`` is part of it."""
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
