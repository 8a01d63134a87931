"""The memory budget: who held most, when, and the refusal of what may not be there."""

from __future__ import annotations

import json
import re

import pytest

from megatron_fleet.loop.memory_budget import GIB, MemoryBudget, MemoryExceeded
from megatron_fleet.telemetry import registry

LIMITS = {"roll": {"parameters": 0, "engine": 100}}


class TwoRanks:
    """Answers with what each measurement shall find, by rank."""

    def __init__(self, *measurements):
        self.measurements, self.asked = list(measurements), []

    async def memory(self, moment, quiet=False):
        self.asked.append((moment, quiet))
        return [dict(rank) for rank in self.measurements.pop(0)]


async def test_the_rank_that_holds_most_is_reported_and_kept(tmp_path):
    ranks = TwoRanks(
        [{"parameters": 2 * GIB, "gradients": 8, "engine": 5}, {"parameters": 3 * GIB, "gradients": 8, "engine": 6}],
        [{"temporary": 11}, {"temporary": 10}],
        [{"parameters": 0, "gradients": 0, "engine": 50}, {"parameters": 0, "gradients": 0, "engine": 40}],
        [{"temporary": 0}, {"temporary": 0}],
        [{"parameters": 2 * GIB, "gradients": 9, "engine": 7}, {"parameters": 3 * GIB, "gradients": 8, "engine": 6}],
    )
    budget = MemoryBudget(ranks, [LIMITS, LIMITS], tmp_path / "out" / "memory.json")
    await budget.enter("train")
    await budget.leave(quiet=True)
    await budget.enter("roll")
    await budget.leave(quiet=False)
    await budget.enter("train")
    budget.remark = "because"
    budget.write()
    assert ranks.asked == [("begin", False), ("end", True), ("begin", False), ("end", False), ("begin", False)]
    found = budget.metrics()
    assert found["memory/train/parameters"] == 3.0
    assert found["memory/train/gradients"] * GIB == 9
    assert found["memory/train/engine"] * GIB == 7
    assert found["memory/train/temporary"] * GIB == 11
    assert found["memory/roll/engine"] * GIB == 50
    assert all(registry.find(name) is not None for name in found)

    table = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert table["engines"] == "because"
    train, roll = table["phases"]["train"], table["phases"]["roll"]
    assert train["parameters"] == {"bytes": 3 * GIB, "limit": None, "rank": 1, "cycle": 1}
    assert train["gradients"] == {"bytes": 9, "limit": None, "rank": 0, "cycle": 2}
    assert train["engine"] == {"bytes": 7, "limit": None, "rank": 0, "cycle": 2}
    assert train["temporary"] == {"bytes": 11, "limit": None, "rank": 0, "cycle": 1}
    assert roll["engine"] == {"bytes": 50, "limit": 100, "rank": 0, "cycle": 1}


@pytest.mark.parametrize(
    ("parameters", "engine", "message"),
    [
        (3 * GIB, 0, r"memory in phase roll: parameters holds 3 GiB on rank 1, 0 GiB are allowed; memory that"),
        (1, 0, r"parameters holds"),
        (0, 2 * GIB, r"engine holds 2 GiB on rank 1, .* raise rollout\.engine\.residual_gib"),
        (0, 100, None),
    ],
)
async def test_what_may_not_be_there_ends_the_run(tmp_path, parameters, engine, message):
    ranks = TwoRanks([{"parameters": 0, "engine": 0}, {"parameters": parameters, "engine": engine}])
    budget = MemoryBudget(ranks, [LIMITS, LIMITS], tmp_path / "memory.json")
    if message is None:
        await budget.enter("roll")
        return
    with pytest.raises(MemoryExceeded) as error:
        await budget.enter("roll")
    assert re.search(message, str(error.value))
    assert json.loads((tmp_path / "memory.json").read_text())["phases"]["roll"]


async def test_each_rank_has_limits_of_its_own(tmp_path):
    """Stages of a pipeline differ in size."""
    limits = [{"sync": {"parameters": 5}}, {"sync": {"parameters": 9}}]
    ranks = TwoRanks([{"parameters": 5}, {"parameters": 9}], [{"parameters": 9}, {"parameters": 5}])
    budget = MemoryBudget(ranks, limits, tmp_path / "memory.json")
    await budget.enter("sync")
    with pytest.raises(MemoryExceeded, match="on rank 0"):
        await budget.enter("sync")
