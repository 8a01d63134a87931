"""Seconds of the trainer's passes and of an optimizer step, from FLOPs, bytes and messages.

A micro-batch is timed layer by layer. A layer takes its matrix products, attention and messages one after another, or
the host's time to launch its kernels where that is longer. A pipeline of p stages and v virtual ones with m
micro-batches takes m + (p - 1) / v times its slowest stage. The constants are shares of what data sheets promise,
chosen once for all models to be near to what others published (docs/run/planning.md has every error).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.memory.activations import TrainingPass, recomputed_whole
from megatron_fleet.planning.memory.parameters import chunks_of_stage
from megatron_fleet.planning.memory.phases import IMBALANCE, trainer_memory
from megatron_fleet.planning.workload import Workload

DENSE, ATTENTION, EXPERTS = 0.62, 0.45, 0.45
"""Shares of the peak that matrix products (with what is between them), attention, and experts reach."""
TORCH_DENSE, TORCH_ATTENTION = 0.57, 0.29
"""The same for PyTorch's layers (``policy.kernels=torch``), measured on an H200."""
FORWARD_ONLY = 1.3
"""Seconds of a pass without gradients, as a multiple of the training pass's forward part (log-probs at every token)."""
HALF_SPEED_TOKENS = 128
"""Tokens of an expert in a micro-batch at which its products reach half of ``EXPERTS``."""
EXPERT_COPIES = 6
"""Times that a routed token is read or written beside the products of its expert, in one direction."""
FP8_SPEED = 1.3
"""Speed of a layer's products in FP8, of that in bfloat16 (measured by others: 1.2 to 1.4)."""
HBM, NVLINK, NETWORK = 0.75, 0.7, 0.6
"""Shares of bandwidths that copies and messages reach."""
ALL_TO_ALL = 0.5
"""Share of these bandwidths that an all-to-all of many small messages reaches."""
LAYER_S, EXPERT_LAYER_S = 0.3e-3, 0.9e-3
"""Host seconds to launch a layer's forward pass; its backward pass takes twice that."""
ADAM_BYTES = 30
"""Bytes that an update reads and writes per element: gradient, master weight, moments, weight."""
HOST_ADAM, THREAD_ADAM = 200e9, 11e9
"""Bytes per second at which all cores of a host update offloaded states, and one thread."""
UPDATE_S = 0.5
"""Seconds of rest of an update: data, norms, metrics."""
PACKED = 0.95
"""Share of a micro-batch's tokens that packing fills, when sequences are much shorter than it."""
MESSAGE_S = 20e-6
"""Seconds until a message between GPUs begins to arrive."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of a layer's forward pass over a micro-batch, by part."""

    compute: float
    experts: float
    attention: float
    tensor: float
    exchange: float
    context: float
    host: float


def training_time(config: Config, model: Model, gpu: Gpu, load: Workload) -> Mapping[str, float]:
    """Return the seconds of forward and backward passes and updates of a step, by what they are spent on."""
    return _pass(config, model, gpu, load, backward=True)


def forward_time(config: Config, model: Model, gpu: Gpu, load: Workload) -> Mapping[str, float]:
    """Return the seconds of a pass that computes log-probs only, of the reference or of the old policy, likewise."""
    return _pass(config, model, gpu, load, backward=False)


def _pass(config: Config, model: Model, gpu: Gpu, load: Workload, backward: bool) -> Mapping[str, float]:
    parallel, updates = config.parallel, config.policy.updates_per_batch if backward else 1
    tokens = load.tokens / updates / parallel.data
    number = micro_batches(config, load, updates)
    width = tokens / number
    pairs = load.episodes * load.pairs() / updates / parallel.data / number
    uneven = _uneven(load, parallel.data * updates)
    stages = []
    for stage in range(parallel.pipeline):
        chunks = chunks_of_stage(model, parallel, stage)
        stages.append(_stage(config, model, gpu, chunks, width, pairs, backward))
    stages[-1]["head"] = _head(config, model, gpu, load, width, backward)
    slowest = max(stages, key=lambda parts: sum(parts.values()))
    bubble = (parallel.pipeline - 1) / parallel.virtual * sum(slowest.values()) * updates
    parts = {name: seconds * number * updates for name, seconds in slowest.items()}
    parts["uneven ranks"] = (uneven - 1) * sum(parts.values())
    parts["pipeline bubble"] = bubble
    if backward:
        parts |= {name: updates * seconds for name, seconds in _update(config, model, gpu, width).items()}
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def training_flops(model: Model, load: Workload) -> float:
    """Return the FLOPs that the model needs for forward and backward pass of a step, without what is recomputed."""
    cost = SequenceCost.of(model)
    forward = cost.token * load.tokens + cost.pair * load.episodes * load.pairs()
    return 3 * (forward + cost.prediction * load.tokens * load.sampled)


