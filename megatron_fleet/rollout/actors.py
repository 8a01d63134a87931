"""The Ray actors of a rollout: where they run, with which interpreter and environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.cluster.inventory import LOOPBACK, Inventory
from megatron_fleet.config.schema import Config
from megatron_fleet.rollout import engine_actor
from megatron_fleet.rollout.components import ComponentLost
from megatron_fleet.rollout.logs import write_output_to
from megatron_fleet.rollout.requests import EpisodeSpec

if TYPE_CHECKING:
    from megatron_fleet.cluster.placement import EnginePlace


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rollout runs.

    Attributes:
        logs: folder of the log files.
        episode_python: interpreter of the episode environment.
        token: the secret that engines ask for.
        env_vars: set in every process of the run.
        cuda: engines run on GPUs.
        transport: name of the transport whose half engines have.
        host: address that engines listen on, unless ``engines`` says another.
        engines: place of each engine; ``None``: Ray chooses.
        inventory: hosts and devices that ``engines`` names.
    """

    logs: Path
    episode_python: Path
    token: str
    env_vars: dict[str, str]
    cuda: bool
    transport: str
    host: str = LOOPBACK
    engines: Sequence[EnginePlace] | None = None
    inventory: Inventory | None = None

    def engine_host(self, index: int) -> str:
        """Address of the host of an engine."""
        if self.engines is None or self.inventory is None:
            return self.host
        return self.inventory.host(self.engines[index].host).address

    def engine_devices(self, index: int) -> dict[str, str]:
        """Variables that give an engine its devices by name, and keep Ray from giving it others."""
        if self.engines is None or self.inventory is None or not self.engines[index].devices:
            return {}
        place = self.engines[index]
        visible = self.inventory.visible_devices(place.host, place.devices)
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class WorkerActor:
    """An EpisodeWorker as a Ray actor. The worker's module exists in the episode environment only."""

    def __init__(self, log: Path, *args: Any) -> None:
        write_output_to(log)
        from megatron_fleet.rollout.worker import EpisodeWorker

        self._worker = EpisodeWorker(*args)

    async def run(self, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
        return await self._worker.run(specs)

    async def abort(self, collection: int) -> None:
        await self._worker.abort(collection)

    async def forget_failures(self) -> None:
        await self._worker.forget_failures()


def engine_options(config: Config, place: Place, index: int) -> dict[str, Any]:
    """Ray's options for an engine's actor. Raises ComponentLost when the engine's host is not part of the cluster."""
    env_vars = place.env_vars | engine_actor.environment(place.cuda) | place.engine_devices(index)
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "runtime_env": {"env_vars": env_vars}}
    if place.engines is None:
        return options | {"num_gpus": config.rollout.engine.tensor_parallel if place.cuda else 0}
    if place.inventory is None or len(place.inventory.hosts) == 1:
        return options  # Ray may call a lone node by another address than the loopback one
    node = _node_at(place.engine_host(index))
    return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def make_engine(config: Config, place: Place, index: int) -> Any:
    """Create the actor of an engine. Raises ComponentLost as `engine_options` does."""
    actor = ray.remote(engine_actor.EngineActor).options(**engine_options(config, place, index))
    return actor.remote(config, place.token, place.logs / f"engine-{index}.log", place.transport)


def make_worker(config: Config, place: Place, index: int, environment_url: str, endpoints: Sequence[str]) -> Any:
    """Create the actor of an episode worker."""
    rollout, env = config.rollout, config.env
    own = env.model_copy(update={"provisioning": env.provisioning.share(index, rollout.workers)})
    runtime_env = {"py_executable": str(place.episode_python), "env_vars": place.env_vars | {"OMP_NUM_THREADS": "1"}}
    actor = ray.remote(WorkerActor).options(num_cpus=0, runtime_env=runtime_env)
    return actor.remote(
        place.logs / f"worker-{index}.log",
        config.model.path,
        rollout.model_dump(),
        own.model_dump(),
        config.agent.model_dump(),
        environment_url,
        endpoints,
        place.token,
    )


def _node_at(host: str) -> str:
    """Id of the live Ray node with this address. Raises ComponentLost."""
    for node in ray.nodes():
        if node["Alive"] and f"node:{host}" in node["Resources"]:
            return str(node["NodeID"])
    raise ComponentLost(f"no Ray node has the address {host}")
