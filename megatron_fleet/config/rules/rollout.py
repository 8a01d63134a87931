"""Validation rules for `rollout`, on its own and combined with the trainer."""

from __future__ import annotations

import re

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections.rollout import TRANSPORT_NAMES


def _row_holds_episode(c: Config) -> str | None:
    if c.policy.micro_batch_tokens >= c.rollout.max_context:
        return None
    return (
        f"policy.micro_batch_tokens={c.policy.micro_batch_tokens} is below "
        f"rollout.max_context={c.rollout.max_context}, so the longest episode would not fit into a micro-batch; raise "
        f"policy.micro_batch_tokens to at least {c.rollout.max_context}."
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


def _colocated(c: Config) -> str | None:
    if c.rollout.engine.colocated and c.precision.fp8_param_gather:
        return (
            "rollout.engine.colocated=true with precision.fp8_param_gather=true: weights that are stored in FP8 cannot "
            "leave the device; set one of them to false."
        )
    return None


def _colocated_plays_no_steps_ahead(c: Config) -> str | None:
    if not c.rollout.engine.colocated or c.rollout.max_staleness == 0:
        return None
    return (
        f"rollout.max_staleness={c.rollout.max_staleness} with rollout.engine.colocated=true: engines that share the "
        f"trainer's devices sleep while it works, so nothing can play ahead; set one of them to 0 or false."
    )


def _weights_url(c: Config) -> str | None:
    url, transport = c.rollout.engine.weights_url, c.rollout.engine.transport
    if url is None:
        return None
    if transport != "disk" and transport in TRANSPORT_NAMES:
        return (
            f"rollout.engine.weights_url requires rollout.engine.transport=disk, but the transport is {transport}; "
            f"set it to disk, or leave the address out."
        )
    if "://" not in url and url.strip():
        return None
    if "@" in url:
        return (
            "rollout.engine.weights_url holds an @, as an address with a key does, which would be written to files; "
            "leave it out."
        )
    if re.fullmatch(r"s3://[^/]+(/.*)?", url):
        return None
    return f"rollout.engine.weights_url={url} is no address of a folder; write a path or s3://bucket/prefix."


RULES: tuple[Rule, ...] = (
    _row_holds_episode,
    _turn_fits_context,
    _temperature,
    _updates_have_groups,
    _ranks_have_trajectories,
    _workers_are_busy,
    _colocated,
    _colocated_plays_no_steps_ahead,
    _weights_url,
)
