"""Sequences into rows of one fixed token capacity: the plan, and the tensors of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError

LINEAR_COST_TOKENS = 4096
"""Context at which attention costs as much as the rest of a token: about 4-6 × hidden size for today's models. It only
weighs ranks against each other, so a rough value does."""


def _aligned(length: int, align: int) -> int:
    return -(-length // align) * align


def plan_rows(lengths: Sequence[int], dp: int, capacity: int, align: int = 1) -> list[list[list[int]]]:
    """Distribute sequences over data-parallel ranks and pack each rank's share into rows.

    Longest first: each sequence goes to the rank with the least estimated FLOPs (so the ranks finish together), then
    first-fit-decreasing packs a rank's sequences into rows. Ranks with fewer rows get empty ones: every rank runs the
    same number of micro-batches.

    Args:
        lengths: tokens of each sequence.
        dp: number of data-parallel ranks.
        capacity: tokens of a row.
        align: each sequence takes a multiple of this many tokens.

    Returns:
        rank → rows → indices into ``lengths``; every index exactly once. At least one row per rank.

    Raises:
        UserError: a sequence is longer than a row.
    """
    for index, length in enumerate(lengths):
        if _aligned(length, align) > capacity:
            raise UserError(
                f"policy.row_tokens={capacity} is too small for sequence {index} of {length} tokens; raise it to at "
                f"least {_aligned(length, align)} or lower rollout.max_context."
            )
    cost = [0.0] * dp
    rows: list[list[list[int]]] = [[] for _ in range(dp)]
    room: list[list[int]] = [[] for _ in range(dp)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(dp), key=cost.__getitem__)
        cost[rank] += lengths[index] * (1 + lengths[index] / LINEAR_COST_TOKENS)
        need = _aligned(lengths[index], align)
        row = next((r for r, free in enumerate(room[rank]) if free >= need), None)
        if row is None:
            rows[rank].append([])
            room[rank].append(capacity)
            row = -1
        rows[rank][row].append(index)
        room[rank][row] -= need
    most = max(1, *(len(r) for r in rows))
    return [r + [[] for _ in range(most - len(r))] for r in rows]


@dataclass(slots=True)
class PackedRow:
    """One micro-batch of ``P`` = capacity tokens. Index ``i`` of the row predicts token ``i + 1`` of its sequence.

    Attributes:
        tokens: int64 ``[P]``; 0 in the filler.
        positions: int64 ``[P]``, place of each token in its sequence.
        lengths: tokens of each sequence in the row, alignment included.
        filler: tokens behind them.
        trained: int64 ``[A]``, indices into the row that predict a trained token.
        targets: int64 ``[A]``, the tokens they predict.
        mask, weights, behaviour, proximal, reference: float32 ``[A]``, the `Datum` fields of these tokens.
        real_tokens: tokens that belong to sequences.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    filler: int
    trained: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    real_tokens: int


def pack_row(row: Sequence[Datum], capacity: int, align: int = 1) -> PackedRow:
    """Lay the sequences of a row one behind the other and collect their trained positions, in order.

    Raises:
        ValueError: the sequences do not fit, a first token is trained, or only some carry proximal or reference
            log-probs.
    """
    tokens = np.zeros(capacity, np.int64)
    positions = np.zeros(capacity, np.int64)
    trained, lengths, start = [], [], 0
    for datum in row:
        n, width = len(datum), _aligned(len(datum), align)
        if start + width > capacity:
            raise ValueError(f"a row of {capacity} tokens cannot hold {[len(d) for d in row]}")
        if n and datum.mask[0]:
            raise ValueError("the first token of a sequence has no prediction and cannot be trained")
        tokens[start : start + n] = datum.token_ids
        positions[start : start + width] = np.arange(width)
        trained.append(start + np.flatnonzero(datum.mask) - 1)
        if width:
            lengths.append(width)
        start += width
    positions[start:] = np.arange(capacity - start)
    index = np.concatenate(trained) if trained else np.zeros(0, np.int64)
    return PackedRow(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        lengths=tuple(lengths),
        filler=capacity - start,
        trained=torch.from_numpy(index),
        targets=torch.from_numpy(tokens[index + 1]),
        mask=_at_trained(row, [d.mask for d in row]),
        weights=_at_trained(row, [d.weights for d in row]),
        behaviour=_at_trained(row, [d.behaviour_logprobs for d in row]),
        proximal=_optional(row, [d.proximal_logprobs for d in row], "proximal"),
        reference=_optional(row, [d.reference_logprobs for d in row], "reference"),
        real_tokens=sum(len(d) for d in row),
    )


def unpack_trained(row: Sequence[Datum], values: np.ndarray) -> list[np.ndarray]:
    """Values ``[A]`` at a row's trained positions back to float32 ``[T]`` per sequence, 0 elsewhere."""
    out, start = [], 0
    for datum in row:
        where = np.flatnonzero(datum.mask)
        full = np.zeros(len(datum), np.float32)
        full[where] = values[start : start + len(where)]
        out.append(full)
        start += len(where)
    return out


def _at_trained(row: Sequence[Datum], fields: Sequence[np.ndarray]) -> torch.Tensor:
    picked = [f[d.mask != 0] for d, f in zip(row, fields, strict=True)]
    joined = np.concatenate(picked) if picked else np.zeros(0)
    return torch.from_numpy(joined.astype(np.float32))


def _optional(row: Sequence[Datum], fields: Sequence[np.ndarray | None], name: str) -> torch.Tensor | None:
    present = [f for f in fields if f is not None]
    if len(present) == len(fields):
        return _at_trained(row, present)
    if present:
        raise ValueError(f"only {len(present)} of {len(fields)} sequences carry {name} log-probs")
    return None
