"""Numbers that do not depend on the machine, each against the minimum of the algorithm. Prints one JSON object.

* ``collectives``: messages of a layer, of a micro-batch outside its layers, and of a step, for each way of splitting a
  model over two ranks; real ranks over gloo, a tiny model.
* ``kernels``: of a layer, forward and backward, on CUDA without Transformer Engine, through the dispatcher
  (`counting.DeviceWork`); models of real sizes without values.
* ``waits``: for the device, inside a micro-batch and in the rest of a step.
* ``bytes``: of a weight sync by transport, of the data of a step, of an offload, by the layouts that the code makes.
* ``host``: time of a tiny model's micro-batch, whose operators cost next to nothing: what the host needs to enqueue it.

    python benchmarks/counts.py [--only collectives,kernels]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from counting import Collectives, DeviceWork, as_device, chunk_on_device, run_micro_batches, take_step
from measured import stamp

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, Config, ParallelConfig

RESULT = Path(__file__).parent / "results" / "counts.cpu.json"
RANKS = 2
LAYERS = 2
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor": 2},
    "DP2": {"data": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "EP2": {"data": 2, "expert": 2},
}
TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SIZES = {
    "dense": TINY
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6},
    "experts": TINY
    | EXPERTS
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8},
}
"""Qwen3-8B and Qwen3-30B-A3B."""
HYBRID = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""Qwen3.5-9B."""

Key = tuple[str, str, str]
"""Phase (``forward``: outside autograd's backward pass), kind of message, process group."""

ACTIVATIONS, KEYS, ROUTED = "activations", "keys and values", "routed tokens"
PARAMETERS, MODEL, LITTLE = "parameters", "model", ""
UNITS = {
    ACTIVATIONS: "tokens × hidden size × 2 bytes",
    KEYS: "tokens × key and value heads × head size × 2 bytes",
    ROUTED: "tokens × experts per token × hidden size × 2 bytes",
    PARAMETERS: "parameters × 2 bytes, of one model-parallel rank, without experts",
    MODEL: "parameters of the whole model × 2 bytes",
}
MINIMUM: dict[tuple[str, str, str, str, str], tuple[int, float, str, str]] = {
    ("TP2", "layer", "forward", "all_gather", "tensor"): (2, 2, ACTIVATIONS, ""),
    ("TP2", "layer", "forward", "reduce_scatter", "tensor"): (2, 2, ACTIVATIONS, ""),
    ("TP2", "layer", "backward", "all_gather", "tensor"): (4, 4, ACTIVATIONS, "two of them gather inputs again"),
    ("TP2", "layer", "backward", "reduce_scatter", "tensor"): (2, 2, ACTIVATIONS, ""),
    ("TP2", "micro-batch", "forward", "all_gather", "tensor"): (1, 1, ACTIVATIONS, "before the head"),
    ("TP2", "micro-batch", "forward", "reduce_scatter", "tensor"): (1, 1, ACTIVATIONS, "after the embedding"),
    ("TP2", "micro-batch", "backward", "all_gather", "tensor"): (1, 1, ACTIVATIONS, ""),
    ("TP2", "micro-batch", "backward", "reduce_scatter", "tensor"): (1, 1, ACTIVATIONS, ""),
    ("TP2", "micro-batch", "forward", "all_reduce", "tensor"): (
        *(1, 0, LITTLE),
        "soft-max: the maximum, then three sums; 16 bytes a token",
    ),
    ("TP2", "step", "forward", "all_reduce", "tensor"): (1, 0, LITTLE, "gradients of norms"),
    ("TP2", "step", "forward", "all_reduce", "all"): (1, 0, LITTLE, "norm of the gradient"),
    ("TP2", "weight sync", "forward", "broadcast", "model"): (
        8,
        1,
        MODEL,
        "one for each layer and rank",
    ),
    ("DP2", "step", "forward", "reduce_scatter", "data"): (1, 1, PARAMETERS, "gradients are float32"),
    ("DP2", "step", "forward", "all_gather", "data"): (1, 1, PARAMETERS, ""),
    ("DP2", "step", "forward", "all_reduce", "data"): (1, 0, LITTLE, "metrics"),
    ("DP2", "step", "forward", "all_reduce", "all"): (1, 0, LITTLE, "norm of the gradient"),
    ("PP2", "micro-batch", "forward", "send", "pipeline"): (2, 2, ACTIVATIONS, "one each way"),
    ("PP2", "step", "forward", "broadcast", "pipeline"): (1, 0, LITTLE, "metrics: their size, then they"),
    ("PP2", "step", "forward", "all_reduce", "all"): (1, 0, LITTLE, "norm of the gradient"),
    ("PP2", "weight sync", "forward", "broadcast", "model"): (4, 1, MODEL, "one for each layer"),
    ("CP2", "layer", "forward", "all_gather", "context"): (1, 1, KEYS, ""),
    ("CP2", "layer", "backward", "reduce_scatter", "context"): (1, 1, KEYS, ""),
    ("CP2", "micro-batch", "forward", "all_reduce", "context"): (1, 0, LITTLE, "log-probs, and entropies"),
    ("CP2", "step", "forward", "reduce_scatter", "data"): (1, 1, PARAMETERS, "gradients are float32"),
    ("CP2", "step", "forward", "all_gather", "data"): (1, 1, PARAMETERS, ""),
    ("CP2", "step", "forward", "all_reduce", "all"): (1, 0, LITTLE, "norm of the gradient"),
    ("EP2", "layer", "forward", "all_gather", "expert"): (1, 0, LITTLE, "sizes of the messages"),
    ("EP2", "layer", "forward", "all_to_all", "expert"): (2, 2, ROUTED, "scores are sent by themselves"),
    ("EP2", "layer", "backward", "all_to_all", "expert"): (2, 2, ROUTED, "the same"),
    ("EP2", "step", "forward", "reduce_scatter", "data"): (1, 1, PARAMETERS, "gradients are float32; without experts"),
    ("EP2", "step", "forward", "all_gather", "data"): (1, 1, PARAMETERS, "without experts"),
    ("EP2", "step", "forward", "all_reduce", "data"): (1, 0, LITTLE, "metrics"),
    ("EP2", "step", "forward", "all_reduce", "all"): (1, 0, LITTLE, "norm of the gradient"),
    ("EP2", "weight sync", "forward", "broadcast", "all"): (6, 1, MODEL, ""),
}
"""Layout, part of the step, phase, kind and group → calls, size in a unit (0: less than a hundredth of it), unit, note.

``forward`` is all that happens outside autograd's backward pass.
"""


