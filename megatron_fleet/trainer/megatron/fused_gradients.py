"""Weight gradients of Transformer Engine's layers, accumulated into Megatron's buffers by the matrix product itself.

Without this a product writes a bfloat16 gradient, rounded, and another kernel adds it to the float32 buffer. Megatron's
own switch, ``gradient_accumulation_fusion``, cannot be used: its output layer refuses it without a kernel of apex, even
where it is never called (`PolicyModel`). The layers read theirs, ``fuse_wgrad_accumulation``, in each forward pass
(transformer_engine 2.11 to 2.20, ``module/linear.py``, ``layernorm_linear.py``, ``grouped_linear.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class FusedWeightGradients:
    """Switch of all layers of a rank's chunks; without Transformer Engine there are none.

    Call `start` before each pass with gradients.
    """

    def __init__(self, chunks: Sequence[nn.Module], unsuitable: Collection[torch.Tensor], overwrites: bool) -> None:
        """Find the layers. The chunks must have gradient buffers.

        Args:
            unsuitable: weights whose layer computes with other tensors in their place.
            overwrites: the first micro-batch of a pass overwrites the buffer instead of adding to it: Transformer
                Engine does so where Megatron tells it which one is the first, which it does for FP8.
        """
        self._layers = {layer: weights for chunk in chunks for layer, weights in _layers(chunk, unsuitable)}
        self._overwrites = overwrites

    def start(self, observed: Collection[nn.Parameter], again: bool) -> None:
        """Set every layer for one pass.

        Args:
            observed: weights whose gradient a hook of autograd observes; it would get a tensor without content.
            again: the buffers hold gradients of an earlier pass.
        """
        fused, seen = not (self._overwrites and again), set(observed)
        for layer, weights in self._layers.items():
            on = fused and seen.isdisjoint(weights)
            layer.fuse_wgrad_accumulation = on
            if not on:
                for weight in weights:
                    # Set by an earlier pass, and Megatron would then take this pass's gradient as added.
                    weight.grad_added_to_main_grad = False


def _layers(chunk: nn.Module, unsuitable: Collection[torch.Tensor]) -> Iterator[tuple[Any, list[Any]]]:
    for module in chunk.modules():
        if not hasattr(module, "fuse_wgrad_accumulation"):
            continue
        weights = [p for name, p in module.named_parameters(recurse=False) if name.startswith("weight")]
        if weights and all(hasattr(w, "main_grad") and w not in unsuitable for w in weights):
            yield module, weights
