"""Memory of an engine on each of its devices: vLLM's weights, KV cache, and what it sets aside for a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_fleet.config.schema import Config, EngineConfig, ParallelConfig
from megatron_fleet.models import table
from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import DEEPSEEK_PREDICTION
from megatron_fleet.planning.memory.parameters import HeldTensor, held_by_rules, layer_tensors

GIB = 1 << 30
VOCABULARY_ROWS = 64
"""vLLM pads the vocabulary to a multiple of this."""
STEP_TOKENS = 16_384
"""``max_num_batched_tokens`` that vLLM 0.32 chooses on GPUs of 70 GiB and more (``EngineArgs.get_batch_defaults``)."""
GRAPHS = GIB
"""CUDA graphs of an engine: an estimate, within what `EngineConfig.gpu_memory_utilization` allows."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one device of an engine.

    Attributes:
        step: activations, logits and the sampler's copies of them in the largest step (an estimate).
        token: KV cache of one token.
        state: state of one sequence in the layers that have no KV cache.
        layer: largest layer, which a weight update makes anew before it replaces the old values.
    """

    weights: int
    layer: int
    step: int
    graphs: int
    token: int
    state: int

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.step + self.graphs


def engine_memory(config: Config, model: Model, hf_config: Mapping[str, Any]) -> EngineMemory:
    """Compute an engine's memory. ``hf_config``: content of ``config.json``, which says what is stored quantised."""
    engine, value_bytes = config.rollout.engine, 4 if config.model.dtype == "float32" else 2
    return EngineMemory(
        weights=_weights(config, model, hf_config, value_bytes),
        layer=_layer(config, model, hf_config, value_bytes),
        step=_step(config, model, value_bytes),
        graphs=0 if engine.enforce_eager else GRAPHS,
        token=kv_bytes_per_token(model, engine, value_bytes),
        state=state_bytes(model, engine),
    )


def kv_bytes_per_token(model: Model, engine: EngineConfig, value_bytes: int) -> int:
    """Return the size of a token's KV cache on each device of an engine.

    With more devices than key-value heads each device holds one head; the compressed key-value of latent attention is
    whole on each.
    """
    if model.kv_lora is not None:
        values = model.kv_lora + (model.rotated or 0)
    else:
        head = model.head or model.hidden // model.heads
        values = 2 * max(1, (model.groups or model.heads) // engine.tensor_parallel) * head
    mixers = sum(map(model.has_mixer, range(model.layers)))
    drafter = model.mtp if engine.speculative.method == "mtp" else 0
    return (model.layers - mixers + drafter) * values * (1 if engine.kv_cache_dtype == "fp8" else value_bytes)


def state_bytes(model: Model, engine: EngineConfig) -> int:
    """Return the size of a sequence's state in the layers that a mixer has in the place of attention."""
    mixers = sum(map(model.has_mixer, range(model.layers)))
    return 0 if model.mixer is None else mixers * model.mixer.state_bytes // engine.tensor_parallel


def _weights(config: Config, model: Model, hf_config: Mapping[str, Any], value_bytes: int) -> int:
    engine = config.rollout.engine
    devices = ParallelConfig(tensor=engine.tensor_parallel, expert_tensor=engine.tensor_parallel)
    rows = math.ceil(model.vocab / VOCABULARY_ROWS) * VOCABULARY_ROWS
    vocabulary = rows * model.hidden * (1 if model.tied else 2) // engine.tensor_parallel
    held = [tensor for layer in range(model.layers) for tensor in layer_tensors(model, devices, layer)]
    if engine.speculative.method == "mtp":
        rules = table.prediction(model, DEEPSEEK_PREDICTION)
        held += model.mtp * held_by_rules(rules, model, devices)
    return (vocabulary + model.hidden) * value_bytes + stored_bytes(held, config, hf_config)


def _layer(config: Config, model: Model, hf_config: Mapping[str, Any], value_bytes: int) -> int:
    """Bytes of the largest layer, or the embedding, in the form in which it is sent."""
    size = config.rollout.engine.tensor_parallel
    devices = ParallelConfig(tensor=size, expert_tensor=size)
    kinds = {(model.has_mixer(i), model.has_experts(i)): i for i in range(model.layers)}
    layers = [stored_bytes(layer_tensors(model, devices, i), config, hf_config) for i in kinds.values()]
    return max(*layers, value_bytes * model.vocab * model.hidden // size)


def stored_bytes(tensors: Iterable[HeldTensor], config: Config, hf_config: Mapping[str, Any]) -> int:
    """Return the size of tensors in the form in which engines hold them, and the trainer sends them."""
    value_bytes = 4 if config.model.dtype == "float32" else 2
    return _stored_bytes(tensors, value_bytes, *_linear_bytes(config, hf_config, value_bytes))


def _stored_bytes(tensors: Iterable[HeldTensor], value_bytes: int, expert: float, other: float) -> int:
    """Args: ``expert``, ``other``: bytes per weight of experts and of other linear layers."""
    total = 0
    for tensor in tensors:
        linear = expert if tensor.expert else other
        total += int(tensor.total * (linear if tensor.linear else 4 if tensor.float32 else value_bytes))
    return total


def sent_bytes(config: Config, model: Model, hf_config: Mapping[str, Any]) -> int:
    """Return the size of the whole model in the form in which the trainer sends it."""
    value_bytes = 4 if config.model.dtype == "float32" else 2
    return _sent_bytes(model, value_bytes, *_linear_bytes(config, hf_config, value_bytes))


@lru_cache(maxsize=16)
def _sent_bytes(model: Model, value_bytes: int, expert: float, other: float) -> int:
    """A search of layouts asks for the same one again and again."""
    held = [tensor for layer in range(model.layers) for tensor in layer_tensors(model, ParallelConfig(), layer)]
    embeddings = model.vocab * (1 if model.tied else 2) + 1
    return embeddings * model.hidden * value_bytes + _stored_bytes(held, value_bytes, expert, other)


def _linear_bytes(config: Config, hf_config: Mapping[str, Any], value_bytes: int) -> tuple[float, float]:
    """Bytes per weight of experts and of other linear layers: as stored, or quantised when the engine loads them."""
    fp8 = 1 + 4 / 128**2  # and a float32 scale per block of 128 x 128
    text = hf_config.get("text_config") or hf_config
    stored = hf_config.get("quantization_config") or text.get("quantization_config")
    if stored is None:
        everywhere = fp8 if config.rollout.engine.fp8(config.precision.recipe) else float(value_bytes)
        return everywhere, everywhere
    if stored.get("quant_method") == "fp8":
        return fp8, fp8
    return 0.5 + 2 / 32, float(value_bytes)  # INT4 experts with a bfloat16 scale per group of 32


def _step(config: Config, model: Model, value_bytes: int) -> int:
    """Bytes of the largest step: three tensors of hidden size, the widest layer between, and the sampler's logits.

    The sampler has the logits of each sequence in the model's data type and three times in float32 (processed, as
    log-probs, sorted).
    """
    engine = config.rollout.engine
    sequences = engine.sequences(config.rollout.episodes_in_flight)
    tokens = engine.max_num_batched_tokens or STEP_TOKENS
    widest = 3 * model.ffn // engine.tensor_parallel
    if model.experts:
        routed = 3 * model.expert_ffn // engine.tensor_parallel + 2 * model.hidden
        widest = max(widest, model.experts_per_token * routed)
    layers = value_bytes * tokens * (3 * model.hidden + widest)
    return layers + sequences * model.vocab * (value_bytes + 3 * 4)
