"""One rank's memory by owner: the trainer's tensors, which it counts, and the rest, which a gauge reads.

============== ==================================================================================================
owner          bytes
============== ==================================================================================================
parameters     the sizes of the trainer's tensors on its device, whatever device that is; the reference weights of
gradients      a KL term are in host memory and take the parameters' place while they are used
optimizer
temporary      peak on top of these since the phase began: activations, transfer buffers (CUDA)
other          everything else held by the allocator of this process: caches, workspaces, fragments (CUDA)
communicators  NCCL's memory outside that allocator, see `CudaGauge` (CUDA; gloo's is memory of the process)
engine         all other memory in use on the device: the engine, and contexts of all processes (CUDA)
process        resident memory of this process (CPU)
============== ==================================================================================================
"""

from __future__ import annotations

from typing import Literal, Protocol

import psutil
import torch

from megatron_fleet.trainer.megatron.offload import TrainState


class Gauge(Protocol):
    """Reader of one rank's memory besides the trainer's own tensors."""

    def read(self, held: int) -> dict[str, int]:
        """Bytes by owner, at the beginning of a phase. ``held``: bytes of the trainer's tensors on the device."""
        ...

    def close(self, quiet: bool) -> dict[str, int]:
        """Bytes by owner that are known only at the end of a phase. ``quiet``: no other process allocated memory during
        it.
        """
        ...


class RankMemory:
    """Implementation of `trainer.base.Ranks.memory` for one rank."""

    def __init__(self, where: torch.device, state: TrainState | None) -> None:
        """Open the gauge of a device.

        Args:
            where: this rank's device.
            state: counts the trainer's tensors; ``None``: they are never offloaded and not counted individually.
        """
        self._gauge, self._state = open_gauge(where), state

    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part when it is on the device; empty without a state."""
        return self._state.sizes() if self._state is not None else {}

    def memory(self, moment: Literal["begin", "end"], quiet: bool) -> dict[str, int]:
        """Bytes by owner at the beginning or the end of a phase.

        Args:
            quiet: at the end: no other process allocated device memory during the phase.
        """
        if moment == "end":
            return self._gauge.close(quiet)
        held = self._state.held() if self._state is not None else {}
        return {**held, **self._gauge.read(sum(held.values()))}


class ProcessGauge:
    """Gauge for devices without memory of their own."""

    def read(self, held: int) -> dict[str, int]:
        """Resident memory of this process, which includes ``held``."""
        return {"process": psutil.Process().memory_info().rss}

    def close(self, quiet: bool) -> dict[str, int]:
        """Return nothing: the peak is not measured."""
        return {}


class CudaGauge:
    """Gauge of one CUDA device that no other rank uses.

    Communicators allocate their memory on first use, in a training step, bypassing PyTorch's allocator. The memory in
    use on the device grows by it while the engine sleeps; kernels loaded on first use are counted with them.
    """

    def __init__(self, where: torch.device) -> None:
        self._device = where
        self._held = self._foreign_before = self._communicators = 0

    def read(self, held: int) -> dict[str, int]:
        self._held, self._foreign_before = held, self._foreign()
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "other": max(0, torch.cuda.memory_reserved(self._device) - held),
            "communicators": self._communicators,
            "engine": max(0, self._foreign_before - self._communicators),
        }

    def close(self, quiet: bool) -> dict[str, int]:
        if quiet:
            self._communicators += max(0, self._foreign() - self._foreign_before)
        peak = torch.cuda.max_memory_allocated(self._device) - self._held
        return {"temporary": max(0, peak), "communicators": self._communicators}

    def _foreign(self) -> int:
        """Bytes in use on the device that were not allocated by PyTorch in this process."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)


def open_gauge(where: torch.device) -> Gauge:
    """Open the gauge of a rank whose device is ``where``."""
    return CudaGauge(where) if where.type == "cuda" else ProcessGauge()
