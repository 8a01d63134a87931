"""Policies of an episode worker: the run's engines, or the model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_fleet.agents.kinds import make_agent
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.envs.base import Environment
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.requests import EngineKind, EpisodeSpec

if TYPE_CHECKING:
    from megatron_fleet.agents.chat_client import Dialect
    from megatron_fleet.config.schema import RolloutConfig


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """Access of a worker to the engines.

    Attributes:
        tokenizer_folder: folder of the model's tokenizer.
        addresses: address of each engine of the rollout.
        token: the run's secret.
        host: address of the worker's host; local engines are preferred.
        eval_addresses: address of each evaluation engine.
    """

    tokenizer_folder: str
    addresses: Sequence[str]
    token: str
    host: str = ""
    eval_addresses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """Access of a worker to an endpoint. ``endpoint``: the dumped section `eval.endpoint`."""

    endpoint: dict[str, Any]
    dialect: Dialect


class Policy(Protocol):
    """The model that plays a worker's episodes.

    Attributes:
        dead: reason why it will not answer any more; ``None`` while it does, or while its owner replaces it.
    """

    @property
    def dead(self) -> str | None: ...

    async def play(self, spec: EpisodeSpec, environment: Environment) -> Trajectory:
        """Play one episode in an environment that has been started."""
        ...

    def engine_moved(self, before: str, now: str) -> None:
        """Use the engine at address ``now`` instead of the one at ``before``; see `EnginePool.moved`."""
        ...

    def engine_leaves(self, address: str) -> None:
        """Send no further requests to an engine."""
        ...


def make_policy(access: EngineAccess | EndpointAccess, rollout: RolloutConfig, settings: EpisodeSettings) -> Policy:
    """Connect to the engines or to the endpoint.

    Raises:
        UserError: the tokenizer folder or the endpoint's key is invalid.
    """
    if isinstance(access, EngineAccess):
        return EnginePolicy(access, rollout, settings)
    timeout_s = rollout.engine.turn_timeout_s(rollout.sampling.max_tokens_per_turn)
    return EndpointPolicy(access, timeout_s, settings)


class EnginePolicy:
    """Policy that the engines serve."""

    dead: str | None = None

    def __init__(self, access: EngineAccess, rollout: RolloutConfig, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._renderer = make_renderer(access.tokenizer_folder, rollout.thinking, rollout.renderer)
        addresses: dict[EngineKind, Sequence[str]] = {"rollout": access.addresses, "eval": access.eval_addresses}
        self._engines = {
            kind: connect(of_kind, access.token, rollout.engine.health_timeout_s, access.host)
            for kind, of_kind in addresses.items()
        }
        self._agent = make_agent(settings.agent.kind)

    def engine_moved(self, before: str, now: str) -> None:
        # An address is one of either kind; engines that are added are the rollout's.
        for engines in self._engines.values() if before else (self._engines["rollout"],):
            engines.moved(before, now)

    def engine_leaves(self, address: str) -> None:
        self._engines["rollout"].leaves(address)

    async def play(self, spec: EpisodeSpec, environment: Environment) -> Trajectory:
        settings = dataclasses.replace(
            self._settings,
            temperature=spec.temperature,
            routing=self._settings.routing and spec.trained,
            images=not spec.trained,
        )
        return await self._agent(
            spec.task,
            environment,
            self._engines[spec.engines],
            self._renderer,
            settings,
            episode_seed(spec),
            f"{spec.collection}/{spec.name}",  # engines keep caches by session
        )


class EndpointPolicy:
    """Model behind an endpoint."""

    def __init__(self, access: EndpointAccess, timeout_s: float, settings: EpisodeSettings) -> None:
        """``timeout_s``: deadline of one request."""
        from megatron_fleet.agents.chat_client import ChatClient

        self._settings = settings
        self._client = ChatClient(EndpointConfig.model_validate(access.endpoint), timeout_s, access.dialect)

    @property
    def dead(self) -> str | None:
        return self._client.dead

    def engine_moved(self, before: str, now: str) -> None:
        """See `Policy`; there are no engines."""

    def engine_leaves(self, address: str) -> None:
        """See `Policy`; there are no engines."""

    async def play(self, spec: EpisodeSpec, environment: Environment) -> Trajectory:
        from megatron_fleet.agents.chat_conversation import run_chat_episode

        settings = dataclasses.replace(self._settings, temperature=spec.temperature)
        return await run_chat_episode(spec.task, environment, self._client, settings, episode_seed(spec))


def episode_seed(spec: EpisodeSpec) -> int | None:
    """Return a seed that differs between any two episodes; ``None``: unseeded.

    Retries of an episode have the same seed, so a failed component or verifier costs time but does not change tokens,
    and failures of the environment do not bias the sampled episodes.
    """
    if spec.seed is None:
        return None
    # The 0 once was the attempt; it keeps the results of existing seeds unchanged.
    return stable_seed(spec.seed, spec.step, spec.task.key, spec.sample, 0)
