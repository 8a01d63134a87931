"""Section `env`: environments, their servers, limits, injected faults and starting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.names import NameOrPath, is_path
from megatron_fleet.config.sections.base import Rule, Section, url_problem

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


Value = str | int | float | bool


class OpenEnvConfig(Section):
    interface: Literal["auto", "mcp", "action"] = Field(
        "auto",
        description="mcp: the server lists tools and calls them; action: its action is the one tool; auto: mcp if it "
        "lists tools when asked, or if its action calls a tool. A server with a very lenient action takes the question "
        "for an action.",
    )
    action_tool: str | None = Field(None, description="Name of the one tool; null: the title of the action's schema.")
    tool_descriptions: dict[str, str] = Field(
        {},
        description="Descriptions of tools, by name, in place of the server's; that of the one tool is the text of a "
        "class in the server's code.",
    )
    finish_tool: str | None = Field(
        None, description="Tool that ends an episode, called with the final answer and hidden from the policy."
    )
    verify_tool: str | None = Field(
        None, description="Tool that scores the episode, called at its end and hidden from the policy."
    )
    final_calls: dict[str, dict[str, Value]] = Field(
        {},
        description="Arguments of finish_tool and verify_tool, by their names; without: the final answer where a "
        "listed tool has a place for it. `episode:final_answer` stands for it, `task:FIELD` as in reset_kwargs. A name "
        "here need not be a tool that the server lists; with interface=action it names an action, its fields.",
    )
    reward: Literal["finish", "last", "sum"] = Field(
        "finish",
        description="Reward to use. finish: that of verify_tool, finish_tool or the final step; last: the latest; sum: "
        "the total of all steps.",
    )
    unfinished_reward: float | None = Field(
        0.0,
        description="Reward of an episode in which the policy did not act, or stopped before the environment ended it: "
        "the environment's lowest. null: unknown, which lets a policy dodge a negative reward.",
    )
    reset_kwargs: dict[str, Value | dict[str, Value]] = Field(
        {},
        description="More arguments of reset; `task:data_key` or `task:env_variables.NAME` stand for the task's value.",
    )
    shown_metadata: tuple[str, ...] = Field(
        (),
        description="Fields of the reset observation's metadata that the policy sees, such as question. The others, "
        "which may hold the solution, it never sees.",
    )
    hidden_fields: tuple[str, ...] = Field(
        (), description="Fields of the observations that the policy does not see, such as screenshot."
    )


class FleetConfig(Section):
    package: str | None = Field(
        None, description="Folder that fleet-ai/OpenEnv was installed into with `pip install --no-deps --target`."
    )
    ttl_s: int = Field(1800, ge=1, description="Seconds after which Fleet deletes an instance that nobody deleted.")
    settle_s: float = Field(8.0, ge=0, description="Seconds between the making of an instance and its first request.")
    partial_reward: bool = Field(False, description="Score a failed verifier by the share of its checks that passed.")
    ca_file: str | None = Field(
        None,
        description="PEM file with the authorities of Fleet's hosts; reading all of the world's costs 30 ms per call.",
    )


class FaultRatesConfig(Section):
    slow_rate: float = Field(0, ge=0, le=1, description="Share of tool calls that take `slow_s` longer.")
    slow_s: float = Field(1.0, gt=0, description="Seconds that a slow tool call waits.")
    latency_median_s: float = Field(0, ge=0, description="Median seconds that every tool call waits, log-normal.")
    latency_sigma: float = Field(
        1.0, ge=0, description="Standard deviation of the logarithm of these waits; 1: one in 100 is 10 × as long."
    )
    hang_rate: float = Field(0, ge=0, le=1, description="Share of episodes in which a tool call never answers.")
    malformed_rate: float = Field(0, ge=0, le=1, description="Share of tool calls whose answer is damaged.")
    dead_session_rate: float = Field(0, ge=0, le=1, description="Share of episodes whose session dies under a call.")
    verifier_failure_rate: float = Field(0, ge=0, le=1, description="Share of verifications without a verdict.")


class ProvisioningConfig(Section):
    lookahead: int = Field(
        4,
        ge=0,
        le=100_000,
        description="Environments that are reset before a place for their episode is free; over all workers.",
    )
    starts_at_once: int = Field(
        8,
        ge=1,
        description="Initial limit of concurrent resets per environment key, over all workers; adapts to the server.",
    )
    max_starts_at_once: int = Field(256, ge=1, description="Upper bound of that limit.")
    quick_s: float = Field(1.0, gt=0, description="Resets faster than this are never taken for queueing at the server.")
    wait_s: float = Field(600, gt=0, description="Longest wait for an environment: the queue, resets and retries.")
    breaker_window: int = Field(
        20, ge=1, description="Number of latest episodes per environment key that a circuit breaker considers."
    )
    breaker_threshold: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of them without a reward, by the environment's fault, that opens the breaker.",
    )
    breaker_pause_s: float = Field(
        60, gt=0, description="Seconds without new episodes, then one is tried; each failed try doubles the pause."
    )

    def share(self, worker: int, workers: int) -> ProvisioningConfig:
        """Return the limits of worker number ``worker`` of ``workers``; the shares add up to the totals."""

        def part(total: int) -> int:
            return total // workers + (worker < total % workers)

        totals = ("lookahead", "starts_at_once", "max_starts_at_once")
        return self.model_copy(update={name: part(getattr(self, name)) for name in totals})


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """Properties of a kind of environments on which other parts of the program depend.

    Attributes:
        tools: its episodes call tools; elsewhere every call is one of a tool that does not exist.
        scored_by_task: an episode is scored with the verifier of its task.
        embedded: a run starts a server of this package for it, which has tasks of its own.
        hosted: its environments are Fleet's: they take Fleet's key and package, and time to start.
    """

    tools: bool = True
    scored_by_task: bool = False
    embedded: bool = False
    hosted: bool = False


ENVIRONMENT_KINDS: Mapping[str, EnvironmentKind] = MappingProxyType(
    {
        "embedded": EnvironmentKind(scored_by_task=True, embedded=True),
        "openenv": EnvironmentKind(),
        "fleet": EnvironmentKind(scored_by_task=True, hosted=True),
        "python": EnvironmentKind(tools=False),
    }
)
"""Kinds by the value of ``env.kind``; those of a user's own are like ``openenv``."""


