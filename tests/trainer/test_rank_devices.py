"""Devices of ranks that are not started by a run's own launchers, and of a trainer on this machine alone."""

from __future__ import annotations

import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from policy_fixtures import make_config, write_config

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.trainer import group, rank

GPUS = (Device(0, "GPU-slow", "L4", 24 << 30), Device(1, "GPU-fast", "H100", 80 << 30))
"""In nvidia-smi's order; CUDA by itself would begin with the faster one."""


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(rank, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(rank, "nvidia_devices", lambda environ: GPUS)


class Dialled(Exception):
    """The rank has done what it does before it connects."""


def main(monkeypatch, **environ: str) -> None:
    def dial(address):
        raise Dialled

    monkeypatch.setattr(rank, "_dial", dial)
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)
    with pytest.raises(Dialled):
        rank.main({"MFLEET_CONTROLLER": "h:1", "MFLEET_TOKEN": "secret"} | environ)


def test_an_external_rank_uses_the_device_that_it_reports(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    main(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    assert rank._take_device(1, {}) == asdict(GPUS[1])
    assert visible[1] == GPUS[1].uuid  # the rank computes on cuda:LOCAL_RANK
    with pytest.raises(UserError, match="has 2 GPUs for its ranks, and this is its local rank 2"):
        rank._take_device(2, {})


def test_a_rank_of_our_launcher_keeps_the_devices_that_it_was_given(gpus, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-fast")
    main(monkeypatch, **{f"MFLEET_{name}": value for name, value in zip(names, "0101", strict=True)})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-fast"


@pytest.mark.parametrize(("devices", "visible"), [(GPUS, "GPU-slow,GPU-fast"), ((), None)])
async def test_ranks_of_this_machine_alone_are_given_their_devices(tmp_path, monkeypatch, devices, visible):
    started = []

    class Started(Exception):
        pass

    def local_ranks(ranks, logs):
        started.append(ranks)
        raise Started

    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["parallel"] |= {"data": 2}
    monkeypatch.setattr(group, "local_inventory", lambda environ: Inventory((Host("a", devices=devices),)))
    monkeypatch.setattr(group, "LocalRanks", local_ranks)
    with pytest.raises(Started):
        async with group.open_trainer(Config.model_validate(tree)):
            pass
    assert [(ranks.ranks, ranks.visible) for ranks in started] == [((0, 1), visible)]


@pytest.mark.parametrize(
    ("threads", "offloaded", "cuda", "expected"),
    [(None, 1.0, True, 2), (None, 0.0, True, 1), (None, 1.0, False, 1), (5, 1.0, True, 5)],
)
def test_an_optimizer_in_host_memory_has_a_share_of_the_hosts_cores(threads, offloaded, cuda, expected, monkeypatch):
    from megatron_fleet.config.schema import OptimizerConfig, PolicyConfig
    from megatron_fleet.trainer.megatron import policy

    optimizer = OptimizerConfig(lr=1e-3, offload_fraction=offloaded)
    section = PolicyConfig(micro_batch_tokens=64, threads=threads, optimizer=optimizer)
    rank = object.__new__(policy.MegatronPolicy)
    rank._config = SimpleNamespace(policy=section)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(policy.device, "device", lambda: SimpleNamespace(type="cuda" if cuda else "cpu"))
    assert rank._threads() == expected
