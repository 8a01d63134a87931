"""The packing plan: which sequences make up which row of which data-parallel rank. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer.packing.balance import balance

Plan = list[list[list[int]]]
"""Rank → rows → indices of sequences."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple from ``number`` on."""
    return -(-number // multiple) * multiple


def plan_rows(
    lengths: Sequence[int],
    dp: int,
    capacity: int,
    costs: Sequence[float] | np.ndarray,
    sequence_align: int = 1,
    row_align: int = 1,
) -> Plan:
    """Distribute sequences over data-parallel ranks and pack each rank's share into rows.

    1. Sequences go to ranks by cost alone (`balance.balance`), so that the ranks finish together.
    2. First-fit-decreasing finds how many rows each rank needs; all ranks get as many as the neediest.
    3. Each rank's sequences are laid out in that many rows a second time, each into the cheapest row with room. Of the
       two layouts, the one with less waiting is the plan: ranks with experts meet in every row, pipeline stages wait
       for the longest one.

    Invariants: every index appears exactly once; every rank has the same number of rows: at least one, and what
    first-fit-decreasing needs on the neediest rank; `pack.row_width` of a row is at most ``capacity``; a rank's rows go
    from costly to cheap, empty ones last, so that rows that meet are alike; equal arguments give equal plans.

    Args:
        lengths: tokens of each sequence.
        dp: number of data-parallel ranks.
        capacity: most tokens of a row.
        costs: FLOPs of each sequence, in any unit.
        sequence_align: each sequence takes a multiple of this many tokens.
        row_align: each row takes a multiple of this many.

    Returns:
        rank → rows → indices into ``lengths``.

    Raises:
        UserError: a sequence is longer than a row.
    """
    needs = [round_up(length, sequence_align) for length in lengths]
    room = capacity // row_align * row_align
    for index, need in enumerate(needs):
        if need > room:
            raise UserError(
                f"policy.micro_batch_tokens={capacity} is too small for sequence {index} of {lengths[index]} "
                f"tokens; raise it "
                f"to at least {round_up(need, row_align)} or lower rollout.max_context."
            )
    flops = np.asarray(costs, np.float64).tolist()
    shares = [sorted(share, key=lambda i: (-needs[i], i)) for share in balance(flops, dp)]
    packed = [_first_fit(share, needs, room) for share in shares]
    count = max(1, *map(len, packed))
    level = [_level(share, needs, flops, room, count) for share in shares]
    plans: list[Plan] = [[rows + [[] for _ in range(count - len(rows))] for rows in packed]]
    if all(level):
        plans.insert(0, level)
    for plan in plans:
        for rows in plan:
            rows.sort(key=lambda row: -_cost(row, flops))
    return min(plans, key=lambda plan: _waiting(plan, flops))


def _cost(row: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in row)


def _waiting(plan: Plan, costs: Sequence[float]) -> float:
    """FLOPs on the critical path when all ranks meet in every row, and a second pipeline stage begins a row later."""
    rows = np.array([[_cost(row, costs) for row in rows] for rows in plan])
    return float(rows.max(0).sum() + rows.max())


def _first_fit(share: Sequence[int], needs: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing: each sequence into the first row with room. ``share`` is sorted, longest first."""
    room = np.full(len(share) + 1, capacity)
    rows: list[list[int]] = []
    for index in share:
        row = int((room[: len(rows) + 1] >= needs[index]).argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[row] -= needs[index]
    return rows


def _level(
    share: Sequence[int], needs: Sequence[int], costs: Sequence[float], capacity: int, count: int
) -> list[list[int]]:
    """Each sequence into the cheapest of ``count`` rows with room; nothing when one finds none."""
    room, loads = np.full(count, capacity), np.zeros(count)
    rows: list[list[int]] = [[] for _ in range(count)]
    for index in share:
        row = int(np.where(room >= needs[index], loads, np.inf).argmin())
        if room[row] < needs[index]:
            return []
        rows[row].append(index)
        room[row] -= needs[index]
        loads[row] += costs[index]
    return rows
