"""Configuration schema: one pydantic tree that validates what Hydra composes from ``configs/``.

Every key is used somewhere (tests/config/test_keys_are_read.py). Unknown keys are rejected. Checks that span several
keys are in ``megatron_fleet.config.validate``. The larger sections live in ``megatron_fleet.config.sections``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_fleet.config.extension import Open
from megatron_fleet.config.sections.agent import AgentConfig
from megatron_fleet.config.sections.algorithm import (
    CLIP_BOUNDS,
    CORRECTION_BOUNDS,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
)
from megatron_fleet.config.sections.base import Section
from megatron_fleet.config.sections.cluster import ClusterConfig
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.config.sections.evaluation import EvalConfig
from megatron_fleet.config.sections.rollout import EngineConfig, RolloutConfig, SamplingConfig
from megatron_fleet.config.sections.tracking import MlflowConfig, WandbConfig
from megatron_fleet.config.sections.trainer import (
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    PrecisionConfig,
    Recompute,
    RouterConfig,
    SafetyConfig,
)

__all__ = [
    "CLIP_BOUNDS",
    "CORRECTION_BOUNDS",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "KLConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PolicyConfig",
    "PrecisionConfig",
    "Recompute",
    "RolloutConfig",
    "RouterConfig",
    "RunConfig",
    "SafetyConfig",
    "SamplingConfig",
    "Section",
]


class RunConfig(Section):
    name: str = Field(description="Name of the run, used in records and titles.")
    out: str = Field(description="Folder of the run's outputs; made when missing.")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and initial state.")
    steps: int = Field(ge=0, description="Optimizer batches (rollout + update) to run in all, resumed ones included.")
    deterministic: bool = Field(True, description="Seed every request, so that equal seeds give equal runs.")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on from the newest whole checkpoint in `out`. never: start anew; if `out` has the "
        "records of an earlier run, it is renamed to `<out>.1`, or the next free number.",
    )
    shared: bool = Field(
        False,
        description="Who may read the outputs. false: only the user who starts the run (folders that it makes have "
        "mode 0700, files 0600); true: also those whom the user's umask permits, such as a group.",
    )


class ModelConfig(Section):
    path: str = Field(description="HF folder: config.json, tokenizer.json, safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Of the forward pass and of the engines; float32 on CPU."
    )


class CheckpointConfig(Section):
    interval: int = Field(5, ge=0, description="Steps between checkpoints; 0 = only at the end.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")
    export_hf: bool = Field(True, description="Export an HF folder at the end of the run.")


class LoggingConfig(Section):
    tensorboard: bool = Field(True, description="Write TensorBoard event files beside metrics.jsonl.")
    plot: bool = Field(True, description="Draw the learning curve, curve.svg, at the end.")
    own: tuple[Annotated[str, Open(())], ...] = Field(
        (), description="Loggers of your own that metrics go to as well (examples/my_logger.py)."
    )
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()


class Config(Section):
    run: RunConfig
    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    policy: PolicyConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
