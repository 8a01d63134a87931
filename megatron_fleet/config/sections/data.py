"""Section `data`: task selection and the split into training and evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section
from megatron_fleet.config.sections.mixture import MixtureConfig


class DataConfig(Section):
    tasks: str = Field(
        description="Fleet task file (JSON; a path or `s3://bucket/file.json`) or a folder of `mfleet data prepare`. "
        "`embedded` = the embedded fleet's own tasks."
    )
    duplicates: Literal["refuse", "first"] = Field(
        "refuse", description="What to do with rows of one task key: refuse the file, or keep the first of them."
    )
    modality: Literal["all", "tool_use", "computer_use", "browser_use"] = Field(
        "all", description="Play tasks of this modality only."
    )
    environments: tuple[str, ...] = Field((), description="Play tasks of these environments only; none named = all.")
    difficulties: tuple[Literal[1, 2, 3], ...] = Field(
        (), description="Play tasks of these difficulties (1, 2, 3) only; none named = all, those without one too."
    )
    exclusions: tuple[str, ...] = Field(
        (),
        description="Lists of tasks to leave out: names of files in megatron_fleet/data/exclusions, or paths of your "
        "own YAML or JSON files like them.",
    )
    max_tasks: int | None = Field(
        None, ge=1, description="Most tasks to play, environments in proportion, chosen by a hash of the key."
    )
    eval_fraction: float = Field(
        0.2, gt=0, lt=1, description="Held-out share, by a fixed hash threshold of the task key."
    )
    min_eval_per_env: int = Field(
        0,
        ge=0,
        description="An environment of which fewer evaluation tasks are to be expected (its tasks × eval_fraction) "
        "gives all its tasks to training.",
    )
    expected_eval_per_env: int | None = Field(
        None,
        ge=1,
        description="In an environment of n tasks the threshold is this number / n, where that is below eval_fraction, "
        "so that about this many of its tasks are held out.",
    )
    max_eval_per_env: int | None = Field(
        None, ge=1, description="Most evaluation tasks of one environment; the others return to training."
    )
    max_eval: int | None = Field(
        None,
        ge=1,
        description="Most evaluation tasks in all, taken from the environments in turn; the others return to training.",
    )
    held_out_environments: tuple[str, ...] = Field(
        (), description="Environments that are only evaluated on; at least one of them has to be there."
    )
    max_env_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest share of one environment in the final training tasks. Not applied where it would cut an "
        "environment below an even share, as it would with few environments.",
    )
    split_manifest: str | None = Field(
        None,
        description="`split.json` of another run or prepared folder: its tasks stay on their sides, only new ones are "
        "assigned.",
    )
    mixture: MixtureConfig = MixtureConfig()
