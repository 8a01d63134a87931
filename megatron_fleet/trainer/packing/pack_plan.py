"""Packing plan: assignment of sequences to the micro-batches of data-parallel ranks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer.packing.balance import balance

Plan = list[list[list[int]]]
"""Rank → micro-batches → indices of sequences."""


def round_up(number: int, multiple: int) -> int:
    """Smallest multiple not below ``number``."""
    return -(-number // multiple) * multiple


def plan_micro_batches(
    lengths: Sequence[int],
    dp: int,
    capacity: int,
    costs: Sequence[float] | np.ndarray,
    sequence_align: int = 1,
    micro_batch_align: int = 1,
) -> Plan:
    """Distribute sequences over data-parallel ranks and pack each rank's share into micro-batches.

    1. Sequences go to ranks by cost alone (`balance.balance`), so that the ranks finish together.
    2. First-fit-decreasing finds the number of micro-batches that each rank needs; all ranks get the maximum.
    3. Each rank's sequences are packed a second time, into that many micro-batches, each into the cheapest with room.
       The plan is the layout with less waiting: ranks with experts synchronise in every micro-batch, and pipeline
       stages wait for the longest one.

    Invariants: every index appears exactly once; every rank has the same number of micro-batches: at least one, and the
    maximum that first-fit-decreasing needs; `pack.micro_batch_width` of a micro-batch is at most ``capacity``; a
    rank's micro-batches are sorted from costly to cheap, empty ones last, so that concurrent ones are alike; equal
    arguments give equal plans.

    Args:
        lengths: tokens of each sequence.
        dp: number of data-parallel ranks.
        capacity: maximum tokens of a micro-batch.
        costs: FLOPs of each sequence, in any unit.
        sequence_align: each sequence is padded to a multiple of this many tokens.
        micro_batch_align: each micro-batch is padded to a multiple of this many.

    Returns:
        rank → micro-batches → indices into ``lengths``.

    Raises:
        UserError: a sequence is longer than a micro-batch.
    """
    needs = [round_up(length, sequence_align) for length in lengths]
    free = capacity // micro_batch_align * micro_batch_align
    for index, need in enumerate(needs):
        if need > free:
            raise UserError(
                f"policy.micro_batch_tokens={capacity} is too small for sequence {index} of {lengths[index]} "
                f"tokens; raise it "
                f"to at least {round_up(need, micro_batch_align)} or lower rollout.max_context."
            )
    flops = np.asarray(costs, np.float64).tolist()
    shares = [sorted(share, key=lambda i: (-needs[i], i)) for share in balance(flops, dp)]
    packed = [_first_fit(share, needs, free) for share in shares]
    count = max(1, *map(len, packed))
    level = [_level(share, needs, flops, free, count) for share in shares]
    plans: list[Plan] = [[micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]]
    if all(level):
        plans.insert(0, level)
    for plan in plans:
        for micro_batches in plan:
            micro_batches.sort(key=lambda micro_batch: -_cost(micro_batch, flops))
    return min(plans, key=lambda plan: _waiting(plan, flops))


def _cost(micro_batch: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in micro_batch)


def _waiting(plan: Plan, costs: Sequence[float]) -> float:
    """FLOPs on the critical path when all ranks synchronise in every micro-batch, and a second pipeline stage starts
    one later.
    """
    table = np.array([[_cost(micro_batch, costs) for micro_batch in micro_batches] for micro_batches in plan])
    return float(table.max(0).sum() + table.max())


def _first_fit(share: Sequence[int], needs: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing: each sequence into the first micro-batch with room. ``share`` is sorted, longest first."""
    free = np.full(len(share) + 1, capacity)
    micro_batches: list[list[int]] = []
    for index in share:
        chosen = int((free[: len(micro_batches) + 1] >= needs[index]).argmax())
        if chosen == len(micro_batches):
            micro_batches.append([])
        micro_batches[chosen].append(index)
        free[chosen] -= needs[index]
    return micro_batches


def _level(
    share: Sequence[int], needs: Sequence[int], costs: Sequence[float], capacity: int, count: int
) -> list[list[int]]:
    """Put each sequence into the cheapest of ``count`` micro-batches with room; nothing when one does not fit."""
    free, loads = np.full(count, capacity), np.zeros(count)
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    for index in share:
        chosen = int(np.where(free >= needs[index], loads, np.inf).argmin())
        if free[chosen] < needs[index]:
            return []
        micro_batches[chosen].append(index)
        free[chosen] -= needs[index]
        loads[chosen] += costs[index]
    return micro_batches
