"""Rotary embedding of packed sequences without waiting for the device, in the place of Megatron-Core's.

Megatron reads the lengths of the sequences back from the device in each call, twice for each of query and key in every
layer; the host then cannot enqueue work ahead. It also computes sines and cosines in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Angles:
    """Factors of one micro-batch's tokens, kept for its other layers: ``cosine`` and ``sine`` ``[P, 1, rotated]``."""

    freqs: torch.Tensor
    scale: float
    cosine: torch.Tensor
    sine: torch.Tensor


def packed_positions(ends: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Positions within their sequences of a context-parallel rank's tokens, in the layout of `attention.local_parts`.

    Args:
        ends: int ``[N + 1]``, 0 and the end of each sequence, over all ranks; lengths are multiples of 2 × ``ranks``
            with several ranks.
        tokens: number of this rank's tokens, ``ends[-1] / ranks``.

    Returns:
        int64 ``[tokens]``, on the device of ``ends``.
    """
    local = ends.long() // ranks
    index = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(local, index, right=True) - 1
    start = local[sequence]
    offset = index - start
    if ranks == 1:
        return offset
    half = (local[sequence + 1] - start) // 2
    return offset + torch.where(offset < half, rank, 2 * ranks - 2 - rank) * half


def _angles(ends: Any, tokens: int, freqs: torch.Tensor, scale: float, dtype: torch.dtype, group: Any) -> _Angles:
    """Factors for a micro-batch, computed in its first layer: they are kept at the tensor ``ends`` that all layers
    share.
    """
    known: list[_Angles] = ends.__dict__.setdefault("mfleet_angles", [])
    for angles in known:
        if _same(angles.freqs, freqs) and angles.scale == scale and angles.cosine.dtype == dtype:
            return angles
    with torch.no_grad():
        positions = packed_positions(ends, tokens, group.size(), group.rank())
        rows = freqs.flatten(1)
        cosine, sine = ((f(rows) * scale).to(dtype)[positions][:, None] for f in (torch.cos, torch.sin))
    known.append(_Angles(freqs, scale, cosine, sine))
    return known[-1]


def _same(known: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether both are the same values in memory: a recomputed layer is given detached aliases of its inputs."""
    memory = known.untyped_storage()._cdata == given.untyped_storage()._cdata
    return memory and known.storage_offset() == given.storage_offset() and known.shape == given.shape


def patch_packed_rotary(module: Any) -> None:
    """Replace the function of ``rope_utils`` for packed sequences; names of arguments are those of 0.16 and 0.19."""

    def apply_rotary_pos_emb_thd(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
        mla_rotary_interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate ``t`` ``[P, heads, d]`` by ``freqs`` ``[positions, 1, 1, rotated]``, radians."""
        angles = _angles(cu_seqlens, len(t), freqs, mscale, t.dtype, cp_group)
        width = freqs.shape[-1]
        turned, rest = t[..., :width], t[..., width:]
        if multi_latent_attention or mla_rotary_interleaved:
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
        # Megatron's helper takes four dimensions where pairs are interleaved.
        other = module._rotate_half(turned[:, None], rotary_interleaved).squeeze(1)
        turned = turned * angles.cosine + other * angles.sine
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    module._apply_rotary_pos_emb_thd = apply_rotary_pos_emb_thd