class EnvConfig(Section):
    kind: Annotated[str, NameOrPath(tuple(ENVIRONMENT_KINDS))] = Field(
        "embedded",
        description="embedded: the fleet in this package, started for the run; openenv: a server at `url`; fleet: "
        "Fleet's hosted environments (FLEET_API_KEY); python: questions without tools or a server, scored by `reward`; "
        "package.module:name: a class of your own (examples/).",
    )
    reward: Annotated[str, NameOrPath(())] | None = Field(
        None,
        description="Only for kind=python: the function score(text, task) that returns an episode's reward, as "
        "package.module:name (examples/my_reward.py).",
    )
    sandbox: Literal["full", "available"] = Field(
        "available",
        description="Sandbox of the verifiers of kind=embedded. full: refuse machines without user namespaces or "
        "Landlock; available: warn of what is missing. Without seccomp none starts.",
    )
    url: str | None = Field(
        None, description="Base URL of the OpenEnv server; for kind=openenv, and for a class of your own that reads it."
    )
    start_timeout_s: float = Field(60, gt=0, description="Deadline of the environment server's start.")
    make_timeout_s: float = Field(30, gt=0, description="Deadline of connecting to, or making, one environment.")
    reset_timeout_s: float = Field(30, gt=0, description="Deadline of one reset.")
    step_timeout_s: float = Field(30, gt=0, description="Deadline of one tool call.")
    verify_timeout_s: float = Field(30, gt=0, description="Deadline of one verification.")
    close_timeout_s: float = Field(5, gt=0, description="Deadline of giving one environment back.")
    outage_limit_s: float = Field(
        1800,
        ge=0,
        description="While no reward of a step is known, the run waits and plays the step again; after this long it "
        "stops, resumable. The run's own server, if it keeps dying, is restarted for the same time.",
    )
    openenv: OpenEnvConfig = OpenEnvConfig()
    fleet: FleetConfig = FleetConfig()
    faults: FaultRatesConfig = FaultRatesConfig()
    provisioning: ProvisioningConfig = ProvisioningConfig()

    @property
    def about(self) -> EnvironmentKind:
        """Properties of `kind`."""
        return ENVIRONMENT_KINDS.get(self.kind, EnvironmentKind())


TTL_SLACK_S = 60.0
"""Slack for the time between the deadlines and for clock differences."""
FLEET_CALL_S = 62.0
"""Fleet's client ends one attempt of a tool call at 60 s, and the adapter ends the retries 2 s before the deadline."""


def _env_url(c: Config) -> str | None:
    if c.env.kind == "openenv" and not c.env.url:
        return "env.kind=openenv needs the address of the server; add env.url=http://…"
    if c.env.url and (problem := url_problem("env.url", c.env.url, ("http", "https", "ws", "wss"))):
        return problem
    if c.env.kind != "openenv" and not is_path(c.env.kind) and c.env.url:
        return f"env.url={c.env.url} has no effect with env.kind={c.env.kind}; add env.kind=openenv or remove the url."
    return None


def _reward_function(c: Config) -> str | None:
    if c.env.kind == "python" and c.env.reward is None:
        return "env.kind=python needs a function that scores answers; add env.reward=my_reward:score."
    if c.env.kind != "python" and c.env.reward is not None:
        return f"env.reward={c.env.reward} has no effect with env.kind={c.env.kind}; add env=python or remove it."
    return None


def _only_of_this_kind(c: Config) -> str | None:
    for kind, section, untouched in (
        ("openenv", c.env.openenv, OpenEnvConfig()),
        ("fleet", c.env.fleet, FleetConfig()),
    ):
        if c.env.kind == kind or section == untouched:
            continue
        name = next(n for n in type(section).model_fields if getattr(section, n) != getattr(untouched, n))
        value = getattr(section, name)
        return f"env.{kind}.{name}={value} has no effect with env.kind={c.env.kind}; add env.kind={kind} or remove it."
    return None


def _final_calls_of_no_tool(c: Config) -> str | None:
    finish, verify = c.env.openenv.finish_tool, c.env.openenv.verify_tool
    for name in c.env.openenv.final_calls:
        if name not in (finish, verify):
            return (
                f"env.openenv.final_calls={name} has no effect with env.openenv.finish_tool={finish} and "
                f"env.openenv.verify_tool={verify}; name it in one of these or remove it."
            )
    return None


def _embedded_tasks(c: Config) -> str | None:
    if c.env.kind == "embedded" or c.data.tasks != "embedded":
        return None
    return (
        f"data.tasks=embedded names the embedded fleet's tasks, but env.kind={c.env.kind} plays elsewhere; write them "
        f"to a file with `mfleet data export FILE` and set data.tasks=FILE, or set env.kind=embedded."
    )


def _episode_outlives_its_parts(c: Config) -> str | None:
    episode = c.rollout.episode_timeout_s
    parts = {
        "rollout.engine.request_timeout_s + rollout.sampling.max_tokens_per_turn / rollout.engine.min_tokens_per_s": (
            c.rollout.engine.turn_timeout_s(c.rollout.sampling.max_tokens_per_turn)
        ),
        "env.make_timeout_s": c.env.make_timeout_s,
        "env.reset_timeout_s": c.env.reset_timeout_s,
        "env.step_timeout_s": c.env.step_timeout_s,
        "env.verify_timeout_s": c.env.verify_timeout_s,
    }
    name, longest = max(parts.items(), key=lambda item: item[1])
    if longest < episode:
        return None
    return (
        f"{name}={longest:g} is not below rollout.episode_timeout_s={episode:g}, so the episode would always time out "
        f"first; raise rollout.episode_timeout_s above {longest:g}."
    )


