"""Engines get their host and their devices by name."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray
from rollout_config import rollout_config

from megatron_fleet.cluster.inventory import LOOPBACK, Device, Host, Inventory
from megatron_fleet.cluster.placement import EnginePlace
from megatron_fleet.rollout import actors
from megatron_fleet.rollout.actors import ActorSettings, engine_options, worker_options
from megatron_fleet.rollout.collector import Collector
from megatron_fleet.rollout.components import ComponentLost

GPUS = tuple(Device(i, f"GPU-{i:04d}", "H100", 80 << 30) for i in range(4))
SETTINGS = ActorSettings(
    logs=Path("logs"),
    episode_python=Path("python"),
    token="secret",
    env_vars={"MARK": "run"},
    engines=(EnginePlace("one", (0, 1)), EnginePlace("two", (3, 2))),
    transport="cuda_ipc",
    inventory=Inventory((Host("one", "10.0.0.1", GPUS), Host("two", "10.0.0.2", GPUS))),
)


def node(address: str, letter: str, alive: bool = True) -> dict:
    return {"NodeID": letter * 56, "Alive": alive, "NodeManagerAddress": address}


def test_an_engine_is_bound_to_its_node_and_sees_its_devices_only(monkeypatch):
    nodes = [node("10.0.0.1", "a"), node("10.0.0.2", "b"), node("10.0.0.2", "c", alive=False)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    first, second = (engine_options(SETTINGS, index) for index in (0, 1))
    assert (first["num_gpus"], second["num_gpus"]) == (0, 0)
    assert first["scheduling_strategy"].node_id == "a" * 56
    assert second["scheduling_strategy"].node_id == "b" * 56 and not second["scheduling_strategy"].soft
    variables = second["runtime_env"]["env_vars"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0003,GPU-0002" and variables["MARK"] == "run"
    assert variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert variables["PATH"].startswith(f"{sys.prefix}/bin:")  # ninja
    assert (SETTINGS.engine_host(0), SETTINGS.engine_host(1)) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(("episodes", "workers"), [(3000, 1), (4096, 2)])
def test_a_worker_answers_calls_besides_all_its_episodes(monkeypatch, episodes, workers):
    """By default Ray lets 1,000 calls of an actor run at once."""
    monkeypatch.setattr(ray, "nodes", lambda: [node("10.0.0.1", "a"), node("10.0.0.2", "b")])
    config = rollout_config(Path("none"), episodes_in_flight=episodes, workers=workers)
    options = worker_options(config, SETTINGS, 0)
    collector = Collector(config.rollout, config.env, [], [object() for _ in range(workers)], None)
    assert options["max_concurrency"] > max(collector._free.values()) >= episodes / workers
    assert options["scheduling_strategy"].node_id in ("a" * 56, "b" * 56)


def test_a_worker_answers_calls_of_both_kinds_of_engines(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [node("10.0.0.1", "a"), node("10.0.0.2", "b")])
    config = rollout_config(Path("none"), episodes_in_flight=3000, workers=1)
    both = replace(SETTINGS, engines=(*SETTINGS.engines, EnginePlace("one", (), evaluation=True)))
    engine = SimpleNamespace(name="engine 0")
    collector = Collector(config.rollout, config.env, [engine], [object()], None)
    beside = Collector(config.rollout, config.env, [engine], [object()], None, collector)
    places = sum(max(one._free.values()) for one in (collector, beside))
    assert worker_options(config, both, 0)["max_concurrency"] > places >= 6000
    assert [both.engine_name(i) for i in range(3)] == ["engine 0", "engine 1", "evaluation engine 0"]
    joined = both.with_host(Host("three", "10.0.0.3"), [EnginePlace("three", ())])
    assert (joined.engine_name(3), joined.engine_host(3), joined.eval_engines) == ("engine 2", "10.0.0.3", 1)
    assert [both.engine_log(i).name for i in (1, 2)] == ["engine-1.log", "eval-engine-0.log"]


def test_a_host_that_left_the_cluster_is_named(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [node("10.0.0.1", "a")])
    with pytest.raises(ComponentLost, match=r"no Ray node has the address 10\.0\.0\.2"):
        engine_options(SETTINGS, 1)


def test_without_devices_an_engine_is_given_none():
    alone = replace(SETTINGS, engines=(EnginePlace("one", ()),), inventory=Inventory((Host("one", LOOPBACK),)))
    options = engine_options(alone, 0)
    assert options["num_gpus"] == 0 and "scheduling_strategy" not in options
    assert not {"CUDA_VISIBLE_DEVICES", "PATH"} & options["runtime_env"]["env_vars"].keys()


async def test_a_worker_has_its_secrets_and_its_log_before_anything_of_it_is_made(monkeypatch):
    done = []

    class Worker:
        def __init__(self, *arguments):
            done.append(("made", *arguments, os.environ.get("A_KEY")))

        async def play(self, spec):
            return f"played {spec}"

        async def abort(self, collection):
            done.append(("aborted", collection))

    monkeypatch.setenv("A_KEY", "of the controller")
    monkeypatch.setitem(sys.modules, "megatron_fleet.rollout.worker", SimpleNamespace(EpisodeWorker=Worker))
    monkeypatch.setattr(actors, "write_output_to", lambda log: done.append(("log", log)))
    monkeypatch.setattr(actors, "write_stacks_on_signal", lambda: done.append(("stacks",)))
    monkeypatch.setattr(actors, "take_normal_priority", lambda: done.append(("priority",)))
    worker = actors.WorkerActor(Path("w.log"), {"A_KEY": "secret"}, 1, "two")
    assert done[0] == ("log", Path("w.log")) and done[-1] == ("made", 1, "two", "secret")
    assert {("stacks",), ("priority",)} <= set(done)
    assert await worker.play("a") == "played a"
    await worker.abort(4)
    assert done[-1] == ("aborted", 4)
