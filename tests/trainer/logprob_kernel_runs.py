"""Run as a program with TRITON_INTERPRET=1: the Triton kernels on a CPU, for test_logprob_kernels.py.

python logprob_kernel_runs.py OUT     OUT: a file of {case: results}, as `run_case` gives them
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from types import ModuleType

import torch

from megatron_fleet.trainer.megatron import logprob


class OneRank:
    """The process group of a single tensor-parallel rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


@dataclass(frozen=True)
class Case:
    """Rows of logits of one rank, and the whole function on hidden states that give them."""

    dtype: torch.dtype
    rows: int
    vocab: int
    scale: float
    entropy_gradient: bool

    def __str__(self):
        return "-".join(str(field) for field in astuple(self)).removeprefix("torch.")


# 4096 logits are a block: less, exactly one, one and a bit, two and a bit.
CASES = [
    Case(dtype, rows, vocab, scale, entropy_gradient)
    for dtype in (torch.float32, torch.bfloat16)
    for rows, vocab, scale, entropy_gradient in [
        (1, 1, 1.0, True),
        (7, 50, 1.0, False),
        (3, 4096, 0.7, True),
        (5, 4099, 1.6, False),
        (4, 8201, 1.0, True),
    ]
]


def run_case(case: Case, kernels: ModuleType, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Both row functions, and `token_logprobs` with its gradients, three rows of padding included."""
    generator = torch.Generator().manual_seed(case.vocab)
    logits = (3 * torch.randn(case.rows, case.vocab, generator=generator)).to(device, case.dtype)
    column = torch.randint(0, case.vocab, (case.rows,), generator=generator)
    # The first and the last rows' tokens are rows of other ranks.
    column[0], column[-1] = -1, case.vocab
    column = column.to(device)
    given = torch.randn(2, case.rows, generator=generator).to(device)
    log_norm = (case.scale * logits.float()).logsumexp(-1)
    gradient = logits.clone()
    of_entropy = given[1] if case.entropy_gradient else None
    kernels.to_gradient_(gradient, column, case.scale, log_norm, given[1] ** 2, given[0], of_entropy)
    results = {"sums": kernels.row_sums(logits, column, case.scale), "gradient": gradient}

    # Eighths and quarters: their products add up without rounding, so that every device has the same logits.
    hidden = torch.randint(-8, 9, (case.rows, 8), generator=generator).to(device, case.dtype).div_(8).requires_grad_()
    weight = torch.randint(-8, 9, (case.vocab + 3, 8), generator=generator).to(device, case.dtype).div_(4)
    weight.requires_grad_()
    targets = torch.randint(0, case.vocab, (case.rows,), generator=generator).to(device)
    results["logprob"], results["entropy"] = logprob.token_logprobs(
        hidden, weight, targets, vocab_size=case.vocab, group=OneRank(), temperature=1 / case.scale, chunk=3
    )
    total = results["logprob"] @ given[0]
    if case.entropy_gradient:
        total = total + results["entropy"] @ given[1]
    results["of_hidden"], results["of_weight"] = torch.autograd.grad(total, (hidden, weight))
    return {name: value.detach().cpu() for name, value in results.items()}


if __name__ == "__main__":
    from megatron_fleet.trainer.megatron import logprob_triton

    logprob._kernels = lambda _: logprob_triton
    torch.save({str(case): run_case(case, logprob_triton) for case in CASES}, sys.argv[1])