def micro_batches(config: Config, load: Workload, updates: int) -> int:
    """Return the number of micro-batches of an update on a data-parallel rank."""
    tokens = load.tokens / updates / config.parallel.data
    capacity = config.policy.micro_batch_tokens
    # A micro-batch of a few sequences is not filled: on average half a sequence is left over.
    filled = max(capacity / 2, min(PACKED * capacity, capacity - load.mean / 2))
    episodes = load.episodes / updates / config.parallel.data
    return max(1, min(math.ceil(tokens / filled), math.ceil(episodes)))


def _uneven(load: Workload, parts: int) -> float:
    """Tokens of the fullest of ``parts`` parts of a batch, as a multiple of the mean: at least its longest sequence."""
    each = load.episodes / parts
    longest = float(load.lengths(max(2, load.episodes))[-1])
    return max(1.0, longest / (each * load.mean))


def _stage(
    config: Config, model: Model, gpu: Gpu, chunks: list[list[int]], width: float, pairs: float, backward: bool
) -> dict[str, float]:
    """Seconds of a micro-batch on a pipeline stage by part. ``pairs``: attended pairs of the micro-batch."""
    recompute = config.policy.recompute
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for place, layer in (numbered for layers in chunks for numbered in enumerate(layers)):
        kind = (model.has_mixer(layer), model.has_experts(layer), recomputed_whole(recompute, place))
        kinds.setdefault(kind, []).append(layer)
    names = ("matrix products", "experts", "attention", "tensor parallel", "expert parallel", "context parallel")
    found = dict.fromkeys((*names, "launching"), 0.0)
    for (_, _, again), equal in kinds.items():
        compute, messages = (3 + again, 2.5 + again) if backward else (FORWARD_ONLY, FORWARD_ONLY)
        exchanges, host = (2 + again, 3 + again) if backward else (1, 1)
        one, count = _layer(config, model, gpu, equal[0], width, pairs), len(equal)
        parts = (
            *(compute * one.compute, compute * one.experts, compute * one.attention),
            *(messages * one.tensor, exchanges * one.exchange, exchanges * one.context),
        )
        for name, seconds in zip(names, parts, strict=True):
            found[name] += count * seconds
        found["launching"] += count * max(0.0, host * one.host - sum(parts))
    return found


def _layer(config: Config, model: Model, gpu: Gpu, layer: int, width: float, pairs: float) -> _Layer:
    parallel, mixer, experts = config.parallel, model.has_mixer(layer), model.has_experts(layer)
    ranks = parallel.tensor * parallel.context
    cost = SequenceCost.of_layer(model, layer)
    own = 6 * model.hidden * model.experts_per_token * model.expert_ffn if experts else 0
    fp8 = FP8_SPEED if config.precision.fp8 else 1.0
    dense, attention = (TORCH_DENSE, TORCH_ATTENTION) if config.policy.kernels == "torch" else (DENSE, ATTENTION)
    speed = gpu.flops * dense * fp8
    local = width / parallel.context
    e, hidden = 2, model.hidden
    within = ranks <= gpu.per_host
    link = gpu.nvlink * NVLINK if within else gpu.network * NETWORK
    tensor = 0.0
    if parallel.tensor > 1:
        moved = e * hidden * local * (parallel.tensor - 1) / parallel.tensor
        tensor = 4 * (moved / (gpu.nvlink * NVLINK) + MESSAGE_S)
    context = 0.0
    if parallel.context > 1 and not mixer:
        head = model.head or hidden // model.heads
        values = (
            (model.kv_lora or 0) + (model.rotated or 0) if model.latent else 2 * (model.groups or model.heads) * head
        )
        context = e * values * width * (parallel.context - 1) / parallel.context / parallel.tensor / link + MESSAGE_S
    routed, exchange = 0.0, 0.0
    if experts:
        routed, exchange = _routed(config, model, gpu, width)
    return _Layer(
        compute=(cost.token - own) * width / ranks / speed,
        experts=routed,
        attention=cost.pair * pairs / ranks / (gpu.flops * attention),
        tensor=tensor,
        exchange=exchange,
        context=context,
        host=EXPERT_LAYER_S if experts else LAYER_S,
    )


