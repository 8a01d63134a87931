"""Arguments and environment variables of an engine's vLLM, from the configuration and the model's folder.

Nothing here imports vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fleet.config.schema import Config
from megatron_fleet.models.images import read_vision
from megatron_fleet.models.model import Mixer
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.rollout.prefix_sharing import BLOCK
from megatron_fleet.weight_sync.engine_model import FP8_FORMAT, fp8_declaration
from megatron_fleet.weight_sync.registry import engine_backend
from megatron_fleet.weight_sync.vllm_plugin import DIE_WITH_PARENT

if TYPE_CHECKING:
    from megatron_fleet.config.sections.rollout import EngineConfig

CPU_ENV = {
    # Runs the worker inside the EngineCore process: saves one process, 7 s and 0.4 GB.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The sampler would otherwise be compiled at the first request, which takes seconds and needs a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    # OpenMP threads spin while idle and starve a trainer on the same cores.
    "OMP_NUM_THREADS": "1",
    # Otherwise vLLM pins its threads to cores, and two replicas to the same one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Keeps freed weight-sized blocks in the heap, so that an update does not fault every page again.
    "MALLOC_MMAP_THRESHOLD_": str(2 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}
COMMON_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    DIE_WITH_PARENT: "1",
}
CUDA_ENV = {
    # CUDA IPC handles contain class objects that vLLM's safe serialiser rejects; they never leave this host.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # With scales rounded up to powers of two, vLLM's default, weights and activations would differ from the trainer's,
    # whose scales are float32 (`platform.megatron` sets that for Transformer Engine).
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    # At its start vLLM then logs what the weights, the KV cache and the CUDA graphs take.
    "VLLM_LOGGING_LEVEL": "INFO",
}

CPU_ATTENTION = {"backend_per_kind": {"mla_attention": "CPU_MLA"}}
"""vLLM 0.32 selects AMX_MLA on CPUs with AMX, which does not support float32. A fixed backend also makes results
independent of the CPU."""
CPU_LATENT = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""vLLM 0.32's rotary operator on CPU mishandles the three-dimensional queries of latent attention. Models with YaRN
never call it."""
CPU_KV_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS = 4096
"""Tokens of one scheduling step; a context longer than this raises the limit."""
DRAFT_PARAMETERS = "draft.*"
"""vLLM's pattern for a drafter's own parameters. No update sends them, so they are kept in host memory during sleep."""


def environment(cuda: bool) -> dict[str, str]:
    """Return the environment variables that an engine process needs before it starts."""
    return COMMON_ENV | (CUDA_ENV if cuda else CPU_ENV)


def engine_args(config: Config, transport: str, *, cpu: bool, can_sleep: bool) -> dict[str, Any]:
    """Return the keyword arguments for vLLM's ``AsyncEngineArgs``; what is absent or ``None``, vLLM decides.

    Args:
        transport: name of the weight transport.
        cpu: vLLM computes on the CPU.
        can_sleep: vLLM can release memory on this platform.

    Raises:
        UserError: engines are to be in FP8, and no layer of the model can be.
    """
    model, engine = Path(config.model.folder), config.rollout.engine
    context = _longest_sequence(model, config.rollout.max_context)
    sleeps = bool(engine.colocated) and can_sleep
    declared = fp8_declaration(config.model, config.precision, config.rollout.engine)
    vision = read_vision(model) is not None
    arguments: dict[str, Any] = {
        "model": config.model.folder,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        # vLLM's image processors need a tokenizer to be constructed, although they get no text.
        "skip_tokenizer_init": not vision,
        "language_model_only": not vision,
        "limit_mm_per_prompt": {"video": 0} if vision else {},
        "generation_config": "vllm",
        "max_model_len": context,
        "max_num_seqs": engine.sequences(config.rollout.episodes_in_flight),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tensor_parallel_size": engine.tensor_parallel,
        "enable_expert_parallel": engine.expert_parallel,
        "enable_prefix_caching": engine.prefix_caching,
        "enforce_eager": engine.enforce_eager,
        "max_cudagraph_capture_size": engine.max_cuda_graph_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "kv_cache_memory_bytes": engine.kv_cache_bytes or (CPU_KV_CACHE_BYTES if cpu else None),
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "hf_overrides": {} if declared is None else {"quantization_config": declared},
        "load_format": "auto" if declared is None else FP8_FORMAT,
        "speculative_config": _speculative(engine, engine.sequences(config.rollout.episodes_in_flight), cpu),
        "logprobs_mode": "processed_logprobs",
        "enable_return_routed_experts": engine.routing_replay,
        "weight_transfer_config": {"backend": engine_backend(transport)},
        "enable_sleep_mode": sleeps,
        "sleep_preserve_parameter_names": [DRAFT_PARAMETERS] if sleeps and engine.speculative.method == "mtp" else [],
        # Statistics go to the actor's own logger.
        "disable_log_stats": True,
    }
    if not cpu:
        return arguments
    return arguments | _cpu_args(max(context, engine.max_num_batched_tokens or CPU_STEP_TOKENS)) | cpu_model_args(model)


def _speculative(engine: EngineConfig, sequences: int, cpu: bool) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config``. Args: ``sequences``: most that are decoded together."""
    speculative = engine.speculative
    if speculative.method == "none":
        return None
    drafter: dict[str, Any] = {"method": speculative.method, "num_speculative_tokens": speculative.tokens}
    if speculative.method == "ngram":
        drafter |= {"prompt_lookup_min": speculative.ngram, "prompt_lookup_max": speculative.ngram}
        # The variant for GPUs lets vLLM prepare a step while one runs.
        drafter["method"] = "ngram" if cpu else "ngram_gpu"
    limit = speculative.max_sequences
    if limit is not None and limit < sequences:
        # Inclusive ranges of batch sizes, and the tokens drafted in each.
        by_size = [(1, limit, speculative.tokens), (limit + 1, sequences, 0)]
        drafter["num_speculative_tokens_per_batch_size"] = by_size
    return drafter


def _cpu_args(step_tokens: int) -> dict[str, Any]:
    """Return vLLM's arguments on CPU. Chunked prefill is off: after a prompt chunk of a seeded request, vLLM 0.32 on
    CPU cannot rewind the request's generator (``gpu_model_runner._bookkeeping_sync``) and crashes."""
    return {
        "block_size": BLOCK,  # the smallest size on CPU, for the finest prefix cache
        "enforce_eager": True,
        "attention_config": CPU_ATTENTION,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": step_tokens,
    }


def cpu_model_args(model: Path) -> dict[str, Any]:
    """Return the vLLM arguments that ``model`` needs for correct results on CPU."""
    latent, mixer = _text_config(model).get("kv_lora_rank") is not None, family_mixer(model)
    return (CPU_LATENT if latent else {}) | ({} if mixer is None else mixer.cpu_engine)


def family_mixer(model: Path) -> type[Mixer] | None:
    """Return the layer that the model's family has in the place of attention; ``None`` for attention alone."""
    family = ARCHITECTURES.get(_config(model).get("model_type", ""))
    return None if family is None else family.mixer


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _text_config(model: Path) -> dict[str, Any]:
    config = _config(model)
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _longest_sequence(model: Path, max_context: int) -> int:
    """Return one token more than an episode's maximum, so that a full episode can be scored (scoring generates a
    token), capped at the model's max_position_embeddings."""
    limit = _text_config(model).get("max_position_embeddings")
    return min(max_context + 1, limit) if limit and limit >= max_context else max_context + 1
