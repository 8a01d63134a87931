"""Section `rollout`: sampling, engines, workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_fleet.config.extension import Open
from megatron_fleet.config.sections.base import MAX_TOKENS, Section

CHAT_FORMAT_NAMES = (
    *("auto", "qwen2.5", "qwen3", "qwen3-instruct", "qwen3.5", "glm-4.5", "glm-4.7"),
    *("kimi-k2", "kimi-k2-thinking", "kimi-k2.5"),
)


TRANSPORT_NAMES = ("auto", "shm", "cuda_ipc", "nccl", "gloo", "disk")
MAX_EPISODES = 100_000
"""Largest number of episodes, or of groups, that are planned or played at once."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="Sampling temperature in training; log-probs are computed at it.")
    max_tokens_per_turn: int = Field(ge=1, le=MAX_TOKENS, description="Most tokens generated in one turn.")
    max_turns: int = Field(ge=1, le=100_000, description="Most turns per episode.")


class EngineConfig(Section):
    replicas: int = Field(1, ge=1, description="Engines, each with its own copy of the weights.")
    tensor_parallel: int = Field(
        1, ge=1, description="Tensor-parallel size of an engine: devices that share its matrices."
    )
    max_num_seqs: int = Field(128, ge=1, le=MAX_EPISODES, description="Sequences that one replica decodes together.")
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV memory per replica; none = vLLM decides (GPU).")
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1, description="Share of a GPU's memory that vLLM may take.")
    enforce_eager: bool = Field(False, description="Run vLLM without compiled graphs: slower, starts sooner.")
    start_timeout_s: float = Field(300, gt=0, description="Deadline of an engine's start.")
    request_timeout_s: float = Field(
        120, gt=0, description="Deadline of one turn's generation; what was sampled until then is a truncated turn."
    )
    update_timeout_s: float = Field(120, gt=0, description="Deadline of a weight update.")
    colocated: bool | None = Field(
        None,
        description="Engines share the trainer's devices: they sleep while it trains, and it is offloaded while they "
        "play; none: on GPUs yes, on CPUs no.",
    )
    transport: Annotated[str, Open(TRANSPORT_NAMES)] = Field(
        "auto",
        description="How weights reach the engines; auto: shared memory on one host without GPUs, cuda_ipc on the "
        "trainer's GPUs, nccl on other GPUs, gloo on other hosts without GPUs. disk: a folder that all hosts see.",
    )
    weights_url: str | None = Field(
        None,
        description="transport=disk: the folder, a path or s3://bucket/prefix, of this run alone: weights of other "
        "runs in it are removed; none: <run.out>/weights.",
    )
    residual_gib: float = Field(
        8.0,
        gt=0,
        description="Colocated: GiB that trainer or engine may keep on a GPU while offloaded or asleep (contexts, "
        "communicators, caches); more ends the run.",
    )
    probe_interval: int = Field(
        0, ge=0, description="Updates between two comparisons of a few log-probs with the trainer's; 0: never."
    )
    routing_replay: bool = Field(
        False, description="Mixtures of experts: train each token with the experts that the engine chose for it."
    )
    probe_tolerance: float = Field(
        0.1, gt=0, description="Mean absolute difference of these log-probs, in nats, above which the run ends."
    )


class RolloutConfig(Section):
    prompts_per_step: int = Field(ge=1, le=MAX_EPISODES, description="Groups (tasks) per step.")
    samples_per_prompt: int = Field(ge=2, le=10_000, description="Trajectories per group.")
    max_context: int = Field(
        ge=64, le=MAX_TOKENS, description="Longest token sequence of an episode; also the engine's limit."
    )
    sampling: SamplingConfig
    thinking: bool = Field(
        False, description="Let the policy think, written as its chat format has it; some models only do or never."
    )
    renderer: Annotated[str, Open(CHAT_FORMAT_NAMES)] = Field(
        "auto",
        description="The model's chat format; auto: from its files, and refused where its own chat template differs.",
    )
    workers: int = Field(1, ge=1, description="Episode worker processes.")
    episodes_in_flight: int = Field(
        256, ge=1, le=MAX_EPISODES, description="Episodes played at once, over all workers."
    )
    episode_timeout_s: float = Field(300, gt=0, description="Deadline of a whole episode.")
    max_staleness: int = Field(
        0,
        ge=0,
        description="Steps that rollout may run ahead of the trainer; a group is trained on when its oldest token is "
        "at most this many weight versions old. 0: on-policy, bit-equal with equal seeds.",
    )
    max_retries: int = Field(1, ge=0, description="Fresh attempts for an episode whose reward stayed unknown.")
    max_no_action_turns: int = Field(
        2, ge=1, description="Consecutive turns without a valid action after which an episode ends."
    )
    engine: EngineConfig = EngineConfig()
