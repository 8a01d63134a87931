"""The guard of a run's updates, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

from megatron_fleet.config.schema import Config
from megatron_fleet.debug.dumps import Dumps
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.trainer.base import Trainer


def make_guard(config: Config, trainer: Trainer) -> StepGuard:
    """A guard as `loop.train` makes it."""
    dumps = Dumps(Path(config.run.out) / "dumps", config.policy.safety.max_dumps, config)
    return StepGuard(config.policy, trainer, dumps)
