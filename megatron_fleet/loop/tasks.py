"""Training and held-out tasks of a run."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import Dataset, run_dataset, save_manifest
from megatron_fleet.data.mixture import check_mixture
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.plan import choose, notes

log = logging.getLogger(__name__)


def checked_dataset(config: Config) -> Dataset:
    """Load the dataset of a run, writing nothing.

    Raises:
        UserError: the source is malformed, or one of the two sets is too small for the configuration.
    """
    dataset = run_dataset(config)
    train, held_out = dataset.split.train, dataset.split.held_out
    for name, tasks, least in (
        ("training", train, config.rollout.prompts_per_step),
        ("held-out", held_out, int(config.eval.in_training)),
    ):
        if len(tasks) < least:
            raise UserError(
                f"data.tasks={config.data.tasks}: only {len(tasks)} {name} tasks with "
                f"data.eval_fraction={config.data.eval_fraction:g}, at least {least} are needed; use more tasks, "
                f"or change the fraction."
            )
    check_mixture(train, config.rollout.prompts_per_step, config.data.mixture)
    return dataset


def load_data(config: Config) -> tuple[list[Task], list[Task]]:
    """Load the training and held-out tasks; the split is written to the run's outputs.

    Raises:
        UserError: as for `checked_dataset`.
    """
    dataset = checked_dataset(config)
    train, held_out = dataset.split.train, dataset.split.held_out
    told = list(dataset.split.notes)
    if config.eval.in_training:
        told += notes(choose(held_out, config.eval.tasks), held_out)
    for note in told:
        log.warning("%s", note)
    save_manifest(dataset, Path(config.run.out))
    return train, held_out
