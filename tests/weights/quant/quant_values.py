"""BF16 bits and the formats' definitions spelled out in torch, for the tests of quantised weights."""

import numpy as np
import torch
from hypothesis import strategies as st

GROUP = 32


def bits(values):
    """float32 → BF16 bits (uint16), rounded by torch."""
    return torch.as_tensor(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def floats(words):
    """BF16 bits → float32."""
    return (np.asarray(words, np.uint16).astype(np.uint32) << 16).view(np.float32)


def tensor(words):
    return torch.from_numpy(np.ascontiguousarray(words)).view(torch.bfloat16)


def words_of(bf16_tensor):
    return bf16_tensor.contiguous().view(torch.uint16).numpy()


def same(a, b):
    """Equal BF16 bits, or NaN on both sides."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(((a == b) | (np.isnan(floats(a)) & np.isnan(floats(b)))).all())


def pack(codes):
    """Integers -8..7 ``[rows, cols]`` → int32 ``[rows, cols / 8]``, shift by shift as the format is defined."""
    nibbles = (np.asarray(codes, np.int64) + 8).reshape(len(codes), -1, 8)
    return sum(nibbles[..., i] << (4 * i) for i in range(8)).astype(np.uint32).view(np.int32)


def int4_weights(codes, scales):
    """The definition: BF16 bits of q * scale, from codes ``[rows, cols]`` and BF16 bits ``[rows, cols / 32]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bits(np.asarray(codes, np.float32) * floats(np.asarray(scales)).repeat(GROUP, -1))


def fp8_products(codes, scales):
    """The definition, unrounded: float32 of codes ``[rows, cols]`` and float32 scales per 128 by 128 block."""
    values = torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).float()
    per_element = torch.from_numpy(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * per_element[: codes.shape[0], : codes.shape[1]]


def kimi_like(rule, rows=64, cols=1024, seed=0):
    """Codes and scales as a quantiser with scale = rule(absmax) leaves them."""
    weights = (np.random.default_rng(seed).standard_normal((rows, cols)) * 0.02).astype(np.float32)
    scales = bits(rule(np.abs(weights).reshape(rows, -1, GROUP).max(-1)))
    codes = np.clip(np.rint(weights / floats(scales).repeat(GROUP, -1)), -8, 7)
    return codes.astype(np.int64), scales


positive_bf16 = st.integers(1, 0x7F7F)
codes_of_a_group = st.one_of(
    st.lists(st.integers(-8, 7), min_size=GROUP, max_size=GROUP),
    # Few distinct codes: groups that several scales describe.
    st.lists(st.integers(-8, 7), min_size=1, max_size=3).flatmap(
        lambda some: st.lists(st.sampled_from([0, *some]), min_size=GROUP, max_size=GROUP)
    ),
)
