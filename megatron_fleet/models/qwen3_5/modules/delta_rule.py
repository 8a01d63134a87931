"""The gated delta rule and its causal convolution over one packed micro-batch: PyTorch's operators, or fla's kernels.

Convolution and state begin anew with every sequence. fla is flash-linear-attention (Triton, NVIDIA GPUs alone).
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_fleet.platform.device import to_device

CHUNK = 64
"""Tokens per block of the chunked form."""
WRONG_TRITON = (3, 4), (3, 7, 1)
"""First release with wrong gradients, and the first one without them again."""
L2_EPS = 1e-6
"""Added to the sum of squares of a query or key before the root, as in transformers, vLLM and fla."""


class Lengths(tuple[int, ...]):
    """Tokens of each sequence of a micro-batch, with their boundaries in the form that fla takes."""

    def boundaries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative lengths, int64, on the device of ``x`` and on the host; tokens of ``x`` after the sequences are
        one more. Always the same tensors: fla remembers by their identity what it derives from them.
        """
        known: tuple[torch.Tensor, torch.Tensor] | None = self.__dict__.get("known")
        if known is None:
            rest = x.shape[0] - sum(self)
            host = torch.tensor([0, *self, *([rest] if rest else [])]).cumsum(0)
            known = self.__dict__["known"] = to_device(host, x.device), host
        return known


class Kernels(NamedTuple):
    """Operators over a micro-batch of ``T`` tokens, in sequences of the given lengths (their sum may be less than T).

    Attributes:
        convolve: SiLU of the causal depthwise convolution of ``[T, C]`` with ``[C, 1, width]``: ``[T, C]``.
        rule: output of `gated_delta_rule` for each sequence.
    """

    convolve: Callable[[torch.Tensor, torch.Tensor, Lengths], torch.Tensor]
    rule: Callable[..., torch.Tensor]


def kernels() -> Kernels:
    """Choose the operators of this host: fla's on CUDA where they can be used, else PyTorch's."""
    if torch.cuda.is_available() and fla_fault() is None:
        return Kernels(_fla_convolve, _fla_rule)
    return Kernels(convolve, packed_rule)


def is_slow() -> bool:
    """Whether this host has a GPU and computes with PyTorch's operators on it."""
    return torch.cuda.is_available() and kernels().rule is packed_rule


@functools.cache
def fla_fault() -> str | None:
    """Reason why fla's kernels cannot be used on this host's GPUs, with the fix; ``None`` if they can."""
    if importlib.util.find_spec("fla") is None:
        return "install flash-linear-attention, as requirements/engine-gpu.txt names it"
    triton = metadata.version("triton")
    hopper = torch.cuda.get_device_capability()[0] == 9
    if hopper and WRONG_TRITON[0] <= tuple(map(int, re.findall(r"\d+", triton)[:3])) < WRONG_TRITON[1]:
        # fla refuses it in the backward pass (fla/ops/common/chunk_o.py of 0.6.0).
        return (
            f"Triton {triton} computes wrong gradients of fla's kernels on Hopper GPUs: install Triton 3.7.1 or newer"
        )
    return None


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Scale the last axis to length 1, in float32 (float64 if given); the dtype is preserved."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def convolve(x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """See `Kernels`; tokens after the sequences get zeros."""
    rest = x.shape[0] - sum(lengths)
    window = x.new_zeros(x.shape[1], weight.shape[-1] - 1)
    out = [convolve_on(part, weight, window)[0] for part in x.split([*lengths, rest])[:-1]]
    return torch.cat([*out, x.new_zeros(rest, x.shape[1])])


def convolve_on(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve tokens of one sequence, see `Kernels`.

    Args:
        x: ``[T, C]``.
        weight: ``[C, 1, width]``.
        window: ``[C, width − 1]``, the inputs before them; zeros at the start of a sequence.

    Returns:
        Output ``[T, C]`` and the window of the next token.
    """
    inputs = torch.cat([window, x.t()], 1)
    return F.silu(F.conv1d(inputs[None], weight, groups=x.shape[1])[0].t()), inputs[:, x.shape[0] :]


