"""The parts that a user may supply as ``package.module:name``, and their check before a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.extension import Interface, load, run_check

REFUSED = 2
"""Exit status of the subprocess of `check_own_part` when `load` fails."""
Environment = Literal["engine", "episode"]


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Where a part is called.

    Attributes:
        module: the module that calls it and declares its `Interface`, imported only where that is asked for.
        name: of the interface there.
        environments: Python environments of the processes that call it.
    """

    module: str
    name: str
    environments: tuple[Environment, ...] = ("engine",)


OWN_PARTS: Mapping[str, OwnPart] = MappingProxyType(
    {
        "algorithm.loss": OwnPart("algorithms.policy_terms", "OWN_LOSS"),
        "algorithm.advantage": OwnPart("algorithms.advantages", "OWN_ADVANTAGE"),
        "algorithm.reward_shaping": OwnPart("algorithms.groups", "OWN_SHAPING"),
        "algorithm.group_filter": OwnPart("algorithms.groups", "OWN_FILTER"),
        "env.kind": OwnPart("envs.registry", "OWN_ENVIRONMENT", ("episode",)),
        "env.reward": OwnPart("envs.python", "OWN_REWARD", ("episode",)),
        "agent.kind": OwnPart("agents.kinds", "OWN_AGENT", ("episode",)),
        "rollout.renderer": OwnPart("models.chat.detection", "OWN_RENDERER", ("episode",)),
        "rollout.sampler": OwnPart("rollout.sampler", "OWN_SAMPLER"),
        "policy.trainer": OwnPart("trainer.registry", "OWN_TRAINER"),
        "model.family": OwnPart("models.registry", "OWN_FAMILY", ("engine", "episode")),
        "rollout.engine.transport": OwnPart("weight_sync.registry", "OWN_TRANSPORT"),
        "logging.own": OwnPart("telemetry.sinks", "OWN_LOGGER"),
    }
)
"""Parts by the configuration key that names one."""


def interface(key: str) -> Interface:
    """Return the interface of the part that a key names; imports the module that calls it."""
    part = OWN_PARTS[key]
    found: Interface = getattr(importlib.import_module(f"megatron_fleet.{part.module}"), part.name)
    return found


def check_own_part(key: str, path: str, python: str = sys.executable) -> None:
    """Run `load` in a subprocess, so that the imports of a user's module, such as torch, stay out of this process.
    It gets no variable that looks like a secret; a component that needs one reads it when it is called.

    Args:
        python: interpreter of the process that will use it.

    Raises:
        UserError: as for `load`, or the subprocess crashes or takes longer than ``CHECK_TIMEOUT_S``.
    """
    command = [python, "-m", "megatron_fleet.preflight.own_parts", key, path]
    done = run_check(command, f"{key}={path}: importing it")
    lines = done.stderr.strip().splitlines()
    if done.returncode == REFUSED and lines:
        raise UserError(lines[-1])
    if done.returncode:
        raise UserError(f"{key}={path}: importing it ends Python with status {done.returncode}: {done.stderr[-300:]}")


def main(key: str, path: str) -> int:
    """Run `load` and return the exit status: `REFUSED`, with the reason on stderr, when it fails."""
    try:
        load(interface(key), path)
    except UserError as error:
        say(str(error), sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
