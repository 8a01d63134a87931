"""Log-probability and entropy of chosen tokens straight from hidden states, over a vocabulary split across ranks.

The logits of all positions never exist: a chunk of positions at a time, forward and, computed again, backward. The
sharded soft-max follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053 §3): maximum and sums are reduced, logits
are not gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _TokenLogprob(torch.autograd.Function):
    """See `token_logprobs`; the arguments are its own, the weight already cut to its real rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup,
        first_row: int,
        scale: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        logprob = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, log_norm = torch.empty_like(logprob), torch.empty_like(logprob)
        for at in _chunks(len(hidden), chunk):
            z = _logits(hidden[at], weight, scale)
            top = z.amax(-1)
            if group.size() > 1:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            z -= top[:, None]
            here, column = _local(targets[at], first_row, len(weight))
            chosen = torch.where(here, z.gather(1, column)[:, 0], 0.0)
            e = z.exp()
            sums = torch.stack([e.sum(-1), e.mul_(z).sum(-1), chosen])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            # With z shifted by its maximum: log Z = log Σe, log p = z_t − log Z, H = log Z − Σ e·z / Σ e.
            log_z = sums[0].log()
            log_norm[at] = top + log_z
            logprob[at] = sums[2] - log_z
            entropy[at] = log_z - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.first_row, ctx.scale, ctx.chunk = first_row, scale, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in _chunks(len(hidden), ctx.chunk):
            logp = _logits(hidden[at], weight, ctx.scale).sub_(log_norm[at, None])
            p = logp.exp()
            here, column = _local(targets[at], ctx.first_row, len(weight))
            factor = torch.zeros_like(log_norm[at]) if of_logprob is None else -of_logprob[at]
            if of_entropy is None:
                d = p.mul_(factor[:, None])
            else:
                # ∂log p_t/∂z = 1[t] − p and ∂H/∂z = −p·(log p + H).
                d = p.mul_(factor[:, None] - of_entropy[at, None] * (logp + entropy[at, None]))
            d.scatter_add_(1, column, torch.where(here, -factor, 0.0)[:, None])
            d = d.mul_(ctx.scale).to(hidden.dtype)
            torch.mm(d, weight, out=grad_hidden[at])
            if weight.dtype == torch.float32:
                grad_weight.addmm_(d.t(), hidden[at])
            else:
                grad_weight += d.t() @ hidden[at]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    z = (hidden @ weight.t()).float()
    return z if scale == 1.0 else z.mul_(scale)


def _local(targets: torch.Tensor, first_row: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each target is one of this rank's rows ``[C]``, and its column, clamped into range ``[C, 1]``."""
    column = targets - first_row
    return (column >= 0) & (column < rows), column.clamp(0, rows - 1)[:, None]


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden · weightᵀ / temperature)[targets] and the entropy of that distribution.

    Args:
        hidden: ``[A, h]``, the same on every rank of ``group``. Its gradient is this rank's part: the caller's mapping
            (gather from the sequence-parallel region) sums over ranks.
        weight: ``[rows, h]``, this rank's rows of the output weight; rows of rank r begin at r · rows.
        targets: int64 ``[A]``, global token ids.
        vocab_size: rows at or beyond it are padding; they are no part of the distribution and get no gradient.
        group: tensor-parallel group.
        temperature: above 0; logits are divided by it, as the sampler did.
        chunk: positions whose logits exist at one time.

    Returns:
        Log-probs and entropies, float32 ``[A]``, equal on every rank of ``group``, both differentiable.
    """
    first_row = group.rank() * len(weight)
    real = weight[: max(0, min(len(weight), vocab_size - first_row))]
    return _TokenLogprob.apply(hidden, real, targets, group, first_row, 1.0 / temperature, chunk)