def _instance_outlives_its_episode(c: Config) -> str | None:
    if c.env.kind != "fleet":
        return None
    episode, ttl = c.rollout.episode_timeout_s, c.env.fleet.ttl_s
    # An instance created ahead of time waits for a slot, which is free when another episode has ended.
    waits = episode if c.env.provisioning.lookahead else 0.0
    needed = waits + c.env.reset_timeout_s + episode + c.env.verify_timeout_s + TTL_SLACK_S
    if ttl >= needed:
        return None
    ahead = f"an episode's wait for its place (env.provisioning.lookahead={c.env.provisioning.lookahead}) + "
    return (
        f"env.fleet.ttl_s={ttl} may delete an instance while its episode runs: {ahead if waits else ''}"
        f"env.reset_timeout_s={c.env.reset_timeout_s:g} + rollout.episode_timeout_s={episode:g} + "
        f"env.verify_timeout_s={c.env.verify_timeout_s:g} + {TTL_SLACK_S:g} s of slack are {needed:g} s; raise "
        f"env.fleet.ttl_s to at least {math.ceil(needed)}."
    )


def _tools_may_be_retried(c: Config) -> str | None:
    if c.env.kind != "fleet" or c.env.step_timeout_s > FLEET_CALL_S:
        return None
    return (
        f"env.step_timeout_s={c.env.step_timeout_s:g} is not above the {FLEET_CALL_S:g} s after which Fleet's client "
        f"gives up one try of a tool, so that slow tools would cost whole episodes; raise it to 90."
    )


def _only_the_embedded_fleet_fails_on_purpose(c: Config) -> str | None:
    if c.env.kind == "embedded":
        return None
    for name in FaultRatesConfig.model_fields:
        if name.endswith("_rate") and getattr(c.env.faults, name) > 0:
            return (
                f"env.faults.{name}={getattr(c.env.faults, name):g} has no effect with env.kind={c.env.kind}: only the "
                f"embedded fleet fails on purpose; set env.kind=embedded or env.faults.{name}=0."
            )
    return None


def _slow_is_not_hanging(c: Config) -> str | None:
    faults, limit = c.env.faults, c.env.step_timeout_s
    if not faults.slow_rate or faults.slow_s < limit:
        return None
    return (
        f"env.faults.slow_s={faults.slow_s:g} is not below env.step_timeout_s={limit:g}, so that slow tools would all "
        f"be lost; lower env.faults.slow_s, or use env.faults.hang_rate for tools that never answer."
    )


def _starts_grow(c: Config) -> str | None:
    p = c.env.provisioning
    if p.starts_at_once <= p.max_starts_at_once:
        return None
    return (
        f"env.provisioning.starts_at_once={p.starts_at_once} is above env.provisioning.max_starts_at_once="
        f"{p.max_starts_at_once}; lower the first or raise the second."
    )


def _every_worker_may_start(c: Config) -> str | None:
    total, workers = c.env.provisioning.starts_at_once, c.rollout.workers
    if total >= workers:
        return None
    return (
        f"env.provisioning.starts_at_once={total} is the total of rollout.workers={workers} processes, each of "
        f"which must be able to start one; raise the first or lower the second."
    )


RULES: tuple[Rule, ...] = (
    _env_url,
    _reward_function,
    _only_of_this_kind,
    _final_calls_of_no_tool,
    _embedded_tasks,
    _episode_outlives_its_parts,
    _instance_outlives_its_episode,
    _tools_may_be_retried,
    _only_the_embedded_fleet_fails_on_purpose,
    _slow_is_not_hanging,
    _starts_grow,
    _every_worker_may_start,
)
