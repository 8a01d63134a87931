"""Activations of a training pass: what each layer keeps for the backward pass, and what it needs beside that.

With e bytes per value, t tokens of a micro-batch on a rank, s = t / tensor of them with sequence parallelism, h the
hidden size, q and kv the widths of all query and all key-value heads, f the feed-forward width (all but h divided by
the tensor-parallel size), R routed copies of tokens on a rank and g the width of an expert:

=============================== ======================================================================================
attention, grouped queries      e·t·(3q + 3kv), +e·t·q with norms of query and key; 4 bytes per token and head
attention, latent               e·t·(2·(query + value)) of the expanded heads, e·s of the compressed ones
each norm before a block        2·e·h·s: its input, the residual stream, and its output
dense feed-forward layer        6·f·t: both halves of the first product (4·f) and the activated product (2·f)
experts                         (2·h + 6·g)·R, and the same 6·g per token of the shared experts
=============================== ======================================================================================

Counted in tensors that Transformer Engine's layers and Megatron-Core 0.16.1 keep. PyTorch's layers
(``policy.kernels=torch``) keep some more, on which tests on CPU measure these formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fleet.config.schema import ParallelConfig, Recompute
from megatron_fleet.models.model import Model

FP8 = 1
"""Bytes of a value in FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """A training pass over one micro-batch.

    Attributes:
        tokens: tokens of the micro-batch, over all context-parallel ranks.
        value_bytes: bytes of a value of the model's data type.
        fp8: inputs of linear layers are kept in FP8.
        torch_layers: PyTorch's layers instead of Transformer Engine's.
        imbalance: tokens of the busiest expert-parallel rank, as a multiple of the mean.
    """

    model: Model
    parallel: ParallelConfig
    tokens: int
    recompute: Recompute = "none"
    value_bytes: int = 2
    fp8: bool = False
    torch_layers: bool = False
    imbalance: float = 1.0

    @property
    def local(self) -> int:
        """Tokens of a context-parallel rank (t)."""
        return -(-self.tokens // self.parallel.context)

    @property
    def sliced(self) -> int:
        """Tokens of a rank outside of the matrices (s)."""
        return -(-self.local // self.parallel.tensor) if self.parallel.sequence_parallel else self.local

    @property
    def routed(self) -> int:
        """Copies of tokens that the experts of the busiest rank receive (R)."""
        copies = self.sliced * self.model.experts_per_token * self.parallel.expert_tensor_size
        return int(copies * self.imbalance)

    @property
    def input_bytes(self) -> int:
        """Bytes of a value that a linear layer keeps of its input."""
        return FP8 if self.fp8 else self.value_bytes


def layer_saved(of: TrainingPass, layer: int) -> dict[str, int]:
    """Bytes that a layer keeps for its backward pass, by tensor, without recomputation; ``layer`` counts from 0."""
    mixing = _mixer(of) if of.model.has_mixer(layer) else _latent(of) if of.model.latent else _grouped(of)
    stream = of.model.hidden * of.sliced
    norm = of.input_bytes * stream + 4 * of.sliced  # its output, and a float32 per token for its own backward pass
    saved = {"residual": 2 * of.value_bytes * stream, "attention norm": norm, "feed-forward norm": norm}
    feed_forward = _experts(of) if of.model.has_experts(layer) else _dense(of)
    return saved | mixing | feed_forward


def _grouped(of: TrainingPass) -> dict[str, int]:
    model, e, tensor = of.model, of.value_bytes, of.parallel.tensor
    head = model.head or model.hidden // model.heads
    q, kv = model.heads * head // tensor, (model.groups or model.heads) * head // tensor
    widths = {
        "qkv": q * (2 if model.output_gate else 1) + 2 * kv,
        "rotated": q + kv,
        "attended": q * (2 if model.output_gate or of.torch_layers else 1),
        "query norm": q if model.qk_norm else 0,  # a copy of the queries; the keys are a view
    }
    saved = {name: e * width * of.local for name, width in widths.items()}
    saved["softmax"] = 4 * model.heads // tensor * of.local
    if model.qk_norm:
        saved["query norm"] += 4 * (model.heads + (model.groups or model.heads)) // tensor * of.local
    return saved | _projected(of, q)


def _latent(of: TrainingPass) -> dict[str, int]:
    model, e = of.model, of.value_bytes
    nope, rotated, value = (x or 0 for x in (model.nope, model.rotated, model.value))
    heads = model.heads // of.parallel.tensor
    compressed = 2 * (model.q_lora or 0) + 2 * (model.kv_lora or 0) + rotated
    return {
        "compressed": e * compressed * of.sliced,
        "expanded": e * heads * (2 * (nope + rotated) + value) * of.local,
        "attended": e * heads * value * of.local,
        "softmax": 4 * heads * of.local,
    } | _projected(of, heads * value)


def _projected(of: TrainingPass, width: int) -> dict[str, int]:
    """Attention keeps its output in the model's type; an FP8 projection keeps it once more."""
    return {"projection input": FP8 * width * of.local if of.fp8 else 0}


def _mixer(of: TrainingPass) -> dict[str, int]:
    """A family's own layer: its input and output widths, each kept about twice (convolution, gate, norm)."""
    mixer = of.model.mixer
    assert mixer is not None
    width = sum(size for _, size in mixer.widths()) // of.parallel.tensor
    return {"mixer": 2 * of.value_bytes * width * of.local}


def _dense(of: TrainingPass) -> dict[str, int]:
    width = of.model.ffn // of.parallel.tensor * of.local
    return {
        "gate and up": 2 * of.value_bytes * width,
        "activated": (of.input_bytes + (of.value_bytes if of.torch_layers else 0)) * width,
    }


def _experts(of: TrainingPass) -> dict[str, int]:
    model, e = of.model, of.value_bytes
    width = model.expert_ffn // of.parallel.expert_tensor_size * of.routed
    shared = model.shared_ffn // of.parallel.tensor * of.local
    return {
        # Logits and probabilities in float32, the map of routed tokens, and where each copy went.
        "router": (4 + 4 + 1 + 8) * model.experts * of.sliced,
        "dispatched": of.input_bytes * model.hidden * of.routed,
        "expert gate and up": 2 * e * width,
        "expert activated": (of.input_bytes + (2 * e if of.torch_layers else 0)) * width,
        "shared experts": (2 * e + of.input_bytes + (e if of.torch_layers else 0)) * shared,
    }


_RECOMPUTED = {
    "core_attn": ("softmax",),
    "layernorm": ("attention norm", "feed-forward norm"),
    "mlp": ("gate and up", "activated"),
    "moe": ("router", "dispatched", "expert gate and up", "expert activated", "shared experts"),
    "moe_act": ("expert activated",),
    "shared_experts": ("shared experts",),
    "mla_up_proj": ("expanded",),
}
"""Part of a layer that ``policy.recompute`` names → the tensors of `layer_saved` that it then does not keep."""


def recomputed_whole(recompute: Recompute, place: int) -> bool:
    """Whether all activations of a layer are recomputed; ``place``: its index in its model chunk."""
    return recompute == "full" or (isinstance(recompute, int) and place < recompute)


def layer_kept(of: TrainingPass, layer: int, place: int = 0) -> int:
    """Bytes that a layer keeps for its backward pass, with the recomputation that is configured.

    Args:
        place: the layer's index in its model chunk.
    """
    if recomputed_whole(of.recompute, place):
        return of.value_bytes * of.model.hidden * of.sliced
    saved = layer_saved(of, layer)
    if not isinstance(of.recompute, tuple):
        return sum(saved.values())
    gone = {name for part in of.recompute for name in _RECOMPUTED[part]}
    if not of.torch_layers:
        # Transformer Engine has these norms inside of the linear layers after them, where nothing recomputes them.
        inside = {"attention norm": not of.model.latent, "feed-forward norm": not of.model.has_experts(layer)}
        gone -= {name for name, fused in inside.items() if fused}
    return sum(nbytes for name, nbytes in saved.items() if name not in gone)


def layer_working(of: TrainingPass, layer: int, place: int = 0) -> int:
    """Bytes that the backward pass of a layer takes beside what it and those before it keep.

    What is recomputed exists once. Gradients: of the widest product and its activation, and of the gathered input of a
    matrix, which is gathered again: (6·f + 4·h)·t of a dense layer in 2-byte values.

    Args:
        place: the layer's index in its model chunk.
    """
    model, e = of.model, of.value_bytes
    again = sum(layer_saved(of, layer).values()) - layer_kept(of, layer, place)
    gathered = 2 * e * model.hidden * of.local
    if not model.has_experts(layer):
        widest = 3 * e * model.ffn // of.parallel.tensor * of.local + gathered
    else:
        width = model.expert_ffn // of.parallel.expert_tensor_size
        widest = (3 * e * width + 2 * e * model.hidden) * of.routed
    mixing = sum(_mixer(of).values()) if model.has_mixer(layer) else _attention_gradients(of)
    return again + max(widest, mixing + gathered)


def _attention_gradients(of: TrainingPass) -> int:
    """Gradients of queries, keys and values, and once more of their common input."""
    saved = _latent(of) if of.model.latent else _grouped(of)
    return 2 * (saved["expanded"] if of.model.latent else saved["qkv"])


def chunk_bytes(of: TrainingPass, layers: Sequence[int]) -> tuple[int, int]:
    """Bytes that a model chunk keeps for its backward pass, and the most that this takes beside them.

    What a layer kept is free when the backward pass of the layer before it begins.
    """
    known: dict[tuple[bool, bool, bool], tuple[int, int]] = {}
    kept = working = 0
    for place, layer in reversed(list(enumerate(layers))):
        kind = (of.model.has_mixer(layer), of.model.has_experts(layer), recomputed_whole(of.recompute, place))
        if kind not in known:
            known[kind] = layer_kept(of, layer, place), layer_working(of, layer, place)
        own, beside = known[kind]
        working = max(working, beside - kept)
        kept += own
    return kept, working


def chunks_in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Largest number of forward passes of a model chunk whose activations a pipeline stage keeps at a time.

    One forward, one backward: the first stage begins as many as there are stages; with interleaved chunks as many as
    Megatron-Core 0.16.1 warms up with (``schedules.py``), and one more.
    """
    if parallel.pipeline == 1:
        return 1
    if parallel.virtual == 1:
        return min(parallel.pipeline - stage, micro_batches)
    warm_up = 2 * (parallel.pipeline - stage - 1) + (parallel.virtual - 1) * parallel.pipeline
    return min(warm_up + 1, micro_batches * parallel.virtual)
