"""Parameters, gradients and optimizer states of a rank: numbers of elements, from the weight table of the model.

Megatron-Core 0.16.1 lays parameters out in one buffer per model chunk, kind (dense or experts) and data type. Each
begins at a multiple of 64 elements, and a buffer ends at a multiple of 128 and of the ranks that share its optimizer
states (``param_and_grad_buffer.py``). Where reductions overlap with the backward pass, buffers are cut into buckets of
40 million elements and more, each with such an end; these few elements are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_fleet.config.schema import LoraConfig, ParallelConfig
from megatron_fleet.models import table
from megatron_fleet.models.layout import layers_of_stages, padded_vocab_size
from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import Leaf, Rule
from megatron_fleet.weights.mapping import sizes

_WHOLE = ("linear_q_down_proj.", "linear_kv_down_proj.", "mlp.router.", "shared_experts.gate_weight")
"""Parts of the keys of matrices that every tensor-parallel rank holds whole; so are all norms."""
_ROW_PARALLEL = ("linear_proj.", "linear_fc2.")
_NOT_LINEAR = ("mlp.router.", "shared_experts.gate_weight")
_START, _END = 64, 128


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Equal tensors of a rank.

    Attributes:
        key: Megatron's key, with ``{i}`` in the place of the layer.
        elements: elements of one of them, on this rank.
        count: number of them: experts of a layer on this rank, or 1.
        expert: belongs to routed experts, which have a data-parallel group of their own.
        float32: kept in float32 whatever the model's data type.
        linear: weight of a linear layer within the layers, which FP8 recipes quantise.
        buffer: no parameter: neither gradient nor optimizer state.
        frozen: not trained.
    """

    key: str
    elements: int
    count: int = 1
    expert: bool = False
    float32: bool = False
    linear: bool = False
    buffer: bool = False
    frozen: bool = False

    @property
    def total(self) -> int:
        return self.elements * self.count


