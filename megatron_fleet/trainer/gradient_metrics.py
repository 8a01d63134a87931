"""What the gradient of a batch and its update look like: pure functions of sampled parts. Names: telemetry/registry."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SIDE = 64
"""A sample is at most so many rows and columns of a matrix; as float32 it is 16 KiB for each row of tokens."""
BINS = 10
BYTES_PER_WEIGHT = 2
"""Of bfloat16, in which engines serve."""


@dataclass(frozen=True, slots=True, order=True)
class Matrix:
    """A trained matrix of the whole, unsplit model.

    Attributes:
        kind: its name without numbers of layers and experts.
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
        """The rows and columns that are sampled, ascending; they depend on nothing but the matrix."""
        rng = random.Random(f"{self.kind} {self.place}")
        rows, cols = (sorted(rng.sample(range(size), min(size, SIDE))) for size in self.shape)
        return rows, cols


def choose(matrices: Sequence[Matrix], count: int) -> list[Matrix]:
    """At most ``count`` of them: as many of each kind, and of a kind one from each of equal stretches of the stack.

    Deterministic, whatever the order of ``matrices``.
    """
    kinds: dict[str, list[Matrix]] = {}
    for matrix in sorted(matrices):
        kinds.setdefault(matrix.kind, []).append(matrix)
    shares, left = dict.fromkeys(kinds, 0), count
    while left and (open_kinds := [kind for kind in kinds if shares[kind] < len(kinds[kind])]):
        for kind in open_kinds[:left]:
            shares[kind] += 1
            left -= 1
    return [matrix for kind, share in shares.items() for matrix in _spread(kind, kinds[kind], share)]


def _spread(kind: str, matrices: Sequence[Matrix], share: int) -> list[Matrix]:
    rng, size = random.Random(kind), len(matrices)
    return [matrices[rng.randrange(i * size // share, (i + 1) * size // share)] for i in range(share)]


@dataclass(frozen=True, slots=True)
class Sums:
    """One sample over the rows of a batch.

    Attributes:
        total: Σ over rows of their gradients, float64 ``[rows, columns]`` of the sample.
        energy: Σ over rows of their gradients' squared norms.
        count: rows, n.
    """

    total: torch.Tensor
    energy: float
    count: int


def gradient_metrics(samples: Sequence[Sums]) -> dict[str, float]:
    """``snr``, ``update_diversity`` and ``effective_rank``; without what cannot be told. Samples without any gradient
    are left out."""
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

    It estimates ‖E Σg‖² / N²: 0 is expected when the rows agree on nothing. How a batch is cut into rows changes the
    precision, not what is estimated. Up to the size of the batch it is the inverse of the gradient noise scale
    (McCandlish et al. 2018, arXiv:1812.06162). ``None`` with one row, or without noise.
    """
    n, signal = sample.count, float(sample.total.square().sum())
    if n < 2:
        return None
    noise = n / (n - 1) * (sample.energy - signal / n)
    # Below this, what is left of the difference is rounding.
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


def megabytes_edited(edited: Mapping[Matrix, float], all_sizes: int) -> dict[str, float]:
    """MiB of bfloat16 weights that an update changed.

    Args:
        edited: share of each sample that changed.
        all_sizes: elements of all matrices that could have been sampled.
    """
    share = sum(matrix.size * part for matrix, part in edited.items()) / sum(matrix.size for matrix in edited)
    return {"megabytes_edited": share * all_sizes * BYTES_PER_WEIGHT / 2**20}
