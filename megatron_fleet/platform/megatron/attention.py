"""A packed micro-batch over context-parallel ranks, and causal attention over it without Transformer Engine.

Every sequence is cut into 2 × ranks parts; rank r gets part r and its mirror image, part 2 × ranks − 1 − r. Under a
causal mask this balances the number of attended keys over the ranks. Transformer Engine uses the same layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

from megatron_fleet.platform.device import to_device

_WIDEST_HEAD = 256
"""Values of a head that flash attention takes at most; their number must be a multiple of 8."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Stretches of a rank's queries, each with the keys that its last query attends to: all up to that one.

    Attributes:
        queries, keys: tokens of each stretch.
        query_ends, key_ends: int32 ``[N + 1]`` on the device, 0 and where each stretch ends.
        rows: int64 ``[sum of keys]`` on the device, where these keys are among those gathered over the ranks; ``None``
            with one rank, whose own keys they are.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    rows: torch.Tensor | None


@dataclass
class MicroBatchParams(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with the lengths also on the host.

    Attributes:
        lengths: tokens of each sequence, in order, over all context-parallel ranks.
        filler: tokens after them that belong to no sequence.
        routing: layer number → experts ``[n, k]`` to replay (`trainer.megatron.routing`); ``None``: routers choose.
        parts: attention's stretches, made by its first layer for all.
    """

    lengths: tuple[int, ...] = ()
    filler: int = 0
    routing: Mapping[int, torch.Tensor] | None = None
    parts: AttentionParts | None = field(default=None, repr=False)


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


def attention_parts(params: MicroBatchParams, ranks: int, rank: int, device: torch.device) -> AttentionParts:
    """Stretches of a context-parallel rank's tokens, filler left out."""
    if ranks == 1:
        ends = to_device(torch.tensor([0, *params.lengths]).cumsum(0).int(), device)
        return AttentionParts(params.lengths, params.lengths, ends, ends, None)
    pieces = [*params.lengths, *([params.filler] if params.filler else [])]
    gathered = np.argsort(np.concatenate([local_tokens(pieces, ranks, r) for r in range(ranks)]))
    parts = local_parts(params.lengths, ranks, rank)
    queries, keys = tuple(end - first for _, first, end in parts), tuple(end - start for start, _, end in parts)
    rows = np.concatenate([gathered[start:end] for start, _, end in parts]) if parts else np.zeros(0, np.int64)
    query_ends, key_ends = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (queries, keys))
    return AttentionParts(
        queries,
        keys,
        to_device(query_ends, device),
        to_device(key_ends, device),
        to_device(torch.from_numpy(rows), device),
    )


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
        group = parallel_state.get_context_parallel_group() if self.ranks > 1 else None
        if packed_seq_params.parts is None:
            rank = group.rank() if group is not None else 0
            packed_seq_params.parts = attention_parts(packed_seq_params, self.ranks, rank, query.device)
        parts = packed_seq_params.parts
        width, real = len(query), sum(parts.queries)
        if real == 0:
            return query.new_zeros(width, query.shape[1] * value.shape[2])
        if real < width:  # a slice of all tokens would cost a copy of its gradient
            query = query[:real]
            if parts.rows is None:
                key, value = key[:real], value[:real]
        if parts.rows is not None:
            # Queries stay; keys and values are gathered, and their gradients summed in the backward pass.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=2), group=group)
            key, value = both.index_select(0, parts.rows).split([key.shape[2], value.shape[2]], dim=2)
        attend = attend_in_one_call if _takes_all_at_once(query, value) else attend_one_by_one
        out = attend(query, key, value, parts, self.scale)
        if real < width:
            out = torch.cat([out, out.new_zeros(width - real, *out.shape[1:])])
        return out.flatten(1)


def _takes_all_at_once(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether flash attention for sequences of different lengths takes these tensors."""
    width = query.shape[2]
    fits = width % 8 == 0 and value.shape[2] <= width <= _WIDEST_HEAD
    return query.is_cuda and fits and query.dtype in (torch.bfloat16, torch.float16)


def attend_in_one_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: AttentionParts, scale: float | None
) -> torch.Tensor:
    """Attention ``[queries, heads, v]`` of all stretches in one kernel.

    Flash attention aligns its causal mask with the ends of queries and keys (since version 2.1), which is what the
    stretches of context-parallel ranks need.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, seconds that a CPU would waste

    grouped: dict[str, Any] = {}
    if _must_allow_grouped_heads(varlen_attn):
        grouped["enable_gqa"] = query.shape[1] != key.shape[1]
    width = value.shape[2]
    if width < query.shape[2]:
        value = F.pad(value, (0, query.shape[2] - width))
    out: Any = varlen_attn(
        query,
        key,
        value,
        parts.query_ends,
        parts.key_ends,
        max(parts.queries),
        max(parts.keys),
        scale=scale,
        window_size=(-1, 0),
        **grouped,
    )
    return out[..., :width]


@lru_cache(maxsize=1)
def _must_allow_grouped_heads(kernel: Callable[..., Any]) -> bool:
    """Whether PyTorch's kernel refuses fewer heads of keys than of queries unless allowed: 2.13 does, 2.11 does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def attend_one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: AttentionParts, scale: float | None
) -> torch.Tensor:
    """Attention ``[queries, heads, v]``, one call for each stretch."""
    out = []
    pieces = (
        x.transpose(0, 1)[None].split(list(sizes), dim=2)
        for x, sizes in ((query, parts.queries), (key, parts.keys), (value, parts.keys))
    )
    for q, k, v in zip(*pieces, strict=True):
        same = q.shape[2] == k.shape[2]
        mask = None if same else lower_right_mask(q.shape[2], k.shape[2])
        grouped = q.shape[1] != k.shape[1]
        out.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=same, scale=scale, enable_gqa=grouped)
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def lower_right_mask(queries: int, keys: int) -> Any:
    """Return the causal mask of the last ``queries`` of ``keys`` tokens."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, half a second of CPU

    return causal_lower_right(queries, keys)
