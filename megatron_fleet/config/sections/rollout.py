"""Section `rollout`: sampling, engines, workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.names import NameOrPath, is_path
from megatron_fleet.config.sections.base import MAX_TOKENS, Rule, Section, is_in_store
from megatron_fleet.config.sections.hosted import HOSTED
from megatron_fleet.config.sections.trainer import WITH_RANKS

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


VLLM, MESSAGE = "vllm", "message"
MAX_EPISODES = 100_000
"""Largest number of episodes, or of groups, that are planned or played at once."""
MAX_SEQUENCES = 1024
"""Sequences that an engine decodes together unless configured otherwise: vLLM's own default on Hopper."""
AUTO_SEQUENCES = 256
"""The same with ``rollout.episodes_in_flight=auto``. The sampler sets memory aside for each sequence, and vLLM captures
CUDA graphs for batches of up to 512 tokens only."""
UNOBSERVED_EPISODES = 256
"""Episodes that ``auto`` plays at once where no engine reports its load: at an endpoint, or with another sampler."""
Replicas = Literal["auto"] | Annotated[int, Field(ge=1)]
ELASTIC_ENGINES = 64
"""Engines that the most episodes in flight are computed for where their number is not known."""
EpisodesInFlight = Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_EPISODES)]


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="Sampling temperature in training; log-probs are computed at it.")
    max_tokens_per_turn: int = Field(ge=1, le=MAX_TOKENS, description="Maximum number of tokens generated in one turn.")
    max_turns: int = Field(ge=1, le=100_000, description="Maximum number of turns per episode.")


class SpeculativeConfig(Section):
    """Speculative decoding: a drafter proposes tokens, which the model checks all at once. Samples keep the model's
    distribution."""

    method: Literal["none", "ngram", "mtp"] = Field(
        "none",
        description="Drafter. ngram: repeats what followed the newest tokens earlier in the sequence; mtp: the "
        "multi-token prediction layers of model.path, which stay as they are while the model is trained.",
    )
    tokens: int = Field(3, ge=1, le=64, description="Tokens that the drafter proposes at once.")
    ngram: int = Field(5, ge=1, le=64, description="ngram: number of newest tokens that it looks for in the sequence.")
    max_sequences: int | None = Field(
        None,
        ge=1,
        le=MAX_EPISODES,
        description="Draft only while an engine decodes at most this many sequences, as at the end of a batch, where "
        "checking more tokens costs little; null: always. On GPUs vLLM then captures CUDA graphs piecewise.",
    )

    def drafted(self, sequences: int) -> int:
        """Return the tokens that are drafted for each of ``sequences`` sequences that are decoded together."""
        limit = sequences if self.max_sequences is None else self.max_sequences
        return 0 if self.method == "none" or sequences > limit else self.tokens


