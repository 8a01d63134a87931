"""Reference policy of a KL term: weights that take the place of the model's during a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron_fleet.platform.device import device
from megatron_fleet.trainer.megatron import lora, offload
from megatron_fleet.trainer.megatron.offload import HostCopy, Storages

_IN_FLIGHT = 2
"""Blocks of an exchange on their way at one time: one is written to the device while the one before it is read."""


class BaseReference:
    """Reference policy of a model with adapters: its base model. It already exists: nothing is kept."""

    def __init__(self, adapters: Sequence[lora.Adapters]) -> None:
        self._adapters = adapters

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Disable the adapters inside."""
        with lora.without(self._adapters):
            yield


class Reference:
    """Reference policy: the parameters, and the biases of routers, of this rank's chunks at construction.

    Host memory holds them once, pinned on CUDA. A pass exchanges them with the model's own, block by block, so there is
    no further copy of either: each pass moves the model twice to the device and twice from it, both ways at once.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        tensors: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        for chunk in chunks:
            tensors += [b for name, b in chunk.named_buffers() if name.endswith("expert_bias")]
        self._device = device()
        self._storages: Storages = list(
            {s._cdata: s for s in (t.untyped_storage() for t in tensors if _is_plain(t))}.values()
        )
        # Only Transformer Engine knows where the memory of a quantised parameter is.
        self._quantised = [tensor for tensor in tensors if not _is_plain(tensor)]
        self._host = HostCopy(pinned=self._device.type == "cuda")
        self._host.store(list(map(offload.as_bytes, self._storages)))
        self._other = [tensor.detach().to("cpu", copy=True) for tensor in self._quantised]
        self._lanes: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._lanes = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return self._host.nbytes + sum(tensor.nbytes for tensor in self._other)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the model for the reference inside; on exit, even after an exception, the model has its own values
        again, bit for bit.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Copy each block of the model aside, fill its place from the host; meanwhile the copy goes there."""
        size = min(offload.BLOCK_BYTES, self._host.nbytes)
        aside = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_IN_FLIGHT)]
        lanes = self._lanes
        if lanes is not None:
            torch.cuda.synchronize(self._device)  # parameters may still be gathered on the communicators' streams
        gone: list[torch.cuda.Event] = []
        for index, (ours, theirs) in enumerate(self._host.pieces(list(map(offload.as_bytes, self._storages)))):
            left = aside[index % _IN_FLIGHT][: len(theirs)]
            if lanes is None:
                _swap_in(left, theirs, ours)
                ours.copy_(left)
                continue
            coming, leaving = lanes
            with torch.cuda.stream(coming):
                if index >= _IN_FLIGHT:
                    coming.wait_event(gone[index - _IN_FLIGHT])
                _swap_in(left, theirs, ours)
                filled = coming.record_event()
            with torch.cuda.stream(leaving):
                leaving.wait_event(filled)
                ours.copy_(left, non_blocking=True)
                gone.append(leaving.record_event())
        for lane in lanes or ():
            lane.synchronize()
        for index, parameter in enumerate(self._quantised):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(self._other[index])
            self._other[index] = current


def _swap_in(left: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    left.copy_(theirs)
    theirs.copy_(ours, non_blocking=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor
