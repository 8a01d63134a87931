"""Log-probs and entropies of a whole vocabulary, forward and backward: chunk sizes, error, and the kernels alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from logprob_memory import OneRank, run

from battery import shapes
from battery.results import Report, Request
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.megatron import logprob, logprob_torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the problem; ``compared`` positions are compared with float32."""

    tokens: int
    vocabulary: int
    hidden: int
    chunks: tuple[int, ...]
    compared: int
    repeats: int


SIZES = {
    "full": Sizes(65536, 151936, 4096, (4096, 1024, 8192, 2048, 16384, 512), 4096, 3),
    "tiny": Sizes(256, 1000, 64, (64, 128), 128, 1),
}
PRODUCTS = 4
"""Matrix products of forward and backward: logits twice, and both gradients."""


def measure(report: Report, request: Request) -> None:
    """Chunks in BF16 first, then float32, the error, the kernels, and plain PyTorch."""
    sizes = SIZES[request.size]
    torch.manual_seed(0)
    report.doing("matrix product")
    peak = shapes.matrix_tflops(request.size)
    report.figures(matrix_tflops=peak)
    problem = Problem(sizes, torch.bfloat16)
    for chunk in sizes.chunks:
        chunk_row(report, problem, chunk)
    rows = report.rows("chunks")
    if rows:
        best = min(rows, key=lambda row: row["ms"])
        report.figures(best_chunk=best["chunk"], head_share=round(best["tflops"] / peak, 4))
    report.doing("error against float32")
    report.figures(**error(problem, sizes.compared))
    kernels(report, problem, sizes)
    plain(report, problem, sizes)
    del problem
    chunk_row(report, Problem(sizes, torch.float32), sizes.chunks[0])


class Problem:
    """Hidden states, output weight and targets, random; the logits have a standard deviation of 2."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        where = device()
        self.dtype = dtype
        self.hidden = torch.randn(sizes.tokens, sizes.hidden, device=where).to(dtype).requires_grad_()
        weight = torch.randn(sizes.vocabulary, sizes.hidden, device=where) * 2 * sizes.hidden**-0.5
        self.weight = weight.to(dtype).requires_grad_()
        self.targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=where)
        self.weight_grad = torch.zeros(weight.shape, device=where)

    def run(self, way: str, tokens: int, chunk: int) -> None:
        """Forward and backward of the first ``tokens``, by our function or by plain PyTorch."""
        hidden = self.hidden.detach()[:tokens].requires_grad_()
        run(way, hidden, self.weight, self.targets[:tokens], self.weight_grad, chunk)


def chunk_row(report: Report, problem: Problem, chunk: int) -> None:
    """Time and memory with one chunk size."""
    tokens, dtype = len(problem.hidden), str(problem.dtype).removeprefix("torch.")
    report.doing(f"{dtype}, chunks of {chunk}")
    repeats = SIZES[report.result.size].repeats

    def both() -> None:
        problem.run("ours", tokens, chunk)

    try:
        peak = shapes.peak_bytes(both)
        seconds = shapes.median_seconds(both, repeats)
    except torch.OutOfMemoryError:
        report.leave_out(f"{dtype}, chunks of {chunk}", "does not fit")
        torch.cuda.empty_cache()
        return
    flops = PRODUCTS * 2 * tokens * problem.weight.numel()
    report.row(
        "chunks",
        dtype=dtype,
        chunk=chunk,
        tokens=tokens,
        ms=shapes.finite(1e3 * seconds),
        tflops=shapes.finite(flops / seconds / 1e12),
        extra_mb=None if peak is None else round(peak / 2**20),
    )


def error(problem: Problem, count: int) -> dict[str, float]:
    """Distance of log-probs, and of the gradient of their sum, from float32 with the same inputs.

    The logits of ours are rounded to BF16, as an engine's are.
    """
    targets, chunk = problem.targets[:count], max(1, count // 4)
    ours = problem.hidden.detach()[:count].requires_grad_()
    alone: Any = OneRank()
    found, _ = logprob.token_logprobs(
        ours, problem.weight, targets, vocab_size=len(problem.weight), group=alone, temperature=1.0, chunk=chunk
    )
    found.sum().backward()
    problem.weight.grad = None
    exact_hidden = ours.detach().float()
    weight = problem.weight.detach().float()
    exact, gradient = torch.empty(count, device=ours.device), torch.empty_like(exact_hidden)
    for start in range(0, count, chunk):
        at = slice(start, start + chunk)
        part = exact_hidden[at].requires_grad_()
        values = (part @ weight.t()).log_softmax(-1).gather(1, targets[at, None])[:, 0]
        values.sum().backward()
        assert part.grad is not None
        exact[at], gradient[at] = values.detach(), part.grad
    distance = (found.detach() - exact).abs()
    assert ours.grad is not None
    relative = (ours.grad.float() - gradient).norm() / gradient.norm()
    return {
        "logprob_error": shapes.finite(distance.mean().item()),
        "logprob_error_max": shapes.finite(distance.max().item()),
        "gradient_error": shapes.finite(relative.item()),
    }


def kernels(report: Report, problem: Problem, sizes: Sizes) -> None:
    """The two kernels alone: bytes of the logits that they read, or read and write, per second."""
    report.doing("kernels alone")
    module: Any = logprob_torch
    if problem.hidden.is_cuda:
        from megatron_fleet.trainer.megatron import logprob_triton as module
    chunk = sizes.chunks[0]
    logits = torch.randn(chunk, sizes.vocabulary, device=problem.hidden.device, dtype=problem.dtype)
    column = problem.targets[:chunk]
    sums = module.row_sums(logits, column, 1.0)
    log_norm, entropy = sums[0] + sums[1].log(), torch.zeros_like(sums[0])
    small = torch.full_like(log_norm, 1e-3)
    nbytes = logits.numel() * logits.element_size()
    seconds = shapes.median_seconds(lambda: module.row_sums(logits, column, 1.0), sizes.repeats)
    report.figures(sums_gb_s=shapes.finite(nbytes / seconds / 1e9))
    # The same memory again and again: its content becomes a gradient's, which takes as long.
    write = shapes.median_seconds(
        lambda: module.to_gradient_(logits, column, 1.0, log_norm, entropy, small, None), sizes.repeats
    )
    report.figures(gradient_gb_s=shapes.finite(2 * nbytes / write / 1e9))


def plain(report: Report, problem: Problem, sizes: Sizes) -> None:
    """Plain PyTorch, with the logits of all positions at once, at half as many positions until they fit."""
    tokens = sizes.tokens
    while tokens >= sizes.compared:
        report.doing(f"plain PyTorch at {tokens} positions")
        try:
            theirs = shapes.median_seconds(partial(problem.run, "plain", tokens, 0), sizes.repeats)
            ours = shapes.median_seconds(partial(problem.run, "ours", tokens, sizes.chunks[0]), sizes.repeats)
        except torch.OutOfMemoryError:
            report.leave_out(f"plain PyTorch at {tokens} positions", "does not fit")
            problem.weight.grad = None
            torch.cuda.empty_cache()
            tokens //= 2
            continue
        report.figures(plain_ratio_time=round(theirs / ours, 3))
        return