def make_config(folder: Path, hf: Mapping[str, Any], parallel: Mapping[str, int], dtype: str = "bfloat16") -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"config.{os.getpid()}.part"  # both ranks write it
    part.write_text(json.dumps(dict(hf)))
    part.replace(folder / "config.json")
    return Config.model_validate(
        {
            "run": {"name": "counts", "out": str(folder), "steps": 1},
            "model": {"path": str(folder), "dtype": dtype},
            "parallel": dict(parallel),
            "policy": {"micro_batch_tokens": 256, "threads": 1, "optimizer": {"lr": 1e-4}},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": 128,
                "sampling": {"max_tokens_per_turn": 64, "max_turns": 8},
            },
            "data": {"tasks": "embedded"},
        }
    )


def make_data(lengths: tuple[int, ...] = (96, 64)) -> list[Datum]:
    """Sequences with the loss at the last half of their positions."""
    data = []
    for number, n in enumerate(lengths):
        scale, mask = 1 / sum(lengths), np.arange(n) >= n // 2
        tokens = np.arange(n, dtype=np.int32) * (number + 3) % 512
        weights, logprobs = (np.where(mask, value, 0).astype(np.float32) for value in (scale, -6))
        data.append(Datum(tokens, mask, weights, logprobs, scale))
    return data


def run_rank(rank: int, port: int, folder: str) -> None:
    """One of the ranks: all layouts, one after the other. Rank 0 writes what was counted."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=RANKS)
    rows = [row for layout in LAYOUTS for row in count_layout(layout, Path(folder))]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()


def count_layout(layout: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of a layout; collective. Counts are linear in layers and micro-batches, so differences separate them."""
    small, small_step, small_sync, sizes = count_passes(layout, LAYERS, folder)
    large = count_passes(layout, 2 * LAYERS, folder)[0]
    rows = []
    for key in {*small[1], *small_step, *small_sync}:
        layer = (large[1][key] - small[1][key]) / LAYERS
        micro_batch = small[2][key] - small[1][key] - LAYERS * layer
        step = small[1][key] - micro_batch - LAYERS * layer + small_step[key]
        parts = ("layer", layer), ("micro-batch", micro_batch), ("step", step), ("weight sync", small_sync[key])
        for where, amount in parts:
            if amount[0] > 0:
                rows.append(describe_row(layout, where, key, amount, sizes))
    return sorted(rows, key=lambda row: list(MINIMUM).index(identity(row)))


