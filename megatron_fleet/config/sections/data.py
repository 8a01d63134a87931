"""Section `data`: task selection, the split into training and evaluation, and the mixture of a step's prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Rule, Section

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


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


class DataConfig(Section):
    tasks: str = Field(
        description="Task file (JSON, JSON Lines, CSV, Parquet; a path, `s3://…` or `gs://…`) or a folder of `mfleet "
        "data prepare`. `embedded` = the embedded fleet's own tasks."
    )
    duplicates: Literal["refuse", "first"] = Field(
        "refuse", description="What to do with rows of one task key: refuse the file, or keep the first of them."
    )
    modality: Literal["all", "tool_use", "computer_use", "browser_use"] = Field(
        "all", description="Play tasks of this modality only."
    )
    environments: tuple[str, ...] = Field((), description="Play tasks of these environments only; []: all.")
    difficulties: tuple[Literal[1, 2, 3], ...] = Field(
        (), description="Play tasks of these difficulties (1, 2, 3) only; []: all, also those without one."
    )
    exclusions: tuple[str, ...] = Field(
        (),
        description="Lists of tasks to leave out: names of files in megatron_fleet/data/exclusions, or paths of your "
        "own YAML or JSON files like them.",
    )
    max_tasks: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tasks to play, by environment in proportion, chosen by a hash of the key.",
    )
    eval_fraction: float = Field(
        0.2, gt=0, lt=1, description="Held-out share, by a fixed hash threshold of the task key."
    )
    min_eval_per_env: int = Field(
        0,
        ge=0,
        description="Environments that would have fewer evaluation tasks than this (their tasks × eval_fraction) keep "
        "all tasks for training.",
    )
    expected_eval_per_env: int | None = Field(
        None,
        ge=1,
        description="In an environment of n tasks the threshold is this number / n, where that is below eval_fraction, "
        "so that about this many of its tasks are held out.",
    )
    max_eval_per_env: int | None = Field(
        None, ge=1, description="Maximum number of evaluation tasks of one environment; the others return to training."
    )
    max_eval: int | None = Field(
        None,
        ge=1,
        description="Maximum number of evaluation tasks, taken from environments in turn; others return to training.",
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


def _temperature(c: Config) -> str | None:
    m = c.data.mixture
    if m.weights == "temperature" and m.temperature is None:
        return (
            "data.mixture.weights=temperature needs a temperature; add data.mixture.temperature=… "
            "(1 = proportional, large = uniform)."
        )
    if m.weights != "temperature" and m.temperature is not None:
        return (
            f"data.mixture.temperature={m.temperature:g} has no effect with data.mixture.weights={m.weights}; "
            f"remove it or set data.mixture.weights=temperature."
        )
    return None


def _shares(c: Config) -> str | None:
    m = c.data.mixture
    if m.weights != "explicit":
        if not m.shares:
            return None
        return (
            f"data.mixture.shares has no effect with data.mixture.weights={m.weights}; remove it or set "
            f"data.mixture.weights=explicit."
        )
    for env, share in m.shares.items():
        if share < 0:
            return f"data.mixture.shares: {env} has {share:g}; a weight must be 0 (left out) or above."
    if not sum(m.shares.values()):
        return (
            "data.mixture.weights=explicit needs an environment with a weight above 0; add "
            "data.mixture.shares={environment: weight, …}."
        )
    return None


def _curriculum(c: Config) -> str | None:
    curriculum = c.data.mixture.curriculum
    for switch, off, keys in (
        ("signal_weights", "false", ("floor", "half_life", "prior")),
        ("defer_after", "0", ("defer_passes",)),
    ):
        for key in keys:
            value = getattr(curriculum, key)
            if not getattr(curriculum, switch) and value != type(curriculum).model_fields[key].default:
                return (
                    f"data.mixture.curriculum.{key}={value:g} has no effect with data.mixture.curriculum.{switch}="
                    f"{off}; remove it or switch that on."
                )
    return None


RULES: tuple[Rule, ...] = (
    _temperature,
    _shares,
    _curriculum,
)
