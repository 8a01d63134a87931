"""``fp8.py`` and ``int4.py`` for torch tensors on any device, bit-identical except for a NaN's sign.

BF16 is ``torch.bfloat16``, E4M3 codes are ``torch.float8_e4m3fn``, the rest is the same. Temporaries take up to 4 bytes
per weight (several times that in ``int4_choose_scales``), so process large tensors in slices.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128
E4M3_MAX = 448.0
GROUP = 32


def fp8_dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    first_row: int = 0,
    first_col: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``fp8.dequantize``: a slice ``[rows, cols]`` of a weight, ``scales`` float32 of the whole weight."""
    values = codes.float()
    for part, scale in _by_block(values, scales, first_row, first_col):
        part.mul_(scale)
    return values.to(dtype)


def fp8_quantize(
    weights: torch.Tensor, scales: torch.Tensor, *, first_row: int = 0, first_col: int = 0
) -> torch.Tensor:
    """``fp8.quantize``: BF16 ``[rows, cols]`` to float8_e4m3fn, saturating."""
    values = weights.float()
    for part, scale in _by_block(values, scales, first_row, first_col):
        part.div_(_divisors(scale))
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_block_scales(weights: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """``fp8.block_scales``: float32 ``[row blocks, column blocks]``."""
    absmax = _blocks(weights.abs()).amax((1, 3)).float()
    scales = _divided(absmax, E4M3_MAX)
    if power_of_two:
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    scales = torch.where(absmax == 0, 1.0, scales)
    return torch.where(absmax.isfinite(), scales, torch.nan)


def fp8_choose_scales(
    weights: torch.Tensor, hint: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fp8.choose_scales``: the scales, and which blocks they represent exactly."""
    again = fp8_dequantize(fp8_quantize(weights, hint), hint)
    changed = (again.view(torch.int16) != weights.view(torch.int16)) & ~(again.isnan() & weights.isnan())
    exact = ~_blocks(changed).any(3).any(1)
    return torch.where(exact, hint, fp8_block_scales(weights, power_of_two=power_of_two)), exact


def cast_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``floats.cast_up``: positive float32 scales to the smallest values of ``dtype`` that are not below them."""
    near = scales.to(dtype)
    if dtype == torch.float32:
        return near
    return torch.where(near.float() < scales, (near.view(torch.int16) + 1).view(dtype), near)


def int4_dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``int4.dequantize``: packed int32 ``[rows, cols / 8]``, scales BF16 ``[rows, cols / 32]``."""
    codes = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).view(*scales.shape, GROUP)
    # A product of two BF16 numbers is computed in float32 and rounded once.
    return (nibbles.to(torch.bfloat16) - 8).mul_(scales[..., None]).flatten(1)


def int4_quantize(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``int4.quantize``: BF16 ``[rows, cols]`` to packed int32 ``[rows, cols / 8]``."""
    codes = (_nearest_codes(_groups(weights), scales) + 8).to(torch.uint8).flatten(1)
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).view(torch.int32)


def int4_group_scales(weights: torch.Tensor) -> torch.Tensor:
    """``int4.group_scales``: BF16 ``[rows, cols / 32]``."""
    return _rule(_groups(weights).abs().amax(-1))


def int4_choose_scales(weights: torch.Tensor, hint: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``int4.choose_scales``: the scales, and which groups they represent exactly."""
    groups = _groups(weights).flatten(0, 1)
    absmax = groups.abs().amax(-1)
    scales = _rule(absmax)
    exact = absmax == 0
    if hint is not None:
        held = _hold(groups, hint.flatten())
        scales = torch.where(held, hint.flatten(), scales)
        exact |= held
    for greatest in (7, 8, 6, 5, 4, 3, 2, 1):
        left = (~exact).nonzero()[:, 0]
        quotients = groups[left].float() / absmax[left, None].float() * greatest
        # The bound of the kernel's _possible_greatest: a cheap filter before three exact checks.
        left = left[((quotients - quotients.round()).abs() <= 0.0635).all(-1)]
        near = _divided(absmax[left].float(), greatest).to(torch.bfloat16).view(torch.int16)
        for step in (0, 1, -1):
            scale = (near + step).view(torch.bfloat16)
            held = (scale > 0) & _hold(groups[left], scale) & ~exact[left]
            scales[left[held]] = scale[held]
            exact[left[held]] = True
    shape = weights.shape[0], weights.shape[1] // GROUP
    return scales.view(shape), exact.view(shape)


def _by_block(
    values: torch.Tensor, scales: torch.Tensor, first_row: int, first_col: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views ``[rows, blocks, width]`` that make up ``values``, each with its scales ``[rows, blocks, 1]``.

    At most three: the rest of a block, whole blocks, the beginning of a block.
    """
    rows, cols = values.shape
    per_row = scales[torch.arange(first_row, first_row + rows, device=scales.device) // BLOCK]
    whole = min(cols, -first_col % BLOCK)
    rest = whole + (cols - whole) // BLOCK * BLOCK
    parts = []
    for start, end in ((0, whole), (whole, rest), (rest, cols)):
        if start < end:
            part = values[:, start:end].unflatten(1, (-1, min(BLOCK, end - start)))
            block = (first_col + start) // BLOCK
            parts.append((part, per_row[:, block : block + part.shape[1], None]))
    return parts


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """``[row blocks, BLOCK, column blocks, BLOCK]``, padded with zeros."""
    rows, cols = values.shape
    return pad(values, (0, -cols % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _groups(weights: torch.Tensor) -> torch.Tensor:
    return weights.unflatten(1, (-1, GROUP))


def _divided(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """``values / divisor``, rounded once: on a GPU PyTorch multiplies by the reciprocal of a Python number."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _nearest_codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 integers in -8..7 of groups ``[..., GROUP]`` with scales ``[...]``."""
    quotients = groups.float().div_(_divisors(scales.float())[..., None])
    return quotients.nan_to_num_(0.0, torch.inf, -torch.inf).clamp_(-8, 7).round_()


def _hold(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Whether quantising groups ``[n, GROUP]`` with their scales and back changes no value: bool ``[n]``."""
    again = _nearest_codes(groups, scales).mul_(scales.float()[:, None]).to(torch.bfloat16)
    return (again == groups).all(-1)


def _rule(absmax: torch.Tensor) -> torch.Tensor:
    smallest = torch.ones((), dtype=torch.int16, device=absmax.device).view(torch.bfloat16)
    scales = _divided(absmax.float(), 7).to(torch.bfloat16)
    scales = torch.where(scales == 0, smallest, scales)
    scales = torch.where(absmax == 0, 1.0, scales)
    return torch.where(absmax.isfinite(), scales, torch.nan)