def chunks_of_stage(model: Model, parallel: ParallelConfig, stage: int) -> list[list[int]]:
    """Layers of each model chunk of a pipeline stage; several with interleaved stages."""
    stages = layers_of_stages(model.layers, parallel)
    chunks: list[list[int]] = []
    first = 0
    for _ in range(parallel.virtual):
        for other, count in enumerate(stages):
            here = range(first, first + count // parallel.virtual)
            first = here.stop
            if other == stage:
                chunks.append(list(here))
    return chunks


def held_by_stage(
    model: Model, parallel: ParallelConfig, stage: int = 0, lora: LoraConfig | None = None
) -> list[list[HeldTensor]]:
    """Tensors of a rank of a pipeline stage, for each of its model chunks."""
    chunks = chunks_of_stage(model, parallel, stage)
    found = []
    for index, layers in enumerate(chunks):
        held: list[HeldTensor] = []
        first = stage == 0 and index == 0
        last = stage == parallel.pipeline - 1 and index == len(chunks) - 1
        rows = padded_vocab_size(model.vocab, parallel.tensor) // parallel.tensor
        if first:
            held.append(HeldTensor("embedding.word_embeddings.weight", rows * model.hidden))
        for layer in layers:
            held += layer_tensors(model, parallel, layer)
        if last:
            held.append(HeldTensor("decoder.final_layernorm.weight", model.hidden))
            if not (model.tied and first):  # a tied head on another stage than the embedding is a copy of it
                held.append(HeldTensor("output_layer.weight", rows * model.hidden))
        if lora is not None and lora.rank:
            held = [replace(tensor, frozen=True) for tensor in held]
            for layer in layers:
                held += _adapters(model, parallel, layer, lora)
        found.append(held)
    return found


def layer_tensors(model: Model, parallel: ParallelConfig, layer: int) -> list[HeldTensor]:
    """Tensors of a layer on one rank; ``layer`` counts from 0."""
    return list(_tensors_of_kind(model, parallel, model.has_mixer(layer), model.has_experts(layer)))


@lru_cache(maxsize=512)
def _tensors_of_kind(model: Model, parallel: ParallelConfig, mixer: bool, experts: bool) -> tuple[HeldTensor, ...]:
    """Tensors of the layers of one kind; a search of layouts asks for the same ones again and again."""
    return tuple(held_by_rules(table.layer(model, mixer, experts), model, parallel))


def held_by_rules(rules: Sequence[Rule], model: Model, parallel: ParallelConfig) -> list[HeldTensor]:
    """Tensors of one rank that rules of the weight table describe."""
    known = sizes(model)
    return [_held(rule, known, model, parallel) for rule in rules]


def _held(rule: Rule, known: dict[str, int], model: Model, parallel: ParallelConfig) -> HeldTensor:
    elements = sum(_count(leaf, known) for leaf in rule.leaves)
    expert = "{e}" in rule.leaves[0].name
    whole = "norm" in rule.key or any(part in rule.key for part in _WHOLE)
    return HeldTensor(
        rule.key,
        elements // (parallel.expert_tensor_size if expert else 1 if whole else parallel.tensor),
        count=model.experts // parallel.expert if expert else 1,
        expert=expert,
        float32=rule.float32,
        linear=len(rule.leaves[0].shape) == 2 and not any(part in rule.key for part in _NOT_LINEAR),
        buffer=rule.key.endswith("expert_bias"),
    )


def _count(leaf: Leaf, known: dict[str, int]) -> int:
    rows, *columns = (known[name] for name in leaf.shape)
    if leaf.rows is not None:
        rows = leaf.rows.length if leaf.rows.period is None else rows // leaf.rows.period * leaf.rows.length
    return rows * math.prod(columns)


def _adapters(model: Model, parallel: ParallelConfig, layer: int, lora: LoraConfig) -> Iterator[HeldTensor]:
    """Adapters A ``[rank, in]`` and B ``[out, rank]`` of a layer, sharded as `trainer.megatron.lora` says."""
    known = sizes(model)
    for rule in table.layer(model, model.has_mixer(layer), model.has_experts(layer)):
        target = _target(rule.key)
        if target is None or target not in lora.targets or len(rule.leaves[0].shape) != 2:
            continue
        expert = "{e}" in rule.leaves[0].name
        size = parallel.expert_tensor_size if expert else parallel.tensor
        out, inner = sum(known[leaf.shape[0]] for leaf in rule.leaves), known[rule.leaves[0].shape[1]]
        rows_split = not any(part in rule.key for part in (*_ROW_PARALLEL, *_WHOLE))
        columns_split = any(part in rule.key for part in _ROW_PARALLEL)
        count = model.experts // parallel.expert if expert else 1
        yield HeldTensor(f"{rule.key}.a", lora.rank * inner // (size if columns_split else 1), count, expert)
        yield HeldTensor(f"{rule.key}.b", lora.rank * out // (size if rows_split else 1), count, expert)


def _target(key: str) -> str | None:
    if ".linear_" not in key:
        return None
    return "attention" if ".self_attention." in key else "experts" if ".mlp.experts." in key else "mlp"


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a rank by what they cost.

    Attributes:
        stored: bytes of all parameters and of the routers' biases, without padding.
        trained: elements of trained parameters, without padding.
        buffers: elements of the gradient buffers, with their padding.
        shards: elements of the rank's share of optimizer states: the largest share, with the padding of the end.
        padding: elements of padding in the parameters' buffers.
        linear: elements of linear layers that FP8 recipes quantise.
    """

    stored: int
    trained: int
    buffers: int
    shards: int
    padding: int
    linear: int


def count_elements(chunks: Sequence[Sequence[HeldTensor]], parallel: ParallelConfig, dtype_bytes: int) -> Elements:
    """Count a rank's elements. ``dtype_bytes``: of the model's data type."""
    replicas = parallel.data * parallel.context
    ranks = parallel.tensor * replicas
    stored = trained = buffers = shards = linear = 0
    for chunk in chunks:
        for expert, float32 in ((False, False), (False, True), (True, False)):
            size = ranks // (parallel.expert * parallel.expert_tensor_size) if expert else replicas
            mine = [t for t in chunk if not (t.buffer or t.frozen) and (t.expert, t.float32) == (expert, float32)]
            trained += sum(t.total for t in mine)
            length = _buffer(mine, size)
            buffers, shards = buffers + length, shards + length // size
        stored += sum(t.total * (4 if t.float32 else dtype_bytes) for t in chunk)
        linear += sum(t.total for t in chunk if t.linear)
    return Elements(stored, trained, buffers, shards, buffers - trained, linear)


@lru_cache(maxsize=4096)
def elements_of_stage(
    model: Model, parallel: ParallelConfig, stage: int, lora: LoraConfig, dtype_bytes: int
) -> Elements:
    """Count the elements of a rank of a pipeline stage; a search of layouts asks for the same ones again and again."""
    return count_elements(held_by_stage(model, parallel, stage, lora), parallel, dtype_bytes)


def _buffer(tensors: Sequence[HeldTensor], ranks: int) -> int:
    """Length of a buffer over ``ranks`` ranks, in elements."""
    length = sum(_up(t.elements, _START) * t.count for t in tensors)
    return _up(length, math.lcm(ranks, _END))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