class EngineConfig(Section):
    replicas: Replicas = Field(
        1,
        description="Engines, each with its own copy of the weights. auto: as many as the hosts have room for; with "
        "rollout.engine.colocated=false, hosts that run `mfleet node --rollout-only` add theirs whenever they join, "
        "and may leave.",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Tensor-parallel size of an engine: devices that share its matrices."
    )
    expert_parallel: bool = Field(
        False,
        description="Mixtures of experts: each of an engine's tensor-parallel devices holds whole experts instead of a "
        "slice of every expert.",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=MAX_EPISODES,
        description="Sequences that one replica decodes together; null: rollout.episodes_in_flight, at most 1024, or "
        "256 with auto.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Tokens, of prompts and samples, that one replica computes together; null: vLLM's choice for "
        "throughput (16384 on an 80 GB GPU). On CPUs at least the longest sequence, and 4096 by default.",
    )
    enforce_eager: bool = Field(False, description="Run vLLM without compiled graphs: slower, starts sooner.")
    max_cuda_graph_size: int | None = Field(
        None,
        ge=1,
        le=MAX_EPISODES,
        description="GPUs: largest number of tokens in a batch for which a CUDA graph is captured; null: vLLM's "
        "choice (twice max_num_seqs, at most 512).",
    )
    prefix_caching: bool = Field(True, description="Keep the KV cache of a prompt for later turns and other samples.")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="Data type of the KV cache; auto: model.dtype. fp8 holds twice the tokens of bfloat16."
    )
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV memory per replica; null: vLLM decides (GPU).")
    quantization: Literal["auto", "none", "fp8"] = Field(
        "auto",
        description="Linear layers of the engines: fp8 = E4M3 with a scale for each 128 x 128 block, quantised by the "
        "trainer and sent so; none = as stored in model.path; auto: fp8 with precision.recipe=fp8_blockwise.",
    )
    speculative: SpeculativeConfig = SpeculativeConfig()
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1, description="Share of a GPU's memory that vLLM may take.")
    start_timeout_s: float = Field(
        1200,
        gt=0,
        description="Deadline of an engine's start. On a host's first start all its engines read weights, compile "
        "kernels and capture CUDA graphs on the same CPUs.",
    )
    request_timeout_s: float = Field(
        120,
        gt=0,
        description="Deadline of one request, in addition to the time for its tokens (min_tokens_per_s): for waiting, "
        "a weight update and the prompt.",
    )
    min_tokens_per_s: float = Field(
        10,
        gt=0,
        description="Slowest speed at which one sequence may grow. A turn has request_timeout_s and this time for its "
        "most tokens; what was sampled until then is a truncated turn.",
    )
    health_timeout_s: float = Field(
        120,
        gt=0,
        description="Time in which an engine must answer whether it works; one that does not is lost, and replaced.",
    )
    update_timeout_s: float = Field(120, gt=0, description="Deadline of a weight update.")
    colocated: bool | None = Field(
        None,
        description="Engines and trainer share devices and take turns: engines sleep while it trains, and its state is "
        "offloaded while they play. null: true on GPUs, false on CPUs.",
    )
    transport: Annotated[str, NameOrPath(("auto",), "a package of megatron_fleet/weight_sync")] = Field(
        "auto",
        description="How weights reach the engines; auto: shared memory on one host without GPUs, cuda_ipc on the "
        "trainer's GPUs, nccl on other GPUs, gloo on other hosts without GPUs. disk: a folder that all hosts see. "
        "message: for a trainer without ranks, which sends its weights, or their address, in one message.",
    )
    weights_url: str | None = Field(
        None,
        description="transport=disk: the folder, a path, s3://… or gs://…, of this run alone: weights of other "
        "runs in it are removed; null: <run.out>/weights.",
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

    @property
    def count(self) -> int:
        """Number of engines; 1 where the hosts decide it (``replicas=auto``) and are not known yet."""
        return 1 if self.replicas == "auto" else self.replicas

    @property
    def elastic(self) -> bool:
        """Whether engines may be added, and may leave, during the run."""
        return self.replicas == "auto" and self.colocated is False

    def sequences(self, episodes_in_flight: EpisodesInFlight) -> int:
        """Return how many sequences a replica decodes together."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return AUTO_SEQUENCES if episodes_in_flight == "auto" else min(episodes_in_flight, MAX_SEQUENCES)

    def fp8(self, recipe: str) -> bool:
        """Return whether engines are to quantise their weights. ``recipe``: `precision.recipe`."""
        return self.quantization == "fp8" or (self.quantization == "auto" and recipe == "fp8_blockwise")

    def turn_timeout_s(self, max_tokens: int) -> float:
        """Return the deadline of a turn of up to ``max_tokens`` tokens, in seconds."""
        return self.request_timeout_s + max_tokens / self.min_tokens_per_s


class BatchConfig(Section):
    window: int | None = Field(
        1,
        ge=1,
        description="Size of the window, in steps, within which groups may be reordered: a batch takes the first "
        "groups to finish among those drawn for its window, and the last batch of a window takes the rest. 1: no "
        "reordering, each batch consists of the groups drawn for it. null: no limit, so short episodes are trained on "
        "earlier than long ones.",
    )
    ahead: float | None = Field(
        None,
        ge=0,
        description="Extra groups to play beyond the current batch, as a multiple of the batch size (0.25: a quarter "
        "more). null: rollout.max_staleness.",
    )
    max_replacements: int = Field(
        0,
        ge=0,
        description="How often a group without signal (all its rewards are equal) may be replaced by a group of "
        "another task within a step; the task is of the same environment if possible.",
    )


class RolloutConfig(Section):
    sampler: Annotated[str, NameOrPath((VLLM, HOSTED))] = Field(
        VLLM,
        description="Program that generates the policy's tokens. vllm: vLLM engines that the run starts. hosted: the "
        "service of policy.trainer=hosted.",
    )
    prompts_per_step: int = Field(ge=1, le=MAX_EPISODES, description="Groups (tasks) per step.")
    samples_per_prompt: int = Field(ge=2, le=10_000, description="Trajectories per group.")
    max_context: int = Field(
        ge=64, le=MAX_TOKENS, description="Longest token sequence of an episode; also the engine's limit."
    )
    sampling: SamplingConfig
    thinking: bool = Field(
        False, description="Let the policy think, written as its chat format has it; some models only do or never."
    )
    renderer: Annotated[str, NameOrPath(("auto",), "a chat format of a family in megatron_fleet/models")] = Field(
        "auto",
        description="The model's chat format, such as qwen3; auto: from its files, and refused where its own chat "
        "template differs.",
    )
    workers: int = Field(1, ge=1, description="Episode worker processes.")
    episodes_in_flight: EpisodesInFlight = Field(
        "auto",
        description="Episodes played at once, over all workers. auto: as many as the engines' KV caches hold, found "
        "while they play, at most rollout.engine.max_num_seqs for each engine; 256 at an endpoint or with another "
        "sampler than vllm, whose load is not known.",
    )
    episode_timeout_s: float = Field(300, gt=0, description="Deadline of a whole episode.")
    max_staleness: int = Field(
        0,
        ge=0,
        description="Steps that rollout may run ahead of the trainer; a group is trained on when its oldest token is "
        "at most this many weight versions old (see rollout.too_old). 0: on-policy, bit-equal with equal seeds.",
    )
    unfinished: Literal["continue", "again", "wait"] = Field(
        "continue",
        description="What to do with groups that are still playing when a batch is full. continue: keep their "
        "environments open and continue them with the updated weights; again: stop them and restart them from their "
        "tasks; wait: finish them before the update.",
    )
    too_old: Literal["again", "mask", "drop"] = Field(
        "again",
        description="What to do with episodes that have tokens older than rollout.max_staleness. again: restart them; "
        "mask: exclude these tokens from the loss; drop: exclude the whole episode from the loss. With mask and drop "
        "its reward still counts for its group.",
    )
    batch: BatchConfig = BatchConfig()
    max_retries: int = Field(1, ge=0, description="Fresh attempts for an episode whose reward stayed unknown.")
    max_no_action_turns: int = Field(
        2, ge=1, description="Consecutive turns without a valid action after which an episode ends."
    )
    engine: EngineConfig = EngineConfig()

    @property
    def adapts(self) -> bool:
        """Whether the engines' load decides how many episodes play."""
        return self.episodes_in_flight == "auto" and self.sampler == VLLM

    def most_in_flight(self, endpoint: bool = False) -> int:
        """Return the most episodes that play at once, without those of evaluation engines.

        Args:
            endpoint: `eval.endpoint` plays the episodes instead of engines.
        """
        if self.episodes_in_flight != "auto":
            return self.episodes_in_flight
        if endpoint or not self.adapts:
            return UNOBSERVED_EPISODES
        engines = ELASTIC_ENGINES if self.engine.replicas == "auto" else self.engine.replicas
        return min(MAX_EPISODES, engines * self.engine.sequences("auto"))

    def most_evaluated(self, engines: int) -> int:
        """Return the most episodes that this many evaluation engines (`eval.engines`) play at once: as many for each of
        them as for an engine of the rollout.
        """
        if self.engine.replicas == "auto":
            return engines * self.engine.sequences(self.episodes_in_flight)
        return math.ceil(self.most_in_flight() * engines / self.engine.replicas)


def _row_holds_episode(c: Config) -> str | None:
    if c.policy.micro_batch_tokens >= c.rollout.max_context:
        return None
    return (
        f"policy.micro_batch_tokens={c.policy.micro_batch_tokens} is below "
        f"rollout.max_context={c.rollout.max_context}, so the longest episode would not fit into a micro-batch; raise "
        f"policy.micro_batch_tokens to at least {c.rollout.max_context}."
    )


def _turn_fits_context(c: Config) -> str | None:
    turn = c.rollout.sampling.max_tokens_per_turn
    if turn < c.rollout.max_context:
        return None
    return (
        f"rollout.sampling.max_tokens_per_turn={turn} leaves no room for a prompt in "
        f"rollout.max_context={c.rollout.max_context}; lower the first or raise the second."
    )


def _temperature(c: Config) -> str | None:
    if c.rollout.sampling.temperature > 0:
        return None
    return (
        "rollout.sampling.temperature=0 makes all samples of a group equal, so nothing could be learnt; set it above 0 "
        "(eval.greedy adds greedy evaluation samples)."
    )


def _updates_have_groups(c: Config) -> str | None:
    if c.policy.updates_per_batch <= c.rollout.prompts_per_step:
        return None
    return (
        f"policy.updates_per_batch={c.policy.updates_per_batch} is more than "
        f"rollout.prompts_per_step={c.rollout.prompts_per_step} groups; lower the first."
    )


def _ranks_have_trajectories(c: Config) -> str | None:
    batch = c.rollout.prompts_per_step * c.rollout.samples_per_prompt // c.policy.updates_per_batch
    if batch >= c.parallel.data:
        return None
    return (
        f"One update has {batch} trajectories for parallel.data={c.parallel.data} ranks; raise "
        f"rollout.prompts_per_step or lower parallel.data."
    )


def _workers_are_busy(c: Config) -> str | None:
    most = c.rollout.most_in_flight()
    if most >= c.rollout.workers:
        return None
    plays = f" plays at most {most} episodes, which" if c.rollout.episodes_in_flight == "auto" else ""
    return (
        f"rollout.episodes_in_flight={c.rollout.episodes_in_flight}{plays} cannot occupy "
        f"rollout.workers={c.rollout.workers} processes; lower rollout.workers."
    )


def _colocated(c: Config) -> str | None:
    if c.rollout.engine.colocated and c.precision.fp8_param_gather:
        return (
            "rollout.engine.colocated=true with precision.fp8_param_gather=true: weights that are stored in FP8 cannot "
            "leave the device; set one of them to false."
        )
    return None


def _groups_are_there_to_choose_from(c: Config) -> str | None:
    batch, staleness = c.rollout.batch, c.rollout.max_staleness
    ahead = staleness if batch.ahead is None else batch.ahead
    if batch.window == 1 or ahead > 0:
        return None
    return (
        f"rollout.batch.window={'null' if batch.window is None else batch.window} lets a batch take the first groups "
        f"to finish, but no extra groups are played; raise rollout.batch.ahead or rollout.max_staleness."
    )


def _what_goes_on_is_not_too_old(c: Config) -> str | None:
    r = c.rollout
    if r.max_staleness > 0 or not r.batch.ahead or r.unfinished != "continue" or r.too_old != "again":
        return None
    return (
        f"rollout.batch.ahead={r.batch.ahead:g} with rollout.unfinished=continue, rollout.max_staleness=0 and "
        f"rollout.too_old=again would continue groups after an update only to restart them as too old; set "
        f"rollout.unfinished to again or wait, rollout.too_old to mask, or rollout.max_staleness to at least 1."
    )


def _expert_parallel(c: Config) -> str | None:
    engine = c.rollout.engine
    if not engine.expert_parallel or engine.tensor_parallel > 1:
        return None
    return (
        "rollout.engine.expert_parallel=true spreads experts over an engine's devices, and "
        "rollout.engine.tensor_parallel=1 is one device; raise the second, or set the first to false."
    )


def _quantization(c: Config) -> str | None:
    if c.rollout.engine.quantization != "fp8":
        return None
    if c.policy.fake_quant != "none":
        return (
            f"rollout.engine.quantization=fp8 with policy.fake_quant={c.policy.fake_quant}: the experts would be "
            f"trained for another form than engines hold; set one of them to none."
        )
    if c.model.dtype == "bfloat16":
        return None
    return (
        f"rollout.engine.quantization=fp8 quantises weights in bfloat16, and model.dtype={c.model.dtype}; set it to "
        f"bfloat16, or the first to none."
    )


def _batched_tokens(c: Config) -> str | None:
    engine = c.rollout.engine
    tokens, sequences = engine.max_num_batched_tokens, engine.sequences(c.rollout.episodes_in_flight)
    if tokens is None or tokens >= sequences:
        return None
    return (
        f"rollout.engine.max_num_batched_tokens={tokens} has no room for a token of each of the {sequences} sequences "
        f"(rollout.engine.max_num_seqs); raise the first or lower the second."
    )


def _speculative(c: Config) -> str | None:
    engine = c.rollout.engine
    if engine.speculative.method == "none" or not engine.routing_replay:
        return None
    return (
        f"rollout.engine.routing_replay=true with rollout.engine.speculative.method={engine.speculative.method}: which "
        f"experts an accepted draft token had is not recorded; set one of them to false or none."
    )


def _weights_url(c: Config) -> str | None:
    url, transport = c.rollout.engine.weights_url, c.rollout.engine.transport
    if url is None:
        return None
    if transport != "disk" and not is_path(transport):
        return (
            f"rollout.engine.weights_url requires rollout.engine.transport=disk, but the transport is {transport}; "
            f"set it to disk, or leave the address out."
        )
    if "://" not in url and url.strip():
        return None
    if "@" in url:
        return (
            "rollout.engine.weights_url holds an @, as an address with a key does, which would be written to files; "
            "leave it out."
        )
    if is_in_store(url):
        return None
    return f"rollout.engine.weights_url={url} is not the address of a folder; write a path, s3://… or gs://…"


def _trainer_and_sampler(c: Config) -> str | None:
    trainer, sampler, engine = c.policy.trainer, c.rollout.sampler, c.rollout.engine
    if is_path(engine.transport):
        return None  # the user knows what it connects
    if trainer == WITH_RANKS and sampler == VLLM:
        if engine.transport != MESSAGE:
            return None
        return (
            f"rollout.engine.transport={MESSAGE} with policy.trainer={trainer}: its weights are too large for a "
            f"message; set rollout.engine.transport=auto."
        )
    if trainer == WITH_RANKS or sampler == VLLM:
        return (
            f"policy.trainer={trainer} with rollout.sampler={sampler}: no built-in transport sends weights from this "
            f"trainer to this sampler; change one of them, or name a rollout.engine.transport of your own "
            f"(package.module:name)."
        )
    if engine.transport not in ("auto", MESSAGE):
        return (
            f"rollout.engine.transport={engine.transport} with policy.trainer={trainer}: this transport sends weights "
            f"from ranks, and this trainer has none; set it to auto."
        )
    return None


def _only_ranks_are_started_and_share_devices(c: Config) -> str | None:
    if c.policy.trainer == WITH_RANKS:
        return None
    if c.cluster.ranks == "external":
        return (
            f"cluster.ranks=external with policy.trainer={c.policy.trainer}: this trainer has no ranks to start; "
            f"set it to local."
        )
    if not c.rollout.engine.colocated:
        return None
    return (
        f"rollout.engine.colocated=true with policy.trainer={c.policy.trainer}: this trainer uses no devices of the "
        f"run that engines could share; set it to null."
    )


RULES: tuple[Rule, ...] = (
    _trainer_and_sampler,
    _only_ranks_are_started_and_share_devices,
    _row_holds_episode,
    _turn_fits_context,
    _temperature,
    _updates_have_groups,
    _ranks_have_trajectories,
    _workers_are_busy,
    _colocated,
    _groups_are_there_to_choose_from,
    _what_goes_on_is_not_too_old,
    _expert_parallel,
    _quantization,
    _batched_tokens,
    _speculative,
    _weights_url,
)
