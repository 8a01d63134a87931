"""Soft-max sums and gradients of rows of logits, in place, with PyTorch's own operations.

Works on a block of rows at a time: its float32 temporaries then stay in the processor's cache, which takes the least
memory and, on a CPU, the least time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 20
"""Number of logits in a block."""


def row_sums(logits: torch.Tensor, column: torch.Tensor, scale: float) -> torch.Tensor:
    """Per-row sums of a soft-max over z = scale · logits; float32 logits are overwritten.

    Args:
        logits: ``[C, V]``, this rank's columns.
        column: int64 ``[C]``, each row's chosen column; outside ``[0, V)`` where another rank has it.

    Returns:
        float32 ``[4, C]``: m = max z, Σ exp(z − m), Σ exp(z − m) · (z − m), and z at the chosen column or 0.
    """
    sums = logits.new_empty(4, len(logits), dtype=torch.float32)
    for at in _blocks(logits):
        z = logits[at].float().mul_(scale)
        here, index = _inside(column[at], z)
        chosen = torch.where(here, z.gather(1, index[:, None])[:, 0], 0.0)
        top = z.amax(-1)
        e = z.sub_(top[:, None]).exp()
        sums[:, at] = torch.stack([top, e.sum(-1), e.mul_(z).sum(-1), chosen])
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
    """Replace logits by the gradient of Σ of_logprob · log-prob + of_entropy · entropy.

    With log p = z − log Z: ∂ log p[t] / ∂z = 1[t] − p and ∂H / ∂z = −p · (log p + H).

    Args:
        logits, column, scale: as in `row_sums`.
        log_norm, entropy: log Z and H, float32 ``[C]``.
        of_logprob, of_entropy: gradients, float32 ``[C]``.
    """
    for at in _blocks(logits):
        logp = logits[at].float().mul_(scale).sub_(log_norm[at, None])
        chosen = of_logprob[at] * scale
        factor = -chosen[:, None]
        if of_entropy is not None:
            factor = factor - (of_entropy[at] * scale)[:, None] * (logp + entropy[at, None])
        d = logp.exp_().mul_(factor)
        here, index = _inside(column[at], d)
        d.scatter_add_(1, index[:, None], torch.where(here, chosen, 0.0)[:, None])
        if d.dtype != logits.dtype:
            logits[at] = d


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // logits.shape[1])
    return (slice(i, i + rows) for i in range(0, len(logits), rows))


def _inside(column: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each column is inside z, and the columns clamped into its range."""
    last = z.shape[1] - 1
    return (column >= 0) & (column <= last), column.clamp(0, last)
