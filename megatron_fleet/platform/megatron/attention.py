"""Causal attention over one packed row, for hosts without Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn


@dataclass
class RowParams(PackedSeqParams):
    """Megatron's description of a packed row, with the lengths also on the host.

    Attributes:
        lengths: tokens of each sequence, in order.
        filler: tokens behind them that belong to no sequence.
    """

    lengths: tuple[int, ...] = ()
    filler: int = 0


class PackedAttention(nn.Module):
    """Core attention through PyTorch's kernels: every sequence of the row attends to itself alone, causally.

    Takes the constructor arguments of Megatron's core attention; tokens of the filler get zeros.
    """

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.config, self.layer_number, self.scale = config, layer_number, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> torch.Tensor:
        """Local query ``[P, heads, d]``, key ``[P, groups, d]``, value ``[P, groups, v]`` → ``[P, heads × v]``."""
        sizes = [*packed_seq_params.lengths, packed_seq_params.filler]
        q, k, v = (x.transpose(0, 1).split(sizes, dim=1) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=self.scale, enable_gqa=grouped)
        out = [attend(a[None], b[None], c[None]) for a, b, c in zip(q[:-1], k[:-1], v[:-1], strict=True)]
        out.append(query.new_zeros(1, query.shape[1], packed_seq_params.filler, value.shape[2]))
        return torch.cat(out, dim=2)[0].transpose(0, 1).reshape(query.shape[0], -1)
