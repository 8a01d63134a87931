"""The memory ledger: who held most, when, and the refusal of what may not be there."""

from __future__ import annotations

import gc
import json
import re
import threading

import pytest

pytest.importorskip("torch")

import torch

from megatron_fleet.loop.memory_budget import GIB, CudaGauge, Ledger, MemoryExceeded, ProcessGauge, open_gauge
from megatron_fleet.telemetry import registry

LIMITS = {"roll": {"parameters": 0, "engine": 100}}


class Ranks:
    """A communicator of two threads."""

    def __init__(self):
        self.barrier, self.slots = threading.Barrier(2, timeout=20), [None, None]

    def of(self, rank):
        slots, barrier = self.slots, self.barrier

        class Comm:
            size = 2

            def __init__(self):
                self.rank = rank

            def all_gather(self, value):
                slots[rank] = value
                barrier.wait()
                values = list(slots)
                barrier.wait()
                return values

            def broadcast(self, tensor, source):
                raise AssertionError

        return Comm()


class FakeGauge:
    def __init__(self, engine, temporary):
        self.engine, self.temporary, self.quiet = list(engine), list(temporary), []

    def read(self, held):
        self.held = held
        return {"engine": self.engine.pop(0)}

    def close(self, quiet):
        self.quiet.append(quiet)
        return {"temporary": self.temporary.pop(0)}


def two_ranks(tmp_path, gauges, story):
    """Run ``story(ledger, rank)`` on both ranks; what they returned or raised."""
    ranks, out = Ranks(), [None, None]

    def run(rank):
        ledger = Ledger(ranks.of(rank), gauges[rank], LIMITS, tmp_path / "out" / "memory.json")
        try:
            out[rank] = story(ledger, rank)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return out


def test_the_rank_that_holds_most_is_told_and_kept(tmp_path):
    gauges = [FakeGauge([5, 50, 7], [11, 0]), FakeGauge([6, 40, 6], [10, 0])]

    def story(ledger, rank):
        ledger.enter("train", {"parameters": GIB * (2 + rank), "gradients": 8})
        ledger.leave(quiet=True)
        ledger.enter("roll", {"parameters": 0, "gradients": 0})
        ledger.leave(quiet=False)
        ledger.enter("train", {"parameters": GIB * (2 + rank), "gradients": 9 - rank})
        ledger.remark = "because"
        ledger.write()
        return ledger.metrics()

    first, second = two_ranks(tmp_path, gauges, story)
    assert first == second
    assert first["memory/train/parameters"] == 3.0
    assert first["memory/train/gradients"] * GIB == 9
    assert first["memory/train/engine"] * GIB == 7
    assert first["memory/train/temporary"] * GIB == 11
    assert first["memory/roll/engine"] * GIB == 50
    assert all(registry.find(name) is not None for name in first)
    assert [gauge.quiet for gauge in gauges] == [[True, False]] * 2
    assert gauges[1].held == GIB * 3 + 8

    table = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert table["engines"] == "because"
    train, roll = table["phases"]["train"], table["phases"]["roll"]
    assert train["parameters"] == {"bytes": 3 * GIB, "limit": None, "rank": 1, "cycle": 1}
    assert train["gradients"] == {"bytes": 9, "limit": None, "rank": 0, "cycle": 2}
    assert train["engine"] == {"bytes": 7, "limit": None, "rank": 0, "cycle": 2}
    assert train["temporary"] == {"bytes": 11, "limit": None, "rank": 0, "cycle": 1}
    assert roll["engine"] == {"bytes": 50, "limit": 100, "rank": 0, "cycle": 1}


@pytest.mark.parametrize(
    ("parameters", "engine", "told"),
    [
        (3 * GIB, 0, r"memory in phase roll: parameters holds 3 GiB on rank 1, 0 GiB are allowed; something keeps"),
        (1, 0, r"parameters holds"),
        (0, 2 * GIB, r"engine holds 2 GiB on rank 1, .* raise rollout\.engine\.residual_gib"),
        (0, 100, None),
    ],
)
def test_what_may_not_be_there_ends_the_run_on_every_rank(tmp_path, parameters, engine, told):
    gauges = [FakeGauge([0], []), FakeGauge([engine], [])]
    out = two_ranks(tmp_path, gauges, lambda ledger, rank: ledger.enter("roll", {"parameters": parameters * rank}))
    if told is None:
        assert out == [None, None]
        return
    assert [type(error) for error in out] == [MemoryExceeded] * 2
    assert str(out[0]) == str(out[1])
    assert re.search(told, str(out[0]))
    assert json.loads((tmp_path / "out" / "memory.json").read_text())["phases"]["roll"]


def test_the_gauge_of_a_process_sees_its_memory():
    gauge = open_gauge(torch.device("cpu"))
    assert isinstance(gauge, ProcessGauge)
    gc.collect()  # what earlier tests left must not go meanwhile
    before = gauge.read(0)["process"]
    block = torch.ones(256 << 20, dtype=torch.uint8)
    assert gauge.read(0)["process"] - before > 200 << 20
    del block
    assert gauge.close(quiet=True) == {}


class FakeCuda:
    """``torch.cuda`` of a device of 1000 bytes."""

    def __init__(self):
        self.used = self.reserved = self.most = 0

    def synchronize(self, _): ...

    def mem_get_info(self, _):
        return 1000 - self.used, 1000

    def memory_reserved(self, _):
        return self.reserved

    def max_memory_allocated(self, _):
        return self.most

    def reset_peak_memory_stats(self, _):
        self.most = 0


def test_the_gauge_of_a_gpu_tells_owners_apart(monkeypatch):
    cuda = FakeCuda()
    for name in ("synchronize", "mem_get_info", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    gauge = CudaGauge(torch.device("cuda", 0))
    cuda.used, cuda.reserved = 400, 320  # the trainer's 300, 20 of its caches, 80 of contexts and a sleeping engine
    assert gauge.read(300) == {"other": 20, "communicators": 0, "engine": 80}
    cuda.used, cuda.reserved, cuda.most = 550, 420, 410  # 50 more than the allocator knows: communicators
    assert gauge.close(quiet=True) == {"temporary": 110, "communicators": 50}
    cuda.used, cuda.reserved = 700, 100  # only parameters; the engine's weights are awake
    assert gauge.read(90) == {"other": 10, "communicators": 50, "engine": 550}
    cuda.used, cuda.most = 720, 95
    assert gauge.close(quiet=False) == {"temporary": 5, "communicators": 50}  # the engine's, not ours


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_read():
    where = torch.device("cuda", 0)
    block = torch.ones(256 << 20, dtype=torch.uint8, device=where)
    gauge = open_gauge(where)
    row = gauge.read(len(block))
    assert row["other"] < 64 << 20
    temporary = torch.ones(128 << 20, dtype=torch.uint8, device=where)
    del temporary
    assert abs(gauge.close(quiet=True)["temporary"] - (128 << 20)) < 32 << 20
