"""Reference policy: a frozen copy of the parameters, swapped in for a pass, or adapters disabled for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron_fleet.trainer.megatron.lora import Adapters, without


class BaseReference:
    """Base model of the adapters as the reference. It already exists: nothing is kept."""

    def __init__(self, adapters: Sequence[Adapters]) -> None:
        self._adapters = adapters

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Disable the adapters inside."""
        with without(self._adapters):
            yield


class Reference:
    """Copy in host memory of the parameters, and the biases of routers, of this rank's chunks at construction."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._parameters: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        for chunk in chunks:
            self._parameters += [b for name, b in chunk.named_buffers() if name.endswith("expert_bias")]
        self._kept = _host_copy(self._parameters)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap in the kept values inside; on exit, even after an exception, the model has its own again,
        bit for bit.
        """
        current = _host_copy(self._parameters)
        try:
            _fill(self._parameters, self._kept)
            yield
        finally:
            _fill(self._parameters, current)


def _host_copy(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().to("cpu", copy=True) for p in parameters]


@torch.no_grad()
def _fill(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    # In place: the parameters are views into Megatron's buffers and must stay there.
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
