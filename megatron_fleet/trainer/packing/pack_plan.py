"""Packing plan: assignment of sequences to the micro-batches of data-parallel ranks. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError

Plan = list[list[list[int]]]
"""Rank → micro-batches → indices of sequences."""
GOOD_ENOUGH = 1e-3
"""Relative excess of the costliest group over the mean that is accepted: a step's time varies by more."""
SEARCH_PAIRS = 1_000_000
"""Limit on the exchanges of two items that the search evaluates: about 10 ms."""
MULTIFIT_ROUNDS = 12
"""Rounds of bisection: they determine the limit to within 1 / 4096 of the initial one."""
ROUNDING = 1e-9
"""Bound on the relative rounding error of a sum of costs."""


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

    1. Sequences go to ranks by cost alone (`balance`), so that the ranks finish together.
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


def balance(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Partition items so that the costliest group is as cheap as possible. Deterministic.

    Differencing, then exchanges of items. Where that leaves a costliest group of several items above `GOOD_ENOUGH`,
    MULTIFIT and exchanges are tried as well: with few items per group this is often better.

    Args:
        costs: of each item, not negative.

    Returns:
        ``groups`` lists of indices into ``costs``, possibly empty; every index exactly once. Unless the costliest group
            costs at most 1 + `GOOD_ENOUGH` of the mean (or a search ran out of `SEARCH_PAIRS`), no move of one item and
            no exchange of two makes it cheaper without making another as costly.
    """
    if groups == 1:
        return [list(range(len(costs)))]
    array = np.asarray(costs, np.float64)
    found = exchange(karmarkar_karp(costs, groups), array)
    loads = _loads(found, array)
    worst = int(loads.argmax())
    if loads[worst] <= (1 + GOOD_ENOUGH) * loads.mean() or len(found[worst]) == 1:
        return found
    other = exchange(multifit(costs, groups), array)
    return min(found, other, key=lambda partition: _loads(partition, array).max())


def _loads(partition: Sequence[Sequence[int]], costs: np.ndarray) -> np.ndarray:
    return np.array([costs[list(items)].sum() for items in partition])


Parts = list[tuple[float, Any]]
"""Partial solution: the non-empty groups, costliest first, each as its cost and its items: an index, or a pair of
nested items.
"""


def karmarkar_karp(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Largest differencing method for several groups (Karmarkar & Karp 1982; for k groups Michiels et al. 2003).

    Starts with one partial solution per item. The two with the largest difference between costliest and cheapest group
    are merged: the costliest group of either joins the cheapest of the other, and so on.
    """
    singles = sorted(range(len(costs)), key=lambda i: (costs[i], -i))
    others: list[tuple[float, int, Parts]] = []

    def most_different() -> Parts:
        if others and (not singles or -others[0][0] >= costs[singles[-1]]):
            return heapq.heappop(others)[2]
        index = singles.pop()
        return [(costs[index], index)]

    for serial in range(len(costs) - 1):
        parts = _join(most_different(), most_different(), groups)
        difference = parts[0][0] - (parts[-1][0] if len(parts) == groups else 0.0)
        heapq.heappush(others, (-difference, serial, parts))
    last = most_different() if costs else []
    return [_items(tree) for _, tree in last] + [[] for _ in range(groups - len(last))]


def _join(a: Parts, b: Parts, groups: int) -> Parts:
    """Merge two partial solutions: costliest groups of ``a`` with cheapest of ``b``."""
    alone = groups - len(b)
    if len(a) <= alone:
        joined = a + b
    else:
        cheap_first = b[::-1]
        meeting = [(x + y, (s, t)) for (x, s), (y, t) in zip(a[alone:], cheap_first, strict=False)]
        joined = a[:alone] + meeting + cheap_first[len(meeting) :]
    joined.sort(key=itemgetter(0), reverse=True)
    return joined


def _items(tree: Any) -> list[int]:
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending.extend(node)
        else:
            found.append(node)
    return sorted(found)


def multifit(costs: Sequence[float], groups: int) -> list[list[int]]:
    """First-fit-decreasing into groups of limited cost, with a bisection for the smallest limit (Coffman, Garey &
    Johnson 1978).
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    low, high = max(sum(costs) / groups, *costs), 2 * max(sum(costs) / groups, *costs)
    best = _first_fit_within(costs, order, groups, high)
    for _ in range(MULTIFIT_ROUNDS):
        middle = (low + high) / 2
        found = _first_fit_within(costs, order, groups, middle)
        if found:
            best, high = found, middle
        else:
            low = middle
    return best


def _first_fit_within(costs: Sequence[float], order: Sequence[int], groups: int, limit: float) -> list[list[int]]:
    """Put each item into the first group that then costs at most ``limit``; nothing when one fits nowhere."""
    loads: list[float] = [0.0] * groups
    partition: list[list[int]] = [[] for _ in range(groups)]
    for index in order:
        group = next((g for g, load in enumerate(loads) if load + costs[index] <= limit), None)
        if group is None:
            return []
        loads[group] += costs[index]
        partition[group].append(index)
    return partition


def exchange(partition: list[list[int]], costs: np.ndarray) -> list[list[int]]:
    """Apply the best exchange of one item of the costliest group for one or none of another's, while it lowers the
    maximum.

    ``partition`` is changed and returned.
    """
    loads = _loads(partition, costs)
    weighed = 0
    while loads.max() > (1 + GOOD_ENOUGH) * loads.mean() and weighed < SEARCH_PAIRS:
        worst = int(loads.argmax())
        rest = [group for group in range(len(partition)) if group != worst]
        # The last candidate of each group stands for no item: a move.
        offered = [item for group in rest for item in (*partition[group], -1)]
        owner = np.repeat(rest, [len(partition[group]) + 1 for group in rest])
        gain = costs[partition[worst]][:, None] - np.where(np.array(offered) < 0, 0.0, costs[offered])
        higher = np.maximum(loads[worst] - gain, loads[owner] + gain)
        weighed += higher.size
        given, taken = np.unravel_index(higher.argmin(), higher.shape)
        if higher[given, taken] >= loads[worst] * (1 - ROUNDING):
            break
        other = int(owner[taken])
        partition[other].append(partition[worst].pop(given))
        if offered[taken] >= 0:
            partition[other].remove(offered[taken])
            partition[worst].append(offered[taken])
        loads[[worst, other]] = _loads([partition[worst], partition[other]], costs)
    return partition
