"""Sections `logging.wandb` and `logging.mlflow`: trackers that receive a run's metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class WandbConfig(Section):
    project: str | None = Field(
        None, description="Weights & Biases project that metrics go to; none: no W&B. The key is WANDB_API_KEY."
    )
    entity: str | None = Field(None, description="Team or user there; none: the key's own.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: written below run.out/wandb, from where `wandb sync` sends it."
    )


class MlflowConfig(Section):
    uri: str | None = Field(
        None,
        description="MLflow tracking server that metrics go to, or sqlite:///FILE; none: no MLflow. Needs the package "
        "mlflow-skinny. User or token: MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN.",
    )
    experiment: str = Field("megatron_fleet", min_length=1, description="Experiment there, made when there is none.")
