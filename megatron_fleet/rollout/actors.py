"""Ray actors of a rollout: their hosts, interpreters and environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.cluster.inventory import LOOPBACK, Host, Inventory
from megatron_fleet.cluster.launcher import write_output_to
from megatron_fleet.config.schema import HOSTED, Config
from megatron_fleet.config.secrets import SERVICE, STORE, of_environments, secrets, take_secrets
from megatron_fleet.envs.registry import environment_token
from megatron_fleet.platform.processes import imports_uncollected, take_normal_priority, write_stacks_on_signal
from megatron_fleet.rollout import engine_arguments
from megatron_fleet.rollout.components import ComponentLost
from megatron_fleet.rollout.engine_toolkit import toolkit_environment
from megatron_fleet.rollout.policy import EndpointAccess, EngineAccess
from megatron_fleet.rollout.ray_local import live_nodes
from megatron_fleet.rollout.requests import EpisodeSpec
from megatron_fleet.rollout.sampler import sampler_class

if TYPE_CHECKING:
    from megatron_fleet.agents.chat_client import Dialect
    from megatron_fleet.cluster.placement import EnginePlace


CONTROL_CALLS = 64
"""Calls that a worker answers besides those for its episodes."""


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Hosts, devices, interpreters and environment variables of a rollout's actors.

    Attributes:
        logs: folder of the log files.
        episode_python: interpreter of the episode environment.
        token: the run's secret, which engines require.
        env_vars: set in every process of the run.
        engines: place of each engine; none when an endpoint plays. Those of hosts that joined later are at the end,
            also after their hosts have left.
        transport: name of the weight transport.
        inventory: the hosts of the run, the controller's first.
        dialect: how `eval.endpoint` is asked, which then plays the episodes; ``None``: the engines play.
    """

    logs: Path
    episode_python: Path
    token: str
    env_vars: dict[str, str]
    engines: Sequence[EnginePlace]
    transport: str
    inventory: Inventory
    dialect: Dialect | None = None

    @property
    def host(self) -> str:
        """Address of the controller's host, where the environment server runs."""
        return self.inventory.hosts[0].address

    @property
    def eval_engines(self) -> int:
        """Number of engines that play evaluations only."""
        return sum(place.evaluation for place in self.engines)

    def engine_name(self, index: int) -> str:
        """Return an engine's name, with its number among those of its kind."""
        evaluation = self.engines[index].evaluation
        number = sum(place.evaluation == evaluation for place in self.engines[:index])
        return f"evaluation engine {number}" if evaluation else f"engine {number}"

    def engine_log(self, index: int) -> Path:
        name = self.engine_name(index).replace("evaluation", "eval").replace(" ", "-")
        return self.logs / f"{name}.log"

    def engine_host(self, index: int) -> str:
        """Return the address of an engine's host."""
        return self.inventory.host(self.engines[index].host).address

    def worker_host(self, index: int) -> str:
        """Return the address of an episode worker's host; workers are assigned to the hosts round-robin."""
        hosts = [host.address for host in self.inventory.hosts if host.rollout and not host.rollout_only]
        return hosts[index % len(hosts)]

    def with_host(self, host: Host, engines: Sequence[EnginePlace]) -> ActorSettings:
        """Return these with a host that has joined, or joined again, and places of engines on it."""
        hosts = tuple(one for one in self.inventory.hosts if one.name != host.name)
        return replace(self, inventory=Inventory((*hosts, host)), engines=[*self.engines, *engines])

    def engine_devices(self, index: int) -> dict[str, str]:
        """Return variables that assign an engine its devices by UUID, and keep Ray from assigning others."""
        place = self.engines[index]
        if not place.devices:
            return {}
        visible = self.inventory.visible_devices(place.host, place.devices)
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class WorkerActor:
    """EpisodeWorker as a Ray actor. The worker's module can be imported in the episode environment only."""

    def __init__(self, log: Path, secrets: dict[str, str], *args: Any) -> None:
        """Args: ``secrets``: variables that the clients of environments and endpoint read."""
        write_output_to(log)
        write_stacks_on_signal()
        take_normal_priority()
        take_secrets(secrets)
        with imports_uncollected():
            from megatron_fleet.rollout.worker import EpisodeWorker

        self._worker = EpisodeWorker(*args)

    async def play(self, spec: EpisodeSpec) -> Trajectory:
        return await self._worker.play(spec)

    async def abort(self, collection: int) -> None:
        await self._worker.abort(collection)

    async def forget_failures(self) -> None:
        await self._worker.forget_failures()

    async def engine_moved(self, before: str, now: str) -> None:
        self._worker.policy.engine_moved(before, now)

    async def engine_leaves(self, address: str) -> None:
        self._worker.policy.engine_leaves(address)

    async def policy_dead(self) -> str | None:
        return self._worker.policy.dead


