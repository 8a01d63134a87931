"""Tasks of a run: those that it trains on and holds out, and how many steps its epochs are."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from pathlib import Path

from megatron_fleet.config.errors import say
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import run_dataset, save_manifest
from megatron_fleet.data.mixture import drawable
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.evaluator import choose, notes

log = logging.getLogger(__name__)


def in_steps(config: Config) -> Config:
    """Return ``config`` with ``run.steps`` in place of ``run.epochs``, if that is given.

    Raises:
        UserError: as for `run_dataset`.
    """
    epochs = config.run.epochs
    if epochs is None:
        return config
    tasks = drawable(run_dataset(config).split.train, config.data.mixture)
    steps = math.ceil(Fraction(str(epochs)) * tasks / config.rollout.prompts_per_step)
    say(f"run.epochs={epochs:g} of {tasks} tasks are {steps} steps of {config.rollout.prompts_per_step} prompts")
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps, "epochs": None})})


def load_data(config: Config) -> tuple[list[Task], list[Task]]:
    """Load the training and held-out tasks; the split is written to the run's outputs.

    Raises:
        UserError: as for `run_dataset`.
    """
    dataset = run_dataset(config)
    train, held_out = dataset.split.train, dataset.split.held_out
    warnings = list(dataset.split.notes)
    if config.eval.in_training:
        warnings += notes(choose(held_out, config.eval.tasks), held_out)
    for warning in warnings:
        log.warning("%s", warning)
    save_manifest(dataset, Path(config.run.out))
    return train, held_out