def identity(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    return row["layout"], row["where"], row["phase"], row["kind"], row["group"]


Counted = Mapping[Key, Any]
"""Message → calls and bytes, float64 ``[2]``, of a rank; of sends over all ranks."""


def count_passes(
    layout: str, layers: int, folder: Path
) -> tuple[dict[int, Counted], Counted, Counted, dict[str, float]]:
    """Messages of passes over one and two micro-batches, of the optimizer step and of gathering the weights, and the
    bytes of each unit.
    """
    from megatron.core import parallel_state

    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    hf = TINY | (EXPERTS if layout == "EP2" else {}) | {"num_hidden_layers": layers}
    config = make_config(folder / f"{layout}-{layers}", hf, LAYOUTS[layout])
    policy = MegatronPolicy(config, init="random")
    data, loss = make_data(), make_loss(AlgorithmConfig())
    tokens, passes = sum(map(len, data)), {}
    for count in (1, 2):
        with counted() as found:
            policy.forward_backward([data] * count, loss)
        passes[count] = summed(found)
    with counted() as found:
        policy.optim_step(1e-4)
    source = policy.weight_source()
    with counted() as gathered:
        for _ in source:
            pass
    dense = [p for chunk in policy.model_chunks for n, p in chunk.named_parameters() if ".experts." not in n]
    sizes = {
        ACTIVATIONS: 2 * tokens * hf["hidden_size"],
        KEYS: 2 * tokens * 2 * hf["num_key_value_heads"] * hf["head_dim"],
        ROUTED: 2 * tokens * hf["hidden_size"] * hf.get("num_experts_per_tok", 1),
        PARAMETERS: 2 * sum(p.numel() for p in dense),
        MODEL: sum(meta.nbytes for meta in source.metadata()),
    }
    parallel_state.destroy_model_parallel()
    return passes, summed(found), summed(gathered), sizes


@contextmanager
def counted() -> Iterator[Collectives]:
    """Count inside. A mask that is a subclass of tensors cannot be made while a mode is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    from megatron_fleet.platform.megatron import attention

    def unseen(*sizes: int) -> Any:
        with _disable_current_modes():
            return make_mask(*sizes)

    make_mask = attention.lower_right_mask
    with mock.patch.object(attention, "lower_right_mask", unseen), Collectives() as found:
        yield found


def summed(found: Collectives) -> Counted:
    """Mean over the ranks, of sends the sum."""
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, {key: (n, found.nbytes[key]) for key, n in found.calls.items()})
    total: dict[Key, Any] = defaultdict(lambda: np.zeros(2))
    for each in everywhere:
        for key, amount in each.items():
            total[key] = total[key] + np.array(amount) / (1 if key[1] == "send" else RANKS)
    return total


def describe_row(layout: str, where: str, key: Key, amount: Any, sizes: Mapping[str, float]) -> dict[str, Any]:
    calls, size, unit, note = MINIMUM[layout, where, *key]
    row = {"layout": layout, "where": where, **dict(zip(("phase", "kind", "group"), key, strict=True))}
    row |= {"calls": round(float(amount[0]), 2), "minimum_calls": calls, "bytes": round(float(amount[1]))}
    if unit:
        row |= {"unit": unit, "size": round(float(amount[1]) / sizes[unit], 2), "minimum_size": size}
    return row | ({"note": note} if note else {})


def collectives() -> list[dict[str, Any]]:
    """Rows of all layouts, from real ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (store.port, folder), RANKS)
        return json.loads(Path(folder, "rows.json").read_text())


LAYER_KINDS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "dense": (SIZES["dense"], [], ""),
    "experts": (SIZES["experts"], [], ""),
    "Gated DeltaNet": (HYBRID, ["linear_attention", "full_attention"], "linear_attention"),
    "gated attention": (HYBRID, ["linear_attention", "full_attention"], "full_attention"),
}
"""Kind of layer → model, its kinds of layers (none: all are of one kind), and the one that is counted."""
LEAST_KERNELS = {
    # Norms of input, query, key and of the input of the MLP, four products, two rotations, attention, activation, two
    # additions; backward two kernels to a product and to a norm, three to attention.
    "dense": (14, 24),
    # Of these an MLP's two products and activation make way for: product, scores and choice of the router, sorting,
    # counting, two copies of tokens, two grouped products, activation with scores.
    "experts": (20, 33),
    # In the place of attention: convolution, unit lengths of queries and keys, decay, strength, the rule, gated norm.
    "Gated DeltaNet": (23, 40),
    # The gate of the output is one more.
    "gated attention": (15, 25),
}
"""Kind of layer → kernels forward and backward if each operation on a layer's tensors is one kernel."""


