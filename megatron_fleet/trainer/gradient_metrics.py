"""Metrics of a batch's gradient and its update: pure functions of samples. Names: telemetry/registry."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SIDE = 64
"""Maximum rows and columns in a sample of a matrix; as float32, 16 KiB per micro-batch."""
BINS = 10
BYTES_PER_WEIGHT = 2
"""Size in bfloat16, the dtype that engines serve."""


@dataclass(frozen=True, slots=True, order=True)
class SampledMatrix:
    """Trained matrix of the whole, unsplit model.

    Attributes:
        kind: its name without layer and expert numbers.
        place: these numbers.
        shape: rows and columns.
    """

    kind: str
    place: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.kind

    def lines(self) -> tuple[list[int], list[int]]:
        """Sampled rows and columns, ascending; a function of the matrix alone."""
        rng = random.Random(f"{self.kind} {self.place}")
        rows, cols = (sorted(rng.sample(range(size), min(size, SIDE))) for size in self.shape)
        return rows, cols


def choose(matrices: Sequence[SampledMatrix], count: int) -> list[SampledMatrix]:
    """Choose at most ``count`` matrices: equally many of each kind, spread evenly over the stack.

    Deterministic and independent of the order of ``matrices``.
    """
    kinds: dict[str, list[SampledMatrix]] = {}
    for matrix in sorted(matrices):
        kinds.setdefault(matrix.kind, []).append(matrix)
    shares, left = dict.fromkeys(kinds, 0), count
    while left and (open_kinds := [kind for kind in kinds if shares[kind] < len(kinds[kind])]):
        for kind in open_kinds[:left]:
            shares[kind] += 1
            left -= 1
    return [matrix for kind, share in shares.items() for matrix in _spread(kind, kinds[kind], share)]


def _spread(kind: str, matrices: Sequence[SampledMatrix], share: int) -> list[SampledMatrix]:
    rng, size = random.Random(kind), len(matrices)
    return [matrices[rng.randrange(i * size // share, (i + 1) * size // share)] for i in range(share)]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums for one sample over the micro-batches of a batch.

    Attributes:
        total: Σ over micro-batches of their gradients, float64 ``[rows, columns]`` of the sample.
        energy: Σ over micro-batches of their gradients' squared norms.
        count: number of micro-batches, n.
    """

    total: torch.Tensor
    energy: float
    count: int


def gradient_metrics(samples: Sequence[Sums]) -> dict[str, float]:
    """Compute ``snr``, ``update_diversity`` and ``effective_rank``, omitting undefined ones. Samples without any
    gradient are left out.
    """
    alive = [sample for sample in samples if sample.energy > 0 and bool(sample.total.any())]
    out: dict[str, float] = {}
    if ratios := [ratio for sample in alive if (ratio := signal_to_noise(sample)) is not None]:
        out["snr"] = sum(ratios) / len(ratios)
    if alive:
        out["update_diversity"] = diversity([sample.total for sample in alive])
        out["effective_rank"] = sum(effective_rank(sample.total) for sample in alive) / len(alive)
    return out


def signal_to_noise(sample: Sums) -> float | None:
    """‖Σg‖² / N² − 1 with N² = n / (n − 1) Σ‖g − ḡ‖², an unbiased estimate of the variance of Σg over batches.

    It estimates ‖E Σg‖² / N²: the expected value is 0 when micro-batches agree on nothing. The split of a batch into
    micro-batches changes the precision, not the estimated quantity. Up to the size of the batch it is the inverse of
    the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162). ``None`` with one micro-batch, or without
    noise.
    """
    n, signal = sample.count, float(sample.total.square().sum())
    if n < 2:
        return None
    noise = n / (n - 1) * (sample.energy - signal / n)
    # Below this, the remainder of the difference is rounding.
    return signal / noise - 1 if noise > 1e-6 * sample.energy else None


def diversity(totals: Sequence[torch.Tensor]) -> float:
    """Entropy of a histogram over log ``BINS``: of |x| over the greatest |x| of its tensor, all tensors together."""
    relative = torch.cat([t.abs().flatten() / t.abs().max() for t in totals])
    counts = torch.histc(relative, BINS, 0.0, 1.0)
    return _entropy(counts) / math.log(BINS)


def effective_rank(matrix: torch.Tensor) -> float:
    """exp(entropy of the singular values over their sum) / the greatest possible rank, in (0, 1] (Roy and Vetterli
    2007, EUSIPCO)."""
    return math.exp(_entropy(torch.linalg.svdvals(matrix))) / min(matrix.shape)


def _entropy(weights: torch.Tensor) -> float:
    p = weights.double() / weights.double().sum()
    return float(torch.special.entr(p).sum())


def megabytes_edited(edited: Mapping[SampledMatrix, float], all_sizes: int) -> dict[str, float]:
    """MiB of bfloat16 weights that an update changed.

    Args:
        edited: share of each sample that changed.
        all_sizes: elements of all matrices that could be sampled.
    """
    share = sum(matrix.size * part for matrix, part in edited.items()) / sum(matrix.size for matrix in edited)
    return {"megabytes_edited": share * all_sizes * BYTES_PER_WEIGHT / 2**20}
