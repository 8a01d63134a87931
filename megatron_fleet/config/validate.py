"""Validation across several keys. Each error names the keys, their values and the fix.

The rules of a section are in its module. Here are those for single values: absurdly large numbers, and texts that
cannot be a path, name or address. Without these they would surface later, as exhausted memory or time, or as an error
of the operating system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections import (
    agent,
    algorithm,
    data,
    env,
    evaluation,
    hosted,
    logging,
    rollout,
    run,
    trainer,
)
from megatron_fleet.config.sections.base import Rule

MAX_NUMBER = 10**15
MAX_TEXT = 4000
"""Characters; Linux limits paths to 4,095 bytes."""
MAX_NAME = 100
"""Characters of a run's name, which becomes part of folder and file names."""
MAX_PROCESSES = 1 << 17
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _numbers(c: Config) -> str | None:
    for name, value in _leaves(c.model_dump()):
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            shown = value if isinstance(value, float) else f"(an integer of {value.bit_length()} bits)"
            return f"{name}={shown} is too large; give a number of at most {MAX_NUMBER:.0e}."
    return None


def _texts(c: Config) -> str | None:
    for name, value in _leaves(c.model_dump()):
        if not isinstance(value, str):
            continue
        if _NO_TEXT.search(value):
            return f"{name}={value[:60]!r} has control characters or is not UTF-8 text; write it without them."
        if len(value) > MAX_TEXT:
            return f"{name} has {len(value)} characters ({value[:40]!r}…); give at most {MAX_TEXT}."
    if len(c.run.name) > MAX_NAME:
        return f"run.name has {len(c.run.name)} characters ({c.run.name[:40]!r}…); give at most {MAX_NAME}."
    return None


def _processes(c: Config) -> str | None:
    p, engine = c.parallel, c.rollout.engine
    counts = {
        f"parallel.tensor={p.tensor} × pipeline={p.pipeline} × context={p.context} × data={p.data}": p.world_size,
        f"rollout.engine.replicas={engine.replicas} × tensor_parallel={engine.tensor_parallel}": engine.count
        * engine.tensor_parallel,
        f"eval.engines={c.eval.engines} × rollout.engine.tensor_parallel={engine.tensor_parallel}": c.eval.engines
        * engine.tensor_parallel,
        "rollout.workers": c.rollout.workers,
        "cluster.nodes": c.cluster.nodes,
    }
    name, most = max(counts.items(), key=lambda item: item[1])
    return (
        f"{name}: {most} are more than {MAX_PROCESSES}, the largest supported number." if most > MAX_PROCESSES else None
    )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value


RULES: tuple[Rule, ...] = (
    *(_numbers, _texts, _processes),
    *hosted.RULES,
    *rollout.RULES,
    *env.RULES,
    *trainer.RULES,
    *algorithm.RULES,
    *evaluation.RULES,
    *data.RULES,
    *agent.RULES,
    *logging.RULES,
    *run.RULES,
)


def check(config: Config) -> None:
    """Reject combinations that cannot work, without accessing files or machines.

    Raises:
        UserError: the first impossible combination found.
    """
    for rule in RULES:
        if problem := rule(config):
            raise UserError(problem)