def kernels() -> list[dict[str, Any]]:
    """Rows of each kind of layer: the difference between two models that differ by one of them."""
    with alone():
        return [row_of_kernels(kind) for kind in LAYER_KINDS]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process alone, inside."""
    from megatron_fleet.trainer.megatron import parallel

    parallel.initialise(ParallelConfig(), seed=0)
    try:
        yield
    finally:
        parallel.shutdown()


def row_of_kernels(kind: str) -> dict[str, Any]:
    hf, pattern, more = LAYER_KINDS[kind]
    patterns = [pattern, [more, *pattern]] if pattern else [["layer"], ["layer"] * 2]
    fewer, other = (work_of(hf, each if pattern else [], len(each)) for each in patterns)
    row: dict[str, Any] = {"layer": kind, "copies": fewer.copies, "copied": fewer.copied}
    row |= {"waits": len(fewer.waits), "waits_by_design": len(other.by_design) - len(fewer.by_design)}
    for number, phase in enumerate(("forward", "backward")):
        counted, rest = other.of_phase(phase), fewer.of_phase(phase)
        counted.subtract(rest)
        row[phase] = sum(counted.values())
        row[f"{phase}_rest"] = sum(rest.values()) - row[phase] * (0 if pattern else 1)
        row[f"{phase}_operators"] = {name: n for name, n in counted.most_common() if n}
        row[f"minimum_{phase}"] = LEAST_KERNELS[kind][number]
    return row


def work_of(hf: Mapping[str, Any], pattern: list[str], layers: int) -> DeviceWork:
    """Work of a micro-batch of 4,096 tokens in four sequences."""
    fields = {"num_hidden_layers": layers} | ({"layer_types": pattern} if pattern else {})
    work = DeviceWork()
    with as_device(work):
        chunk = chunk_on_device(dict(hf) | fields, 4096)
        work.kernels.clear()
        run_micro_batches(chunk, [make_data((1024, 512, 1536, 1024))], make_loss(AlgorithmConfig()))
    return work


def waits() -> dict[str, int]:
    """Waits for the device in a step of two micro-batches, and of these inside the micro-batches."""
    with alone():
        found = {}
        for name, run in (("micro_batches", run_micro_batches), ("step", take_step)):
            work = DeviceWork()
            with as_device(work):
                chunk = chunk_on_device(TINY, 256)
                run(chunk, [make_data()] * 2, make_loss(AlgorithmConfig()))
            found[name] = len(work.waits)
        return found | {"minimum_step": 2}


def moved_bytes() -> dict[str, Any]:
    """Bytes of a weight sync, of a step's data, and of an offload."""
    with alone():
        sync = sync_bytes()
    return {"weight_sync": sync, "data": data_bytes(), "offload": offload_bytes()}


def sync_bytes() -> list[dict[str, Any]]:
    """Bytes that engines are given of Qwen3-8B, by transport."""
    from megatron_fleet.platform.communicator import Alone
    from megatron_fleet.weight_sync.broadcast.sender import GlooSender
    from megatron_fleet.weight_sync.disk.sender import DiskSender
    from megatron_fleet.weight_sync.engine_format import EngineFormat
    from megatron_fleet.weight_sync.shm.sender import ShmSender
    from megatron_fleet.weights.exchange import FormattedSource, Place
    from megatron_fleet.weights.source import MegatronWeightSource

    hf = SIZES["dense"] | {"num_hidden_layers": 36}
    with as_device(DeviceWork()):
        chunk = chunk_on_device(hf, 256).module
        source = MegatronWeightSource([chunk], hf, dtype=torch.bfloat16, place=Place())
    rows = []
    for dtype, (form, least) in {"BF16": (EngineFormat(), source_bytes(source)), "FP8": in_fp8(hf)}.items():
        how = Alone(), torch.device("cpu"), form
        given = {
            "shm": ShmSender(source, *how)._layout.end,
            "nccl, gloo": GlooSender(source, *how)._layout.end,
            "cuda_ipc": source_bytes(FormattedSource(source, form)),
            "disk": sum(meta.nbytes for bucket in DiskSender(source, *how)._buckets for meta in bucket),
        }
        rows += [{"transport": name, "dtype": dtype, "bytes": n, "minimum": least} for name, n in given.items()]
    return rows


