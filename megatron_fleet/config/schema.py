"""The configuration, typed: one pydantic tree. Hydra composes the YAML (``configs/``), this tree accepts or explains.

Every key is read by something (tests/config/test_keys_are_read.py). Unknown keys are refused. Checks that span
several keys are in ``megatron_fleet.config.validate``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field(description="Name of the run, used in records and titles.")
    out: str = Field(description="Folder of the run's outputs; made when missing.")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and initial state.")
    steps: int = Field(ge=0, description="Optimizer batches (rollout + update) to run in all, resumed ones included.")
    deterministic: bool = Field(True, description="Seed every request, so that equal seeds give equal runs.")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: go on from the newest whole checkpoint in `out`."
    )


class Model(Section):
    path: str = Field(description="HF folder: config.json, tokenizer.json, safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Of the forward pass and of the engines; float32 on CPU."
    )


class Parallel(Section):
    """World size = tensor × pipeline × data."""

    tensor: int = Field(1, ge=1, description="Ranks that share each layer's matrices.")
    pipeline: int = Field(1, ge=1, description="Ranks that share the stack of layers.")
    data: int = Field(1, ge=1, description="Copies of the model, each with its share of the batch.")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


class Optimizer(Section):
    lr: float = Field(gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear or cosine schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled (AdamW).")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Adam's denominator offset.")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm; above it the gradient is scaled down.")


class Policy(Section):
    row_tokens: int = Field(ge=64, description="Token capacity of a packed row; every micro-batch is one such row.")
    logprob_chunk: int = Field(1024, ge=1, description="Positions whose logits exist at one time.")
    updates_per_batch: int = Field(
        1, ge=1, description="Optimizer steps per rollout batch; above 1 π_old is recomputed."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each rank.")
    optimizer: Optimizer


class KL(Section):
    coef: float = Field(0.0, ge=0, description="0: no reference model, no reference pass.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Per-token estimate of KL(π‖π_ref) (Schulman 2020).")


class Algorithm(Section):
    advantage: Literal["grpo", "grpo_no_std", "leave_one_out"] = Field(
        "grpo", description="Baseline and scale within a group of known rewards."
    )
    loss: Literal["ppo_clip"] = Field("ppo_clip", description="Name in the registry of losses.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(None, gt=1, description="Bound on the ratio for negative advantages; none = off.")
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="Global normaliser of the summed loss."
    )
    reduction_constant: float = Field(
        1024.0, gt=0, description="Dr. GRPO's constant: the largest number of action tokens."
    )
    filter_zero_signal: bool = Field(True, description="Leave out groups whose known rewards are all equal.")
    kl: KL = KL()


class Sampling(Section):
    temperature: float = Field(1.0, ge=0, description="Training samples at it and log-probs are scaled by it.")
    max_tokens_per_turn: int = Field(ge=1, description="Longest generation of one turn.")
    max_turns: int = Field(ge=1, description="Generations per episode.")


class Engine(Section):
    replicas: int = Field(1, ge=1, description="Engines, each with its own copy of the weights.")
    tensor_parallel: int = Field(1, ge=1, description="Devices that share one engine's matrices.")
    max_num_seqs: int = Field(128, ge=1, description="Sequences that one replica decodes together.")
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV memory per replica; none = vLLM decides (GPU).")
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1, description="Share of a GPU's memory that vLLM may take.")
    enforce_eager: bool = Field(False, description="Run vLLM without compiled graphs: slower, starts sooner.")
    start_timeout_s: float = Field(300, gt=0, description="Deadline of an engine's start.")
    request_timeout_s: float = Field(120, gt=0, description="Deadline of one turn's generation.")
    update_timeout_s: float = Field(120, gt=0, description="Deadline of a weight update.")
    probe_interval: int = Field(
        0, ge=0, description="Updates between two comparisons of a few log-probs with the trainer's; 0: never."
    )
    probe_tolerance: float = Field(0.1, gt=0, description="Mean difference of these log-probs that ends the run, nats.")


class Rollout(Section):
    prompts_per_step: int = Field(ge=1, description="Groups (tasks) per step.")
    samples_per_prompt: int = Field(ge=2, description="Trajectories per group.")
    max_context: int = Field(ge=64, description="Longest token sequence of an episode; also the engine's limit.")
    sampling: Sampling
    thinking: bool = Field(False, description="Let the policy think; off opens each turn with an empty thinking block.")
    workers: int = Field(1, ge=1, description="EpisodeWorker processes.")
    episodes_in_flight: int = Field(256, ge=1, description="Over all workers.")
    episode_timeout_s: float = Field(300, gt=0, description="Deadline of a whole episode.")
    max_retries: int = Field(1, ge=0, description="Fresh attempts for an episode whose reward stayed unknown.")
    max_no_action_turns: int = Field(2, ge=1, description="Turns in a row without a valid action before giving up.")
    engine: Engine = Engine()


class Env(Section):
    kind: Literal["embedded", "openenv"] = Field(
        "embedded", description="embedded: the fleet in this package, started for the run; openenv: a server at `url`."
    )
    url: str | None = Field(None, description="Base URL of the OpenEnv server; only for kind=openenv.")
    start_timeout_s: float = Field(60, gt=0, description="Deadline of the environment server's start.")
    reset_timeout_s: float = Field(30, gt=0, description="Deadline of one reset.")
    step_timeout_s: float = Field(30, gt=0, description="Deadline of one tool call.")
    verify_timeout_s: float = Field(30, gt=0, description="Deadline of one verification.")
    max_tool_output_chars: int = Field(4000, ge=100, description="Longer tool results are cut.")


class Data(Section):
    tasks: str = Field(description="Fleet task file (JSON). `embedded` = the embedded fleet's own tasks.")
    eval_fraction: float = Field(
        0.2, gt=0, lt=1, description="Held-out share, by a fixed hash threshold of the task key."
    )


class Eval(Section):
    at_start: bool = Field(True, description="Evaluate before the first step.")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    interval: int = Field(0, ge=0, description="Steps between evaluations; 0 = none in between.")
    tasks: int = Field(100, ge=1, description="Held-out tasks used, the same every time.")
    samples: int = Field(4, ge=1, description="Samples per task at the training temperature.")
    greedy: bool = Field(True, description="Also one greedy sample per task.")


class Checkpoint(Section):
    interval: int = Field(5, ge=0, description="Steps between checkpoints; 0 = only at the end.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")
    export_hf: bool = Field(True, description="Export an HF folder at the end of the run.")


class Logging(Section):
    tensorboard: bool = Field(True, description="Write TensorBoard event files beside metrics.jsonl.")
    plot: bool = Field(True, description="Draw the learning curve as PNG at the end.")


class Config(Section):
    run: Run
    model: Model
    parallel: Parallel = Parallel()
    policy: Policy
    algorithm: Algorithm = Algorithm()
    rollout: Rollout
    env: Env = Env()
    data: Data
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