def _routed(config: Config, model: Model, gpu: Gpu, width: float) -> tuple[float, float]:
    """Seconds of a layer's routed experts on the busiest rank, and of the messages to and from them."""
    parallel = config.parallel
    of = TrainingPass(model=model, parallel=parallel, tokens=math.ceil(width))
    imbalance = IMBALANCE if parallel.expert > 1 else 1.0
    copies = of.sliced * model.experts_per_token  # leave this rank, and as many arrive on average
    each = copies * parallel.expert * parallel.expert_tensor_size / model.experts
    fp8 = FP8_SPEED if config.precision.fp8 else 1.0
    speed = gpu.flops * EXPERTS * fp8 * each / (each + HALF_SPEED_TOKENS)
    products = 6 * model.hidden * model.expert_ffn * copies * imbalance / speed
    moved = EXPERT_COPIES * 2 * model.hidden * copies * imbalance / (gpu.hbm * HBM)
    spread = parallel.expert * parallel.expert_tensor_size
    if spread == 1:
        return products + moved, 0.0
    sent = 2 * 2 * model.hidden * copies * imbalance
    hosts = max(1, spread / gpu.per_host)
    far = sent * (1 - 1 / hosts) / (gpu.network * NETWORK * ALL_TO_ALL)
    near = sent / hosts * (1 - 1 / min(spread, gpu.per_host)) / (gpu.nvlink * NVLINK * ALL_TO_ALL)
    return products + moved, far + near + 2 * MESSAGE_S


def _head(config: Config, model: Model, gpu: Gpu, load: Workload, width: float, backward: bool) -> float:
    """Seconds of the log-probs of a micro-batch; the backward pass computes the logits again."""
    parallel = config.parallel
    flops = 2 * model.hidden * model.vocab * width * load.sampled / parallel.tensor / parallel.context
    return (4 if backward else 1) * flops / (gpu.flops * DENSE)


def _update(config: Config, model: Model, gpu: Gpu, width: float) -> dict[str, float]:
    """Seconds of an optimizer step by part: reduction of gradients, update, gathering of parameters."""
    parallel, optimizer = config.parallel, config.policy.optimizer
    memory = max(
        (trainer_memory(config, model, stage) for stage in {0, parallel.pipeline - 1}), key=lambda m: m.elements.shards
    )
    replicas = parallel.data * parallel.context
    spans = parallel.world_size // parallel.pipeline > gpu.per_host
    # Ranks of one group on a host share its ports to the network, and reduce within the host first.
    link = gpu.network * NETWORK * min(gpu.per_host, replicas) if spans else gpu.nvlink * NVLINK
    link = min(link, gpu.nvlink * NVLINK)
    share = (replicas - 1) / replicas
    reduced = (memory.gradients + memory.parameters) * share / link
    shards = memory.elements.shards
    on_device = shards * (1 - optimizer.offload_fraction) * ADAM_BYTES / (gpu.hbm * HBM)
    offloaded = shards * optimizer.offload_fraction
    ranks, threads = min(gpu.per_host, parallel.world_size), config.policy.threads
    speed = HOST_ADAM if threads is None else min(HOST_ADAM, ranks * threads * THREAD_ADAM)
    on_host = offloaded * ADAM_BYTES * ranks / speed + offloaded * 6 / gpu.pcie
    return {"gradients": reduced, "optimizer": on_device + on_host, "other": UPDATE_S}
