"""Log-probability and entropy of chosen tokens directly from hidden states, over a vocabulary split across ranks.

The logits of all positions never exist at once: they are computed for one chunk of positions at a time, in the model's
precision, in the forward pass and again in the backward pass, where their gradient overwrites them. The sharded
soft-max follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053 §3): maximum and sums are reduced, logits are not
gathered.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from megatron_fleet.platform.communicator import ProcessGroup, TorchCommunicator
from megatron_fleet.trainer.megatron import logprob_torch

WEIGHT_ROWS = 8192
"""Rows of a low-precision weight gradient computed at a time where products cannot be accumulated in float32."""


class _TokenLogprob(torch.autograd.Function):
    """See `token_logprobs`; the arguments are the same, with the weight already cut to its unpadded rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        group: ProcessGroup,
        first_row: int,
        scale: float,
        chunk: int,
        weight_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        column = targets - first_row
        sums = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
        sums[0] = torch.finfo(torch.float32).min
        kernels, buffer = _kernels(hidden), _buffer(hidden, weight, chunk)
        for at in _chunks(hidden, weight, chunk):
            logits = torch.mm(hidden[at], weight.t(), out=buffer[: at.stop - at.start])
            sums[:, at] = kernels.row_sums(logits, column[at], scale)
        logprob, log_norm, entropy = _combine(sums, group)
        ctx.save_for_backward(hidden, weight, column, log_norm, entropy)
        ctx.scale, ctx.chunk, ctx.weight_grad = scale, chunk, weight_grad
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, column, log_norm, entropy = ctx.saved_tensors
        of_logprob, of_entropy = (None if g is None else g.contiguous() for g in grads)
        if of_logprob is None:
            of_logprob = torch.zeros_like(log_norm)
        grad_hidden = torch.zeros_like(hidden)
        trained, weight_grad = ctx.needs_input_grad[1], ctx.weight_grad
        if trained and weight_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        kernels, buffer = _kernels(hidden), _buffer(hidden, weight, ctx.chunk)
        for at in _chunks(hidden, weight, ctx.chunk):
            d = torch.mm(hidden[at], weight.t(), out=buffer[: at.stop - at.start])
            rows = log_norm[at], entropy[at], of_logprob[at], None if of_entropy is None else of_entropy[at]
            kernels.to_gradient_(d, column[at], ctx.scale, *rows)
            torch.mm(d, weight, out=grad_hidden[at])
            if trained:
                _add_product(weight_grad, d, hidden[at])
        returned = weight_grad.to(weight.dtype) if trained and ctx.weight_grad is None else None
        return grad_hidden, returned, None, None, None, None, None, None


def _kernels(tensor: torch.Tensor) -> ModuleType:
    if tensor.is_cuda and find_spec("triton"):
        from megatron_fleet.trainer.megatron import logprob_triton

        return logprob_triton
    return logprob_torch


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, size: int) -> list[slice]:
    n = len(hidden) if len(weight) else 0
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _buffer(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
    """Buffer for the logits of a chunk, shared by all of them: fresh pages cost time on a CPU."""
    return hidden.new_empty(min(chunk, len(hidden)), len(weight))


def _combine(sums: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, log Z and entropies ``[A]`` from every rank's `row_sums` ``[4, A]``, which are overwritten."""
    top = sums[0]
    if group.size() > 1:
        ranks, own = TorchCommunicator(group), top.clone()
        ranks.max_(top)
        fall = own.sub_(top)
        sums[2] += fall * sums[1]
        sums[1:3] *= fall.exp_()
        ranks.sum_(sums[1:])
    # For z shifted by its maximum: log Z = log Σe, log p = z − log Z, H = log Z − Σ e·z / Σ e.
    log_z = sums[1].log()
    return sums[3] - top - log_z, top + log_z, log_z - sums[2] / sums[1]


def _add_product(total: torch.Tensor, d: torch.Tensor, hidden: torch.Tensor) -> None:
    """``total`` [V, h] += dᵀ · hidden, of ``d`` [C, V] and ``hidden`` [C, h]."""
    if total.dtype == hidden.dtype:
        total.addmm_(d.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, d.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        for i in range(0, len(total), WEIGHT_ROWS):
            total[i : i + WEIGHT_ROWS] += d[:, i : i + WEIGHT_ROWS].t() @ hidden


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    group: ProcessGroup,
    temperature: float,
    chunk: int,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden · weightᵀ / temperature)[targets] and the entropy of that distribution.

    Logits are rounded to the dtype of ``hidden``, as an engine's are; everything after them is float32.

    Args:
        hidden: ``[A, h]``, the same on every rank of ``group``. Its gradient is this rank's part: the caller's mapping
            (gather from the sequence-parallel region) sums over ranks.
        weight: ``[rows, h]``, this rank's rows of the output weight; rows of rank r begin at r · rows. No gradient is
            computed for frozen weights.
        targets: int64 ``[A]``, global token ids.
        vocab_size: rows at or beyond it are padding; they are excluded from the distribution and get no gradient.
        group: tensor-parallel group.
        temperature: above 0; logits are divided by it, as the sampler did.
        chunk: positions whose logits exist at one time.
        weight_grad: ``[rows, h]``, e.g. Megatron's float32 ``main_grad``. The weight's gradient is added to it, and
            autograd gets none, which saves two copies as large as the weight.

    Returns:
        Log-probs and entropies, float32 ``[A]``, equal on every rank of ``group``, both differentiable.
    """
    first_row = group.rank() * len(weight)
    real = max(0, min(len(weight), vocab_size - first_row))
    into = None if weight_grad is None else weight_grad[:real]
    return _TokenLogprob.apply(hidden, weight[:real], targets, group, first_row, 1.0 / temperature, chunk, into)