def packed_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """`gated_delta_rule` of each sequence, ``[T, heads, V]``; tokens after the sequences get zeros.

    Args:
        q, k: ``[T, groups, K]``; each group's key is that of ``heads / groups`` heads that follow each other.
    """
    shared = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    out, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        out.append(gated_delta_rule(q[here], k[here], v[here], g[here], beta[here])[0])
        start += length
    out.append(v.new_zeros(v.shape[0] - start, *v.shape[1:]))
    return torch.cat(out)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule of one sequence (Yang et al. 2025, arXiv:2412.06464, eq. 10), in its chunked form (section 3.3).

    For each token: ``S ← e^g (S − β k (kᵀ S)) + β k vᵀ``, ``o = Sᵀ q / √K``.

    Decays within a chunk are sums over the tokens between; differences of prefix sums would cancel, which costs a
    decimal digit in float32.

    Args:
        q, k: ``[T, heads, K]``, of length 1 (`unit_length`).
        v: ``[T, heads, V]``.
        g, beta: ``[T, heads]``: logarithm of the decay, at most 0; strength of the write.
        state: S before the first token, ``[heads, K, V]``, in the dtype of the computation; ``None``: zeros.

    Returns:
        ``[T, heads, V]``, computed in float32 (float64 if given) and cast to ``v``'s dtype, and S after the last token.
    """
    tokens, dtype = v.shape[0], v.dtype
    q, k, v, g, beta = map(_wide, (q * q.shape[-1] ** -0.5, k, v, g, beta))
    size = min(CHUNK, tokens)
    chunks = -(-tokens // size)

    def cut(x: torch.Tensor) -> torch.Tensor:
        # Added tokens have k = g = beta = 0, which leaves the state as it is. [T, heads, …] → [heads, chunks, size, …]
        x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, chunks * size - tokens))
        return x.view(chunks, size, *x.shape[1:]).movedim(2, 0)

    q, k, v, g, beta = map(cut, (q, k, v, g, beta))
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    # Element (i, j): the sum of g over the tokens after j up to i.
    between = g[..., None].expand(*g.shape, size).masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    decay = between.masked_fill(~lower, float("-inf")).exp()
    since_start = g.cumsum(-1).exp()[..., None]
    written = k * beta[..., None]
    # (1 + A) x = y with A_ij = β_i k_i·k_j e^{g between}: the diagonal of ``system`` is not used.
    system = written @ k.transpose(-1, -2) * decay
    both = torch.cat([v * beta[..., None], written * since_start], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.transpose(-1, -2) * decay
    from_start, to_end = q * since_start, (k * decay[..., -1, :, None]).transpose(-1, -2)
    whole = since_start[..., -1, :, None]
    if state is None:
        state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
    out = []
    for i in range(chunks):
        new = values[:, i] - keys[:, i] @ state
        out.append(from_start[:, i] @ state + inside[:, i] @ new)
        state = state * whole[:, i] + to_end[:, i] @ new
    return torch.stack(out, 1).flatten(1, 2)[:, :tokens].transpose(0, 1).to(dtype), state


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _fla_convolve(x: torch.Tensor, weight: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    ends, on_host = lengths.boundaries(x)
    out: Any = causal_conv1d(x[None], weight[:, 0], activation="silu", cu_seqlens=ends, cu_seqlens_cpu=on_host)
    return out[0][0]  # output and final state, of a batch of one


def _fla_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, lengths: Lengths
) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch, (ends, on_host) = (x[None].contiguous() for x in (q, k, v)), lengths.boundaries(q)
    out: Any = chunk_gated_delta_rule(*batch, g=g[None], beta=beta[None], cu_seqlens=ends, cu_seqlens_cpu=on_host)
    return out[0][0]
