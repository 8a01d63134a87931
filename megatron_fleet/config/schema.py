"""Configuration schema: one pydantic tree that validates what Hydra composes from ``configs/``.

Every key is used somewhere (tests/config/test_keys_are_read.py). Unknown keys are rejected. The sections, each with the
rules between its keys, are in ``megatron_fleet.config.sections``.
"""

from __future__ import annotations

from megatron_fleet.config.sections.agent import AgentConfig
from megatron_fleet.config.sections.algorithm import (
    CLIP_BOUNDS,
    CORRECTION_BOUNDS,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
)
from megatron_fleet.config.sections.base import Section
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.config.sections.evaluation import EvalConfig
from megatron_fleet.config.sections.hosted import HOSTED, HostedConfig
from megatron_fleet.config.sections.launch import KubernetesConfig, LaunchConfig, SkyPilotConfig, SlurmConfig
from megatron_fleet.config.sections.logging import LoggingConfig
from megatron_fleet.config.sections.rollout import EngineConfig, RolloutConfig, SamplingConfig
from megatron_fleet.config.sections.run import CheckpointConfig, ClusterConfig, RunConfig
from megatron_fleet.config.sections.trainer import (
    WITH_RANKS,
    LoraConfig,
    ModelConfig,
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
    "HOSTED",
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
    "HostedConfig",
    "KLConfig",
    "KubernetesConfig",
    "LaunchConfig",
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
    "SkyPilotConfig",
    "SlurmConfig",
]


class Config(Section):
    run: RunConfig
    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    cluster: ClusterConfig = ClusterConfig()
    launch: LaunchConfig = LaunchConfig()
    parallel: ParallelConfig = ParallelConfig()
    policy: PolicyConfig
    hosted: HostedConfig = HostedConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def reads_weights(self) -> bool:
        """Whether the model's weights are read on the hosts of the run; a hosted trainer has its own."""
        return self.policy.trainer != HOSTED

    @property
    def episodes(self) -> int:
        """Most episodes that a run plays at once, of training and evaluation."""
        return self.rollout.most_in_flight() + self.rollout.most_evaluated(self.eval.engines)

    @property
    def ranks(self) -> int:
        """Ranks of the trainer on the hosts of the run; 0 for a trainer that has none."""
        return self.parallel.world_size if self.policy.trainer == WITH_RANKS else 0