def engine_options(settings: ActorSettings, index: int) -> dict[str, Any]:
    """Return Ray's options for an engine's actor. Raises ComponentLost when the engine's host is not in the cluster."""
    devices = settings.engine_devices(index)
    env_vars = settings.env_vars | engine_arguments.environment(bool(devices)) | devices
    if devices:
        env_vars |= toolkit_environment(os.environ)
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "runtime_env": {"env_vars": env_vars}}
    host = settings.engine_host(index)
    if host == LOOPBACK:
        return options  # an existing cluster (RAY_ADDRESS) knows its node by another address
    if (node := live_nodes().get(host)) is None:
        raise ComponentLost(f"no Ray node has the address {host}")
    return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def make_engine(config: Config, settings: ActorSettings, index: int) -> Any:
    """Create the actor of an engine. Raises ComponentLost as `engine_options` does."""
    sampler = sampler_class(config.rollout.sampler)
    actor = ray.remote(sampler).options(**engine_options(settings, index))
    families = STORE if settings.transport == "disk" else SERVICE if config.rollout.sampler == HOSTED else ()
    log = settings.engine_log(index)
    return actor.remote(config, settings.token, log, settings.transport, secrets(os.environ, families))


def worker_options(config: Config, settings: ActorSettings, index: int) -> dict[str, Any]:
    """Return Ray's options for a worker's actor, which plays its share of the episodes, each in a call of its own."""
    rollout = config.rollout
    env_vars = settings.env_vars | {"OMP_NUM_THREADS": "1"}
    runtime_env = {"py_executable": str(settings.episode_python), "env_vars": env_vars}
    lookahead = config.env.provisioning.lookahead
    most = rollout.most_in_flight(endpoint=settings.dialect is not None) + lookahead
    calls = math.ceil(most / rollout.workers) + CONTROL_CALLS
    if settings.eval_engines:
        calls += math.ceil((rollout.most_evaluated(settings.eval_engines) + lookahead) / rollout.workers)
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": runtime_env, "max_concurrency": calls}
    if (node := live_nodes().get(settings.worker_host(index))) is not None:  # otherwise Ray chooses the host
        # Hard affinity: Ray ignores a soft one of an actor without CPUs.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return options


def make_worker(
    config: Config, settings: ActorSettings, index: int, environment_url: str, endpoints: Sequence[str]
) -> Any:
    """Create the actor of an episode worker. ``endpoints``: addresses of the engines, those of evaluations last."""
    rollout, env = config.rollout, config.env
    share = env.model_copy(update={"provisioning": env.provisioning.share(index, rollout.workers)})
    host = settings.worker_host(index)
    own_secrets = secrets(os.environ, of_environments(env))
    own = len(endpoints) - settings.eval_engines
    access: EngineAccess | EndpointAccess = EngineAccess(
        config.model.folder, endpoints[:own], settings.token, host, endpoints[own:]
    )
    if settings.dialect is not None:
        access = EndpointAccess(config.eval.endpoint.model_dump(), settings.dialect)
        own_secrets |= {n: v for n, v in os.environ.items() if n == config.eval.endpoint.api_key_env}
    actor = ray.remote(WorkerActor).options(**worker_options(config, settings, index))
    return actor.remote(
        settings.logs / f"worker-{index}.log",
        own_secrets,
        access,
        rollout.model_dump(),
        share.model_dump(),
        config.agent.model_dump(),
        environment_url,
        environment_token(settings.token),
    )
