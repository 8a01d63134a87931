"""The configuration, typed: one pydantic tree. Hydra composes the YAML (``configs/``), this tree accepts or explains.

Every key is read by something (tests/config/test_keys_are_read.py). Unknown keys are refused. Checks that span
several keys are in ``megatron_fleet.config.validate``.
"""

from __future__ import annotations

import math
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


class Precision(Section):
    """In what the trainer computes. Master weights are float32 always."""

    recipe: Literal["model_dtype", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed"] = Field(
        "model_dtype",
        description="Linear layers compute in model.dtype, or in FP8 with one scale per tensor, per block of 128, or "
        "per tensor from earlier steps.",
    )
    bf16_layers_at_start: int = Field(0, ge=0, description="First layers that stay out of FP8.")
    bf16_layers_at_end: int = Field(0, ge=0, description="Last layers that stay out of FP8.")
    fp8_param_gather: bool = Field(False, description="Keep FP8 layers' weights in FP8 and gather them so over ranks.")
    gradients: Literal["float32", "bfloat16"] = Field(
        "float32", description="Gradients add up and are reduced over ranks in this type."
    )

    @property
    def fp8(self) -> bool:
        return self.recipe != "model_dtype"


class Parallel(Section):
    """World size = tensor × pipeline × context × data. Experts are laid over the same ranks once more: expert ×
    expert_tensor × pipeline divides the world size."""

    tensor: int = Field(1, ge=1, description="Ranks that share each layer's matrices.")
    sequence: bool = Field(
        True, description="With tensor > 1: split what lies between the matrices over tokens as well."
    )
    pipeline: int = Field(1, ge=1, description="Ranks that share the stack of layers.")
    virtual: int = Field(1, ge=1, description="Pieces of the stack per pipeline rank, interleaved.")
    first_stage_layers: int | None = Field(None, ge=1, description="Layers of the first pipeline rank; none = even.")
    last_stage_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline rank; none = even.")
    context: int = Field(1, ge=1, description="Ranks that share the tokens of each sequence.")
    expert: int = Field(1, ge=1, description="Ranks that share the experts of a layer.")
    expert_tensor: int | None = Field(
        None, ge=1, description="Ranks that share each expert's matrices; none = `tensor`, or 1 with expert > 1."
    )
    data: int = Field(1, ge=1, description="Copies of the model, each with its share of the batch.")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class Optimizer(Section):
    lr: float = Field(gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear or cosine schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled (AdamW).")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Adam's denominator offset.")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm; above it the gradient is scaled down.")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which Adam's moments are kept; bfloat16 halves them (precision-aware optimizer).",
    )
    offload_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of master weights and moments kept, and updated, in host memory."
    )


class Router(Section):
    """Routers of a mixture of experts."""

    dtype: Literal["float32", "float64"] = Field("float32", description="Type of router logits and scores.")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Each update moves the bias that takes part in the choice of an expert this far towards equal load "
        "(balancing without a loss, DeepSeek-V3); 0: biases stay.",
    )


Recompute = (
    Literal["none", "full"]
    | tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"], ...]
)
"""Activations that are computed again in the backward pass: of whole layers, or of the named parts of them."""


class Safety(Section):
    """What happens to an update that looks wrong. One whose loss or gradient is not finite is always skipped."""

    spike_factor: float | None = Field(
        10.0, gt=1, description="A gradient norm above this many times the median of the last ones is told; none = off."
    )
    max_dumps: int = Field(
        2,
        ge=0,
        description="Updates that `out`/dumps may hold for `mfleet debug replay`, each as large as a checkpoint; one "
        "place is kept for an update that is not finite. 0: none.",
    )
    max_skipped_in_a_row: int = Field(
        5, ge=1, description="The run stops after this many updates in a row that are not finite."
    )


class Lora(Section):
    """Adapters beside frozen layers (Hu et al. 2021, arXiv:2106.09685); experts get one each."""

    rank: int = Field(0, ge=0, description="Width of the adapters; 0: none, all parameters are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapters' product counts alpha / rank times.")
    targets: tuple[Literal["attention", "mlp", "experts"], ...] = Field(
        ("attention", "mlp"),
        min_length=1,
        description="Linear layers that get adapters: attention, mlp (dense layers, shared experts), experts (routed).",
    )
    export: Literal["merged", "adapters"] = Field(
        "merged", description="An export is a whole model, or the adapters alone in peft's format."
    )


