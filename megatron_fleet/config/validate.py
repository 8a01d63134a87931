"""Checks that span several keys. Each refusal names the keys, their values and the way out."""

from __future__ import annotations

from collections.abc import Callable

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config


def check(config: Config) -> None:
    """Refuse combinations that cannot work, without looking at files or machines.

    Raises:
        UserError: the first impossible combination found.
    """
    for rule in _RULES:
        if problem := rule(config):
            raise UserError(problem)


def _row_holds_episode(c: Config) -> str | None:
    if c.policy.row_tokens >= c.rollout.max_context:
        return None
    return (
        f"policy.row_tokens={c.policy.row_tokens} is below rollout.max_context={c.rollout.max_context}, so the longest "
        f"episode would not fit into a row; raise policy.row_tokens to at least {c.rollout.max_context}."
    )


def _turn_fits_context(c: Config) -> str | None:
    turn = c.rollout.sampling.max_tokens_per_turn
    if turn < c.rollout.max_context:
        return None
    return (
        f"rollout.sampling.max_tokens_per_turn={turn} leaves no room for a prompt in "
        f"rollout.max_context={c.rollout.max_context}; lower the first or raise the second."
    )


def _temperature(c: Config) -> str | None:
    if c.rollout.sampling.temperature > 0:
        return None
    return (
        "rollout.sampling.temperature=0 makes all samples of a group equal, so nothing could be learnt; set it above 0 "
        "(eval.greedy adds greedy evaluation samples)."
    )


def _env_url(c: Config) -> str | None:
    if c.env.kind == "openenv" and not c.env.url:
        return "env.kind=openenv needs the address of the server; add env.url=http://…"
    if c.env.kind == "openenv" and not str(c.env.url).startswith(("http://", "https://", "ws://", "wss://")):
        return f"env.url={c.env.url} is no address; it must begin with http://, https://, ws:// or wss://."
    if c.env.kind == "embedded" and c.env.url:
        return f"env.url={c.env.url} has no effect with env.kind=embedded; add env.kind=openenv or remove the url."
    return None


def _embedded_tasks(c: Config) -> str | None:
    if c.env.kind == "embedded" or c.data.tasks != "embedded":
        return None
    return (
        "data.tasks=embedded names the embedded fleet's tasks, but env.kind=openenv plays elsewhere; write them to a "
        "file with `mfleet tasks export FILE` and set data.tasks=FILE, or set env.kind=embedded."
    )


def _episode_outlives_its_parts(c: Config) -> str | None:
    episode = c.rollout.episode_timeout_s
    parts = {
        "rollout.engine.request_timeout_s": c.rollout.engine.request_timeout_s,
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


def _updates_have_groups(c: Config) -> str | None:
    if c.policy.updates_per_batch <= c.rollout.prompts_per_step:
        return None
    return (
        f"policy.updates_per_batch={c.policy.updates_per_batch} is more than "
        f"rollout.prompts_per_step={c.rollout.prompts_per_step} groups; lower the first."
    )


def _ranks_have_trajectories(c: Config) -> str | None:
    batch = c.rollout.prompts_per_step * c.rollout.samples_per_prompt // c.policy.updates_per_batch
    if batch >= c.parallel.data:
        return None
    return (
        f"One update has {batch} trajectories for parallel.data={c.parallel.data} ranks; raise "
        f"rollout.prompts_per_step or lower parallel.data."
    )


def _workers_are_busy(c: Config) -> str | None:
    if c.rollout.episodes_in_flight >= c.rollout.workers:
        return None
    return (
        f"rollout.episodes_in_flight={c.rollout.episodes_in_flight} cannot occupy "
        f"rollout.workers={c.rollout.workers} processes; lower rollout.workers."
    )


def _optimizer(c: Config) -> str | None:
    o = c.policy.optimizer
    if not all(0 <= beta < 1 for beta in o.betas):
        return f"policy.optimizer.betas={list(o.betas)}: both must be at least 0 and below 1."
    if o.min_lr > o.lr:
        return f"policy.optimizer.min_lr={o.min_lr:g} is above policy.optimizer.lr={o.lr:g}; lower the first."
    if o.min_lr and o.schedule == "constant":
        return f"policy.optimizer.min_lr={o.min_lr:g} has no effect with schedule=constant; choose linear or cosine."
    return None


_RULES: tuple[Callable[[Config], str | None], ...] = (
    _row_holds_episode,
    _turn_fits_context,
    _temperature,
    _env_url,
    _embedded_tasks,
    _episode_outlives_its_parts,
    _updates_have_groups,
    _ranks_have_trajectories,
    _workers_are_busy,
    _optimizer,
)
