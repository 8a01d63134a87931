"""Triton kernels for `logprob_torch`'s two functions: every logit is read once, and in the gradient written once.

The sums use the online soft-max (Milakov and Gimelshein 2018, arXiv:1805.02867), extended by the sum for the entropy.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096
# Without fused multiply-add, results are rounded as `logprob_torch`'s are.
OPTIONS = MappingProxyType({"num_warps": 8, "enable_fp_fusion": False})
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Substitute for minus infinity, whose product with zero would be NaN."""


def row_sums(logits: torch.Tensor, column: torch.Tensor, scale: float) -> torch.Tensor:
    """See `logprob_torch.row_sums`; logits stay as they are."""
    count, width = logits.shape
    sums = logits.new_empty(4, count, dtype=torch.float32)
    _row_sums[(count,)](logits, column, sums, count, width, logits.stride(0), scale, BLOCK=_block(width), **OPTIONS)
    return sums


def to_gradient_(
    logits: torch.Tensor,
    column: torch.Tensor,
    scale: float,
    log_norm: torch.Tensor,
    entropy: torch.Tensor,
    of_logprob: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> None:
    count, width = logits.shape
    block = _block(width)
    _to_gradient[(count, triton.cdiv(width, block))](
        logits,
        column,
        log_norm,
        entropy,
        of_logprob,
        of_entropy,
        width,
        logits.stride(0),
        scale,
        BLOCK=block,
        **OPTIONS,
    )


def _block(width: int) -> int:
    return min(MAX_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _row_sums(logits, column, sums, count, width, stride, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    # int64: a large chunk has more than 2³¹ logits.
    z_row = logits + row.to(tl.int64) * stride
    top, total, weighted = tl.full((), LOWEST, tl.float32), 0.0, 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < width
        z = tl.where(real, tl.load(z_row + at, mask=real, other=0.0).to(tl.float32) * scale, LOWEST)
        higher = tl.maximum(top, tl.max(z, 0))
        fall, z = top - higher, z - higher
        e = tl.where(real, tl.exp(z), 0.0)
        # Older terms e·z become e'·(z + fall) with e' = e·exp(fall).
        weighted = tl.exp(fall) * (weighted + fall * total) + tl.sum(tl.where(real, e * z, 0.0), 0)
        total = tl.exp(fall) * total + tl.sum(e, 0)
        top = higher
    chosen = tl.load(column + row)
    here = (chosen >= 0) & (chosen < width)
    tl.store(sums + row, top)
    tl.store(sums + count + row, total)
    tl.store(sums + 2 * count + row, weighted)
    tl.store(sums + 3 * count + row, tl.load(z_row + chosen, mask=here, other=0.0).to(tl.float32) * scale)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, column, log_norm, entropy, of_logprob, of_entropy, width, stride, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    here = logits + row.to(tl.int64) * stride + at
    logp = tl.load(here, mask=real, other=0.0).to(tl.float32) * scale - tl.load(log_norm + row)
    g = tl.load(of_logprob + row)
    factor = -g
    if of_entropy is not None:
        factor -= tl.load(of_entropy + row) * (logp + tl.load(entropy + row))
    d = tl.exp(logp) * factor + tl.where(at == tl.load(column + row), g, 0.0)
    tl.store(here, (d * scale).to(logits.dtype.element_ty), mask=real)