class Policy(Section):
    row_tokens: int = Field(ge=64, description="Token capacity of a packed row; every micro-batch is one such row.")
    recompute: Recompute = Field(
        "none", description="Compute activations again instead of keeping them: none, full, or a list of parts."
    )
    logprob_chunk: int = Field(1024, ge=1, description="Positions whose logits exist at one time.")
    updates_per_batch: int = Field(
        1, ge=1, description="Optimizer steps per rollout batch; above 1 π_old is recomputed."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each rank.")
    optimizer: Optimizer
    router: Router = Router()
    safety: Safety = Safety()
    lora: Lora = Lora()
    fake_quant: Literal["none", "int4_experts"] = Field(
        "none",
        description="int4_experts: routed experts compute with the INT4 values (groups of 32) their weights round to.",
    )


class KL(Section):
    coef: float = Field(0.0, ge=0, description="0: no reference model, no reference pass.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Per-token estimate of KL(π‖π_ref) (Schulman 2020).")


CLIP_BOUNDS: dict[str, tuple[float, float]] = {
    "ppo_clip": (0.2, 0.2),  # Schulman et al. 2017 §6.1
    "gspo": (3e-4, 4e-4),  # Zheng et al. 2025 §5.1
    "gmpo": (1 - math.exp(-0.4), math.exp(0.4) - 1),  # Zhao et al. 2025
    "cispo": (1.0, 4.0),  # no lower bound as in MiniMax-M1, the upper one as in SkyRL
    "importance_weighted": (0.5, 4.0),  # IcePop's ratios from 0.5 to 5
}
"""algorithm.clip_low and clip_high where they are not set; losses without an entry do not clip."""

CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "token_tis": (0.0, 2.0),  # verl, SkyRL
    "sequence_tis": (0.0, 5.0),  # SkyRL
    "icepop": (0.5, 5.0),  # Ring-1T
    "geometric_mask": (0.99, 1.01),  # SkyRL
    "outlier_mask": (1e-4, 100.0),  # SkyRL
}
"""algorithm.correction.low and high where they are not set; a low of 0 is no bound."""


def _spelt(bounds: dict[str, tuple[float, float]], side: int) -> str:
    return ", ".join(f"{name} {pair[side]:g}" for name, pair in bounds.items() if pair[side] > 0)


class Correction(Section):
    kind: Literal["off", "token_tis", "sequence_tis", "icepop", "geometric_mask", "outlier_mask"] = Field(
        "off",
        description="What is done about engine and trainer giving a token different probabilities: nothing, a "
        "truncated weight per token or sequence, or leaving tokens or sequences out (algorithms/corrections.py).",
    )
    low: float | None = Field(
        None, gt=0, le=1, description=f"Smallest ratio that is kept; none = {_spelt(CORRECTION_BOUNDS, 0)}."
    )
    high: float | None = Field(
        None, ge=1, description=f"Largest ratio that is kept, or the cap; none = {_spelt(CORRECTION_BOUNDS, 1)}."
    )


class Algorithm(Section):
    advantage: Literal["grpo", "grpo_no_std", "leave_one_out"] = Field(
        "grpo", description="Baseline and scale within a group of known rewards."
    )
    loss: Literal["ppo_clip", "gspo", "gmpo", "sapo", "cispo", "reinforce", "importance_weighted"] = Field(
        "ppo_clip", description="Policy term of the loss (algorithms/policy_terms.py has the formulas)."
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description=f"Ratios are bounded by 1 - clip_low; none = {_spelt(CLIP_BOUNDS, 0)}."
    )
    clip_high: float | None = Field(
        None, gt=0, description=f"Ratios are bounded by 1 + clip_high; none = {_spelt(CLIP_BOUNDS, 1)}."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="ppo_clip: bound on the ratio for negative advantages; none = off."
    )
    tau_positive: float = Field(1.0, gt=0, description="sapo: temperature of the gate for positive advantages.")
    tau_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate for negative advantages.")
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="Global normaliser of the summed loss."
    )
    reduction_constant: float = Field(
        1024.0, gt=0, description="Dr. GRPO's constant: the largest number of action tokens."
    )
    filter_zero_signal: bool = Field(True, description="Leave out groups whose known rewards are all equal.")
    entropy_coef: float = Field(0.0, ge=0, description="Bonus on the entropy of the policy; 0 = off.")
    correction: Correction = Correction()
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
    colocated: bool = Field(
        False, description="Engines share the trainer's devices: they sleep while it trains, it leaves while they play."
    )
    residual_gib: float = Field(
        8.0,
        gt=0,
        description="Colocated: GiB that a side may keep on a GPU when it has left (contexts, communicators, caches); "
        "more ends the run.",
    )
    probe_interval: int = Field(
        0, ge=0, description="Updates between two comparisons of a few log-probs with the trainer's; 0: never."
    )
    routing_replay: bool = Field(
        False, description="Mixtures of experts: train each token with the experts that the engine chose for it."
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
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    policy: Policy
    algorithm: Algorithm = Algorithm()
    rollout: Rollout
    env: Env = Env()
    data: Data
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
