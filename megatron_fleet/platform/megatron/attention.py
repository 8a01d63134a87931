"""A packed micro-batch over context-parallel ranks, and causal attention over it for hosts without Transformer Engine.

Every sequence is cut into 2 × ranks parts; rank r gets part r and its mirror image, part 2 × ranks − 1 − r. Under a
causal mask this balances the number of attended keys over the ranks. Transformer Engine uses the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

Attend = Callable[..., torch.Tensor]


@dataclass
class MicroBatchParams(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with the lengths also on the host.

    Attributes:
        lengths: tokens of each sequence, in order, over all context-parallel ranks.
        filler: tokens after them that belong to no sequence.
        routing: layer number → experts ``[n, k]`` to replay (`trainer.megatron.routing`); ``None``: routers choose.
    """

    lengths: tuple[int, ...] = ()
    filler: int = 0
    routing: Mapping[int, torch.Tensor] | None = None


def local_parts(lengths: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """Parts of a rank as ``(start of their sequence, first token, end)``, indices into the micro-batch, in local order.

    Args:
        lengths: tokens of each sequence of the micro-batch, multiples of 2 × ``ranks``.

    Raises:
        ValueError: a length is not such a multiple.
    """
    parts, start = [], 0
    for length in lengths:
        if length % (2 * ranks):
            raise ValueError(f"a sequence of {length} tokens cannot be cut into {2 * ranks} parts")
        size = length // (2 * ranks)
        for part in (rank, 2 * ranks - 1 - rank):
            parts.append((start, start + part * size, start + (part + 1) * size))
        start += length
    return parts


def local_tokens(lengths: Sequence[int], ranks: int, rank: int) -> np.ndarray:
    """Indices into the micro-batch of a rank's tokens, in local order: int64 ``[P / ranks]``."""
    pieces = [np.arange(first, end) for _, first, end in local_parts(lengths, ranks, rank)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


class PackedAttention(nn.Module):
    """Core attention through PyTorch's kernels: causal, and each sequence attends to itself alone.

    Takes the constructor arguments of Megatron's core attention; filler tokens get zeros.
    """

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.config, self.layer_number, self.scale = config, layer_number, softmax_scale
        self.ranks = config.context_parallel_size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: MicroBatchParams,
        **_: Any,
    ) -> torch.Tensor:
        """Map local query ``[P, heads, d]``, key ``[P, groups, d]`` and value ``[P, groups, v]`` to ``[P, heads × v]``.

        With context parallelism ``P`` counts this rank's tokens, in the layout of `local_parts`.
        """
        attend = partial(F.scaled_dot_product_attention, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1])
        if self.ranks == 1:
            out = self._whole(query, key, value, packed_seq_params, attend)
        else:
            out = self._split(query, key, value, packed_seq_params, attend)
        out.append(query.new_zeros(1, query.shape[1], packed_seq_params.filler // self.ranks, value.shape[2]))
        return torch.cat(out, dim=2)[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _whole(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: MicroBatchParams, attend: Attend
    ) -> list[torch.Tensor]:
        sizes = [*params.lengths, params.filler]
        q, k, v = (x.transpose(0, 1).split(sizes, dim=1) for x in (query, key, value))
        return [
            attend(a[None], b[None], c[None], is_causal=True) for a, b, c in zip(q[:-1], k[:-1], v[:-1], strict=True)
        ]

    def _split(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: MicroBatchParams, attend: Attend
    ) -> list[torch.Tensor]:
        """Attend with context parallelism: queries stay local, keys and values are all-gathered (their gradients are
        summed in the backward pass).
        """
        group, ranks = parallel_state.get_context_parallel_group(), self.ranks
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=2), group=group)
        pieces = [*params.lengths, *([params.filler] if params.filler else [])]
        order = np.concatenate([local_tokens(pieces, ranks, r) for r in range(ranks)])
        both = both.index_select(0, torch.from_numpy(np.argsort(order)).to(both.device)).transpose(0, 1)
        k, v = both.split([key.shape[2], value.shape[2]], dim=2)
        q, out, at = query.transpose(0, 1), [], 0
        for start, first, end in local_parts(params.lengths, ranks, group.rank()):
            mask = torch.ones(end - first, end - start, dtype=torch.bool, device=q.device).tril(first - start)
            here = slice(at, at + end - first)
            out.append(attend(q[None, :, here], k[None, :, start:end], v[None, :, start:end], attn_mask=mask))
            at += end - first
        return out
