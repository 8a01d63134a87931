"""Interfaces of the parts that a user may supply as ``package.module:name``, by configuration key.

The types are named for readers and type checkers and imported by neither side: `extension.load` compares the number of
arguments, and whether the part is ``async``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from megatron_fleet.agents.engine import Engine
    from megatron_fleet.agents.settings import EpisodeSettings
    from megatron_fleet.agents.trajectory import Group, Trajectory
    from megatron_fleet.algorithms.loss_inputs import LossInputs
    from megatron_fleet.algorithms.policy_terms import TermResult
    from megatron_fleet.config.schema import AlgorithmConfig, Config, EnvConfig
    from megatron_fleet.data.task import Task
    from megatron_fleet.envs.base import Environment
    from megatron_fleet.models.chat.renderer import Renderer
    from megatron_fleet.models.registry import Family
    from megatron_fleet.telemetry.sinks import MetricSink
    from megatron_fleet.weight_sync.registry import Halves


class PolicyTerm(Protocol):
    def __call__(self, inputs: LossInputs, algorithm: AlgorithmConfig, /) -> TermResult:
        """Return the objective J_t ``[A]`` of a micro-batch's trained tokens, and named metric sums.

        The advantage and the normaliser are inside; the negated sum of J_t is the loss.
        """
        ...


class AdvantageEstimator(Protocol):
    def __call__(self, rewards: np.ndarray, /) -> np.ndarray:
        """Return the advantages, float64 ``[K]``, of the known rewards of one group, float64 ``[K]`` with K ≥ 2."""
        ...


class RewardShaping(Protocol):
    def __call__(self, group: Group, algorithm: AlgorithmConfig, /) -> Sequence[float | None]:
        """Return the rewards of which advantages are made, one per trajectory; those of unknown ones are ignored."""
        ...


class GroupFilter(Protocol):
    def __call__(self, group: Group, rewards: Sequence[float | None], /) -> bool:
        """Return whether a group is trained on. ``rewards``: shaped, one per trajectory; unknown ones are ``None``."""
        ...


class EnvironmentFactory(Protocol):
    def __call__(self, config: EnvConfig, episode: str | None, /) -> Environment:
        """Return the environment of one episode. ``episode``: its name."""
        ...


class RewardFunction(Protocol):
    def __call__(self, text: str, task: Task, /) -> float | None:
        """Return the reward of one episode, or ``None`` if it is not known. May be ``async``.

        Args:
            text: what the policy answered, see `envs.python.answer_text`.
            task: with its private ``answer``.
        """
        ...


class Agent(Protocol):
    async def __call__(
        self,
        task: Task,
        group: int,
        sample: int,
        env: Environment,
        engine: Engine,
        renderer: Renderer,
        settings: EpisodeSettings,
        seed: int | None,
        session: str,
        /,
    ) -> Trajectory:
        """Play ``task`` once; see `agents.token_conversation.run_episode` for the arguments.

        The trajectory holds every token that the engine was given or sampled (`TrajectoryBuilder` collects them), an
        outcome, and the verifier's reward or ``None``. The caller closes the environment. Any exception ends the
        episode as ``aborted``, with an unknown reward.
        """
        ...


class RendererFactory(Protocol):
    def __call__(self, folder: Path, thinking: bool, /) -> Renderer:
        """Return the renderer for the model in ``folder``. ``thinking``: rollout.thinking."""
        ...


class FamilyFactory(Protocol):
    def __call__(self, /) -> Family:
        """Return what a folder in ``models/`` provides: the architectures, and chat formats if they are its own."""
        ...


class TransportFactory(Protocol):
    def __call__(self, /) -> Halves:
        """Return the classes of the transport."""
        ...


class LoggerFactory(Protocol):
    def __call__(self, config: Config, resumed_step: int | None, started: float, /) -> MetricSink:
        """Return the logger of an attempt.

        Args:
            resumed_step: the logger drops newer steps; ``None`` = a new run.
            started: unix time of this attempt.
        """
        ...


@dataclass(frozen=True, slots=True)
class Interface:
    """Interface of one kind of part.

    Attributes:
        part: its name in words.
        signature: protocol with the ``__call__`` of the object that the key names.
        runs_in: processes that call it, in words.
        environments: Python environments of these processes.
        awaited: async methods of what it returns, checked if the key names a class.
        may_be_async: both an ``async`` function and another one are accepted.
    """

    part: str
    signature: type
    runs_in: str
    environments: tuple[Literal["engine", "episode"], ...] = ("engine",)
    awaited: tuple[str, ...] = ()
    may_be_async: bool = False

    @property
    def arguments(self) -> dict[str, str]:
        """Positional arguments: name → type."""
        _, *arguments = inspect.signature(self.signature.__call__).parameters.values()
        return {argument.name: argument.annotation for argument in arguments}

    @property
    def result(self) -> str:
        """Type of the result, which the caller awaits if the part is asynchronous."""
        return str(inspect.signature(self.signature.__call__).return_annotation)

    @property
    def is_async(self) -> bool:
        """Whether the part must be an ``async`` function."""
        return inspect.iscoroutinefunction(self.signature.__call__)

    @property
    def spelt(self) -> str:
        """Arguments as they stand in a function definition."""
        return f"({', '.join(f'{name}: {kind}' for name, kind in self.arguments.items())})"


INTERFACES: Mapping[str, Interface] = MappingProxyType(
    {
        "algorithm.loss": Interface("loss", PolicyTerm, "trainer ranks"),
        "algorithm.advantage": Interface("advantage estimator", AdvantageEstimator, "controller"),
        "algorithm.reward_shaping": Interface("reward shaping", RewardShaping, "controller"),
        "algorithm.group_filter": Interface("group filter", GroupFilter, "controller"),
        "env.kind": Interface(
            "environment",
            EnvironmentFactory,
            "episode workers",
            ("episode",),
            awaited=("reset", "step", "verify", "close"),
        ),
        "env.reward": Interface("reward function", RewardFunction, "episode workers", ("episode",), may_be_async=True),
        "agent.kind": Interface("agent: the whole episode", Agent, "episode workers", ("episode",)),
        "rollout.renderer": Interface("chat format", RendererFactory, "episode workers", ("episode",)),
        "model.family": Interface(
            "model family", FamilyFactory, "every process that reads a model", ("engine", "episode")
        ),
        "rollout.engine.transport": Interface(
            "weight sync transport", TransportFactory, "controller, trainer ranks, engines"
        ),
        "logging.own": Interface("logger", LoggerFactory, "controller"),
    }
)
"""Interfaces by the configuration key that names a part."""
