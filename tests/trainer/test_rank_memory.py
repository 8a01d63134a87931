"""One rank's memory by owner, on CPU and on a GPU that is read through a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch

from megatron_fleet.trainer.megatron.memory import CudaGauge, RankMemory, open_gauge


class State:
    """A trainer's tensors, of which the optimizer is offloaded."""

    def held(self):
        return {"parameters": 20, "gradients": 40, "optimizer": 0}

    def sizes(self):
        return self.held() | {"optimizer": 120}


def test_a_process_reports_parts_and_resident_memory(monkeypatch):
    memory = RankMemory(torch.device("cpu"), State())
    assert memory.part_bytes() == {"parameters": 20, "gradients": 40, "optimizer": 120}
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=1 << 30))
    held = {"parameters": 20, "gradients": 40, "optimizer": 0}
    assert memory.memory("begin", quiet=False) == held | {"process": 1 << 30}
    assert memory.memory("end", quiet=True) == {}


def test_a_trainer_that_never_moves_counts_no_parts():
    memory = RankMemory(torch.device("cpu"), None)
    assert memory.part_bytes() == {}
    assert memory.memory("begin", quiet=False).keys() == {"process"}


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


def test_the_gauge_of_a_gpu_separates_owners(monkeypatch):
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
    found = gauge.read(len(block))
    assert found["other"] < 64 << 20
    temporary = torch.ones(128 << 20, dtype=torch.uint8, device=where)
    del temporary
    assert abs(gauge.close(quiet=True)["temporary"] - (128 << 20)) < 32 << 20
