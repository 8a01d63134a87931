"""All-gather of updated parameters while the next forward pass already runs.

Each layer waits for its own parameters. Megatron's hooks would wait for those of the module that is called, and some
are read by others: the output weight by `PolicyModel`, the weights of convolutions by mixers.

Attributes of Megatron's bucket groups are those of 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel


class ParameterOverlap:
    """Overlap of all chunks of a rank. Without ``overlap_param_gather`` every method does nothing."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Connect the chunks."""
        self._groups: list[Any] = []
        for chunk in chunks:
            if not chunk.ddp_config.overlap_param_gather:
                continue
            chunk.disable_forward_pre_hook(param_sync=False)
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            layers = [(layer, set(layer.parameters())) for layer in chunk.module.decoder.layers]
            in_layers = set().union(*(parameters for _, parameters in layers))
            # Embedding, last norm and output weight, before everything else.
            needed = [(chunk, [group for group in groups if not group.params <= in_layers])]
            needed += [(layer, [g for g in groups if not g.params.isdisjoint(own)]) for layer, own in layers]
            for module, own_groups in needed:
                module.register_forward_pre_hook(_waiting_for(own_groups))
                self._groups += [group for group in own_groups if group not in self._groups]

    def start(self) -> None:
        """Start to gather, in the order of the forward pass, what is not being gathered."""
        for group in self._groups:
            if group.param_gather_handle is None:
                group.start_param_sync()

    def wait(self) -> None:
        """Let later work on the device wait for all parameters."""
        _wait(self._groups)


def _waiting_for(groups: Sequence[Any]) -> Callable[..., None]:
    return lambda *_: _wait(groups)


def _wait(groups: Sequence[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
