"""Engines get their host and their devices by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from rollout_config import rollout_config

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import EnginePlace
from megatron_fleet.rollout import actors
from megatron_fleet.rollout.actors import Place, engine_options
from megatron_fleet.rollout.components import ComponentLost

GPUS = tuple(Device(i, f"GPU-{i:04d}", "H100", 80 << 30) for i in range(4))
INVENTORY = Inventory((Host("one", "10.0.0.1", GPUS), Host("two", "10.0.0.2", GPUS)))
PLACE = Place(
    logs=Path("logs"),
    episode_python=Path("python"),
    token="secret",
    env_vars={"MARK": "run"},
    cuda=True,
    transport="cuda_ipc",
    host="10.0.0.1",
    engines=(EnginePlace("one", (0, 1)), EnginePlace("two", (3, 2))),
    inventory=INVENTORY,
)
CONFIG = rollout_config(Path("model"), engine={"replicas": 2, "tensor_parallel": 2})


def node(address: str, alive: bool = True) -> dict:
    return {"NodeID": address.replace(".", "a"), "Alive": alive, "Resources": {f"node:{address}": 1.0}}


def test_an_engine_is_bound_to_its_node_and_sees_its_devices_only(monkeypatch):
    nodes = [node("10.0.0.2", alive=False), node("10.0.0.1"), node("10.0.0.2") | {"NodeID": "ff"}]
    monkeypatch.setattr(actors.ray, "nodes", lambda: nodes)
    first, second = (engine_options(CONFIG, PLACE, index) for index in (0, 1))
    assert (first["num_gpus"], second["num_gpus"]) == (0, 0)
    assert first["scheduling_strategy"].node_id == node("10.0.0.1")["NodeID"]
    assert second["scheduling_strategy"].node_id == "ff" and not second["scheduling_strategy"].soft
    variables = second["runtime_env"]["env_vars"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0003,GPU-0002" and variables["MARK"] == "run"
    assert variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert (PLACE.engine_host(0), PLACE.engine_host(1)) == ("10.0.0.1", "10.0.0.2")


def test_a_host_that_left_the_cluster_is_named(monkeypatch):
    monkeypatch.setattr(actors.ray, "nodes", lambda: [node("10.0.0.1")])
    with pytest.raises(ComponentLost, match=r"no Ray node has the address 10\.0\.0\.2"):
        engine_options(CONFIG, PLACE, 1)


def test_without_a_placement_ray_counts_devices_and_on_a_cpu_there_are_none():
    anywhere = replace(PLACE, engines=None)
    assert engine_options(CONFIG, anywhere, 0)["num_gpus"] == 2
    options = engine_options(CONFIG, replace(anywhere, cuda=False), 0)
    assert options["num_gpus"] == 0 and "CUDA_VISIBLE_DEVICES" not in options["runtime_env"]["env_vars"]
    assert anywhere.engine_host(1) == "10.0.0.1"
