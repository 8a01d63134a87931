"""Section `logging`: files, curve and trackers that receive a run's metrics."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_fleet.config.names import NameOrPath
from megatron_fleet.config.sections.base import Rule, Section, bucket_problem, url_problem

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


class WandbConfig(Section):
    project: str | None = Field(
        None,
        description="Weights & Biases project that metrics go to; null: no W&B. The key is "
        "WANDB_API_KEY_<data.modality>, such as WANDB_API_KEY_TOOL_USE, else WANDB_API_KEY.",
    )
    entity: str | None = Field(None, description="Team or user there; null: the key's own.")
    mode: Literal["online", "offline"] = Field(
        "online",
        description="offline: written below run.out/wandb, from where `wandb sync` sends it. Where the key is not set, "
        "WANDB_MODE=offline sets it.",
    )
    samples: int = Field(
        4,
        ge=0,
        le=100,
        description="Episodes of each step and evaluation that are shown there as a table: prompt, turns, reward, "
        "outcome, environment, task. 0: none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_mode(cls, values: Any) -> Any:
        if isinstance(values, dict) and "mode" not in values and os.environ.get("WANDB_MODE") == "offline":
            return {**values, "mode": "offline"}
        return values


class MlflowConfig(Section):
    uri: str | None = Field(
        None,
        description="MLflow tracking server that metrics go to, or sqlite:///FILE; null: no MLflow. Needs the package "
        "mlflow-skinny. User or token: MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN.",
    )
    experiment: str = Field("megatron_fleet", min_length=1, description="Name of the experiment; created if missing.")


class TrajectoriesConfig(Section):
    max_gb: float | None = Field(
        100.0,
        gt=0,
        description="GB of trajectories and their images in run.out. Beyond it, those of the oldest training steps are "
        "removed, with upload only once they are in the store; evaluations stay. null: all stay.",
    )
    upload: str | None = Field(
        None,
        description="s3://… or gs://…: trajectories of training steps are copied to rollouts/<run.id>/ below it; "
        "those of evaluations go to `eval.upload`.",
    )


class SlackConfig(Section):
    channel: str | None = Field(
        None,
        pattern=r"^(#?[\w-]{1,80}|[CGD][A-Z0-9]{6,})$",
        description="Slack channel to notify, #name or id; null: no Slack. The token of the app is "
        "SLACK_BOT_TOKEN, its scopes chat:write and files:write (docs/run/alerts.md).",
    )
    url: str = Field("https://slack.com/api/", description="Address of Slack's Web API; https://slack-gov.com/api/.")
    cooldown_s: float = Field(
        3600.0,
        ge=0,
        description="Minimum seconds between two Slack messages of the same alert for the same environment.",
    )


class AlertsConfig(Section):
    tool_error_rate: float | None = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of an environment's tool calls that failed in a step, above which there is "
        "an alert; null: never.",
    )
    throughput: float | None = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the usual tokens per second, of generation or training, below which "
        "there is an alert; null: never.",
    )
    stall: float | None = Field(
        5.0,
        gt=1,
        description="A phase of a step that takes this many times as long as the longest of its last 32, and at least "
        "a minute (half an hour before it has ended three times), is an alert, and the stacks of all processes are "
        "written to `run.out/logs/stall-*.txt`; null: never.",
    )


class LoggingConfig(Section):
    tensorboard: bool = Field(True, description="Write TensorBoard event files next to metrics.jsonl.")
    plot: bool = Field(True, description="Draw the learning curve, curve.svg, at the end.")
    trace_every: int = Field(
        10,
        ge=0,
        description="Every n-th step is traced to `run.out/traces/step-<N>.json.gz`, for ui.perfetto.dev, and so is "
        "the first after a start; the newest 20 are kept. 0: none.",
    )
    own: tuple[Annotated[str, NameOrPath(())], ...] = Field(
        (), description="Loggers of your own that metrics go to as well (examples/my_logger.py)."
    )
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    slack: SlackConfig = SlackConfig()
    alerts: AlertsConfig = AlertsConfig()


WANDB_CHARACTERS, WANDB_LENGTH = frozenset("/\\#?%:"), 128
"""Characters that W&B refuses in the name of a project, and the longest one."""
MLFLOW_LENGTH = 500
"""MLflow's longest name of an experiment."""


def _wandb(c: Config) -> str | None:
    project = c.logging.wandb.project
    if project is None:
        return None
    key = f"logging.wandb.project={project}"
    if refused := sorted(WANDB_CHARACTERS & set(project)):
        instead = "; the team goes to logging.wandb.entity" if refused == ["/"] else ""
        return f"{key}: W&B refuses {' '.join(refused)} in the name of a project; choose another{instead}."
    if not project.strip() or len(project) > WANDB_LENGTH:
        return f"{key}: W&B requires a name of 1 to {WANDB_LENGTH} characters; choose another."
    return None


def _mlflow(c: Config) -> str | None:
    uri, experiment = c.logging.mlflow.uri, c.logging.mlflow.experiment
    if uri is not None and (not experiment.strip() or len(experiment) > MLFLOW_LENGTH):
        return (
            f"logging.mlflow.experiment={experiment}: MLflow requires 1 to {MLFLOW_LENGTH} characters; choose another."
        )
    if uri is None or re.fullmatch(r"sqlite:///.+", uri):
        return None
    instead = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    problem = url_problem("logging.mlflow.uri", uri, instead=instead)
    return None if problem is None else problem.replace("; write ", "; write sqlite:///FILE, ")


def _upload(c: Config) -> str | None:
    return bucket_problem("logging.trajectories.upload", c.logging.trajectories.upload)


def _slack(c: Config) -> str | None:
    return url_problem("logging.slack.url", c.logging.slack.url)


RULES: tuple[Rule, ...] = (_wandb, _mlflow, _upload, _slack)
