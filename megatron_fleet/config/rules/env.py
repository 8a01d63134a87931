"""Validation rules for `env`: kinds of environment, their tasks and their timeouts."""

from __future__ import annotations

import math

from megatron_fleet.config.extension import is_path
from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections.fleet import FleetConfig
from megatron_fleet.config.sections.openenv import OpenEnvConfig
from megatron_fleet.config.urls import url_problem

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
        "rollout.engine.request_timeout_s": c.rollout.engine.request_timeout_s,
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


RULES: tuple[Rule, ...] = (
    _env_url,
    _only_of_this_kind,
    _final_calls_of_no_tool,
    _embedded_tasks,
    _episode_outlives_its_parts,
    _instance_outlives_its_episode,
    _tools_may_be_retried,
)
