"""Section `data.mixture`: distribution of a step's prompts over environments, and the curriculum."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class CurriculumConfig(Section):
    signal_weights: bool = Field(
        False, description="Lower the weight of environments whose groups give no signal (all solved, or all failed)."
    )
    floor: float = Field(0.2, gt=0, le=1, description="Share of its weight that an environment without signal keeps.")
    half_life: float = Field(
        64.0, gt=0, description="Groups of an environment after which a measurement of its signal counts half."
    )
    prior: float = Field(1.0, ge=0, le=1, description="Signal of an environment that was not measured yet.")
    defer_after: int = Field(
        0, ge=0, description="Groups without signal in a row after which a task is deferred; 0: never."
    )
    defer_passes: int = Field(
        2, ge=1, description="Passes over its environment's tasks that leave a deferred task out."
    )


class MixtureConfig(Section):
    weights: Literal["proportional", "temperature", "uniform", "explicit"] = Field(
        "proportional",
        description="Environments weigh their number of tasks, that number to the power of 1 / `temperature`, "
        "all the same, or what `shares` says.",
    )
    temperature: float | None = Field(
        None, gt=0, description="Only for weights=temperature: 1 = proportional, large = uniform."
    )
    shares: dict[str, float] = Field(
        {}, description="Only for weights=explicit: weight of every environment, in any unit; 0 leaves it out."
    )
    min_per_env: int = Field(0, ge=0, description="Prompts that every environment gets at each step.")
    curriculum: CurriculumConfig = CurriculumConfig()