def source_bytes(source: Any) -> int:
    return sum(meta.nbytes for meta in source.metadata())


def in_fp8(hf: Mapping[str, Any]) -> tuple[Any, int]:
    """The format of engines in FP8, and the bytes of a model in it without the scales of blocks."""
    from megatron_fleet.storage.local import LocalFolder
    from megatron_fleet.weight_sync.engine_format import EngineFormat
    from megatron_fleet.weights.fp8_model import as_fp8, fp8_tensors
    from megatron_fleet.weights.hf_folder import StoredTensor
    from megatron_fleet.weights.hf_model import HfModel, Plain
    from megatron_fleet.weights.mapping import WeightTable

    table = WeightTable(hf)
    stored = {name: StoredTensor("model.safetensors", "BF16", shape, 0) for name, shape in table.tensors.items()}
    plain = {name: Plain(tensor) for name, tensor in stored.items()}
    quantised = fp8_tensors(table)
    model = as_fp8(HfModel(LocalFolder(Path()), dict(hf), table, stored, plain, ()), quantised)
    least = sum(math.prod(shape) * (1 if name in quantised else 2) for name, shape in table.tensors.items())
    return EngineFormat(model), least


def data_bytes() -> dict[str, Any]:
    """Bytes of the messages with the data of a step, to the ranks of one replica."""
    from controller import make_data as long_sequences
    from controller import nbytes

    from megatron_fleet.cluster import frames
    from megatron_fleet.trainer.messages import datum_to_plain

    data = long_sequences(128, routing=False)
    tokens, trained = sum(map(len, data)), sum(int(datum.loss_mask.sum()) for datum in data)
    sent = sum(len(frames.body("micro-batch", datum_to_plain(datum))) for datum in data)
    # Ids of 18 bits and which tokens are trained; of these a log-prob each; of a sequence its advantage and normaliser.
    least = (18 + 1) * tokens // 8 + 4 * trained + 8 * len(data)
    return {"tokens": tokens, "trained": trained, "arrays": nbytes(data), "bytes": sent, "minimum": least}


def offload_bytes() -> dict[str, float]:
    """Bytes of a rank's state for each of its parameters, of which gradients are not copied."""
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    with tempfile.TemporaryDirectory() as folder:
        policy = MegatronPolicy(make_config(Path(folder), TINY, {}), init="random")
        count = sum(p.numel() for p in policy.model_chunks[0].parameters())
        sizes = {part: round(nbytes / count, 2) for part, nbytes in policy.train_state().sizes().items()}
        policy.close()
    # Parameters could be rounded from the optimizer's.
    return sizes | {"copied": sizes["parameters"] + sizes["optimizer"], "minimum": 12.0}


def host() -> dict[str, float]:
    """Processor milliseconds of a micro-batch of 32 tokens, forward and backward: of a layer, and of the rest."""
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in (LAYERS, 4 * LAYERS):
            hf = TINY | {"num_hidden_layers": layers}
            policy = MegatronPolicy(make_config(Path(folder, str(layers)), hf, {}), init="random")
            data, loss = [make_data((16, 16))] * 8, make_loss(AlgorithmConfig())
            times = []
            for _ in range(25):
                began = time.process_time()
                policy.forward_backward(data, loss)
                times.append((time.process_time() - began) / len(data))
            found[layers] = 1e3 * min(times)  # others on the machine can only add to it
            policy.close()
    layer = (found[4 * LAYERS] - found[LAYERS]) / (3 * LAYERS)
    # 6 operations for each of a layer's 193 M parameters and each token, at 400 TFLOP/s.
    hidden = layer * 1e-3 / (6 * 193e6 / 400e12)
    rest = found[LAYERS] - LAYERS * layer
    return {"ms_per_layer": round(layer, 3), "ms_rest": round(rest, 3), "tokens_that_hide_it": round(hidden)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts, separated by commas")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts: dict[str, Callable[[], Any]] = {
        "collectives": collectives,
        "kernels": kernels,
        "waits": waits,
        "bytes": moved_bytes,
        "host": host,
    }
    chosen = args.only.split(",") if args.only else list(parts)
    report = {"benchmark": "counts"} | {name: parts[name]() for name in chosen} | stamp(__file__)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
