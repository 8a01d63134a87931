"""A frozen copy of the parameters in host memory, put in their place for a pass and taken out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


class Reference:
    """The parameters of this rank's chunks at the time of construction."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._kept = _host_copy(self._parameters)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the kept values; afterwards, and after an exception, its own again, bit for bit."""
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
