"""Extra memory and time of log-probs with gradients, against whole logits. Prints one line of JSON.

The reference is the plain way: all logits, float32 log-softmax, gather, autograd; its entropy is a metric, outside the
graph. Both ways begin with hidden states and the output weight and end with the gradient of the first, and that of the
second added to a float32 buffer, as in Megatron.

``extra_mb`` is the peak beyond what existed before: on a GPU of PyTorch's allocator, on a CPU (Linux with glibc) of the
resident set of a process made for this one measurement, VmHWM set back after a small warm-up. ``at_65536_gb`` is a
straight line through the token counts, continued. ``seconds`` are those of the first token count, the fastest of the
repeats, in which the ways alternate: on a GPU by the clock, on a CPU processor time, so that a busy machine disturbs it
less. ``--tensor 8`` measures one rank's share of the vocabulary; its two small all-reduces are left out.

    python benchmarks/logprob_memory.py [--tokens 1024 2048 4096] [--hidden 256] [--dtype bfloat16] [--tensor 1]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measured import stamp

from megatron_fleet.trainer.megatron.logprob import token_logprobs

WAYS = ("ours", "plain")
GOAL_TOKENS = 65536


class OneRank:
    """The process group of a single tensor-parallel rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def run(
    way: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weight_grad: torch.Tensor, chunk: int
) -> None:
    """Forward and backward, the gradient of the weight added to ``weight_grad``."""
    if way == "ours":
        logprob, _ = token_logprobs(
            hidden,
            weight,
            targets,
            vocab_size=len(weight),
            group=OneRank(),  # type: ignore[arg-type]
            temperature=1.0,
            chunk=chunk,
            weight_grad=weight_grad,
        )
    else:
        logp = (hidden @ weight.t()).float().log_softmax(-1)
        logprob = logp.gather(1, targets[:, None])[:, 0]
        with torch.no_grad():
            (logp.exp() * logp).sum(-1).neg_()
        del logp
    logprob.sum().backward()
    if weight.grad is not None:
        weight_grad += weight.grad
    hidden.grad = weight.grad = None


def resident_mb(field: str) -> float:
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition(f"{field}:")[2].split()[0]) / 1024


class Problem:
    """Hidden states, output weight, tokens and a gradient buffer, made from nothing but the arguments."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype, rows = getattr(torch, args.dtype), -(-args.vocab // args.tensor)
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        # Standard deviation 2 of the logits.
        weight = (randn(rows, args.hidden) * 2 * args.hidden**-0.5).to(self.device, dtype)
        self.hidden = randn(tokens, args.hidden).to(self.device, dtype).requires_grad_()
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(0, rows, (tokens,), generator=generator).to(self.device)
        self.weight_grad = torch.zeros(weight.shape, device=self.device)
        self.chunk = args.chunk
        for way in WAYS:
            self.run(way, 16)

    def run(self, way: str, tokens: int) -> None:
        """Forward and backward of the first ``tokens``."""
        hidden = self.hidden.detach()[:tokens].requires_grad_()
        run(way, hidden, self.weight, self.targets[:tokens], self.weight_grad, self.chunk)
        if self.device == "cuda":
            torch.cuda.synchronize()


def extra_mb(problem: Problem, way: str) -> float | None:
    """Peak memory of one run in this process; ``None`` where it does not fit."""
    cuda = problem.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        # What the allocator kept would be used again without growing.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = resident_mb("VmRSS")
    try:
        problem.run(way, len(problem.hidden))
    except torch.OutOfMemoryError:
        return None
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else resident_mb("VmHWM")
    return round(peak - before, 1)


def seconds(problem: Problem, repeats: int) -> dict[str, float]:
    clock = time.perf_counter if problem.device == "cuda" else time.process_time
    fastest = dict.fromkeys(WAYS, float("inf"))
    for _ in range(repeats):
        for way in WAYS:
            start = clock()
            problem.run(way, len(problem.hidden))
            fastest[way] = min(fastest[way], clock() - start)
    return {way: round(value, 3) for way, value in fastest.items()}


def at_goal(peaks: dict[int, float]) -> float:
    """Gigabytes at `GOAL_TOKENS`, on the line through what was measured, {tokens: MB}, and no less than that."""
    slope, start = np.polyfit(list(peaks), list(peaks.values()), 1)
    return round(max(slope * GOAL_TOKENS + start, *peaks.values()) * 2**20 / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="two or more, no less than a chunk"
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs=2, metavar=("WAY", "TOKENS"), help="what a child process is told")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(extra_mb(Problem(args, int(args.only[1])), args.only[0])))
        return
    found: dict[str, dict[int, float]] = {way: {} for way in WAYS}
    for tokens in args.tokens:
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--only", way, str(tokens)]
            child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            if (peak := json.loads(child.stdout)) is not None:
                found[way][tokens] = peak
    goals = {way: at_goal(peaks) for way, peaks in found.items()}
    times = seconds(Problem(args, args.tokens[0]), args.repeats)
    report = {
        "benchmark": "logprob_memory",
        "ratio_memory": round(goals["ours"] / goals["plain"], 4),
        "ratio_time": round(times["ours"] / times["plain"], 3),
        "at_65536_gb": goals,
        "extra_mb": found,
        "seconds": times,
        **{name: getattr(args, name) for name in ("vocab", "tensor", "hidden", "chunk", "dtype", "threads")},
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
