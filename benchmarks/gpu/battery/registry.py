"""The parts of the battery in the order in which they run, most informative first: needs, limits, goals, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from battery.hardware import Device, Machine
from battery.results import Result

MATRIX_TFLOPS = 790
"""BF16 matrix products of 8192 × 8192 × 8192 on one H200, measured through PyTorch."""
COPY_TB_S = 4.3
"""A copy within one H200's memory, bytes read and written, measured through PyTorch."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure, for one H200.

    Attributes:
        figure: name in `Result.figures`.
        says: what is asked, in words.
    """

    figure: str
    kind: Literal["least", "most"]
    bound: float
    says: str

    def met(self, result: Result) -> bool | None:
        """Whether it is met; ``None`` when the figure was not measured."""
        value = result.figures.get(self.figure)
        if value is None or not math.isfinite(value):
            return None
        return value >= self.bound if self.kind == "least" else value <= self.bound


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a result.

    Attributes:
        columns: key → heading.
    """

    title: str
    columns: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement.

    Attributes:
        module: the one that measures it.
        minutes: limit of its process.
        packages: without which it cannot run.
        gpus, gpu_gib, host_gib, disk_gib: least of the machine, for size ``full``.
        episode: whether it needs the environment of the episode workers.
        figures: name → meaning with unit.
    """

    name: str
    module: str
    about: str
    minutes: float
    packages: tuple[str, ...]
    figures: Mapping[str, str]
    tables: Mapping[str, Table]
    goals: tuple[Goal, ...] = ()
    gpus: int = 1
    gpu_gib: float = 0.0
    host_gib: float = 0.0
    disk_gib: float = 0.0
    episode: bool = False

    def problem(self, machine: Machine, device: Device, size: str, disk_gib: float) -> str | None:
        """Reason why this part cannot run here; ``None`` if it can.

        Args:
            disk_gib: free in the folder of temporary files.
        """
        if device == "cuda" and machine.gpus < self.gpus:
            wanted = "a GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
            return f"needs {wanted}, and torch finds {machine.gpus or 'none'} here"
        missing = [name for name in self.packages if name not in machine.packages]
        if missing:
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        if self.episode and machine.episode_problem:
            return machine.episode_problem
        if size == "tiny":
            return None
        for what, needed, there in (
            ("GPU memory", self.gpu_gib, machine.gpu_gib),
            ("host memory", self.host_gib, machine.host_gib),
            ("free disk", self.disk_gib, disk_gib),
        ):
            if there < needed:
                return f"needs {needed:g} GiB of {what}, and there are {there:.0f}"
        return None


_TRAINER = ("torch", "megatron-core", "pydantic", "numba", "safetensors", "msgpack")
_SERVING = (*_TRAINER, "vllm", "megatron_fleet")  # vLLM finds our transports by the entry point of our package

_SYNC = {
    "bytes": "bytes of one sync",
    "sync_gb_s": "whole sync, GB/s, median",
    "send_gb_s": "the trainer's part of it, GB/s, median",
    "bit_equal": "1 where the engine's parameters equal those that it had read from disk",
    "agreement": "mean |engine's − trainer's log-prob|, nats",
    "agreement_max": "largest |engine's − trainer's log-prob|, nats",
    "engine_start_s": "start of the engine, s",
    "cycle_s": "sleep, wake, sync, wake: s, median",
}

PARTS: tuple[Part, ...] = (
    Part(
        "device",
        "battery.parts.device",
        "the device's own speed: matrix products and a copy",
        1,
        ("torch",),
        {
            "matrix_tflops": "BF16 matrix product of 8192³, TFLOP/s",
            "matrix_fp8_tflops": "FP8 matrix product of 8192³, TFLOP/s",
            "copy_tb_s": "copy within the device's memory, TB/s read and written",
        },
        {},
    ),
    Part(
        "tests",
        "battery.parts.gpu_tests",
        "all tests marked gpu",
        5,
        (*_TRAINER, "pytest", "hypothesis"),
        {"passed": "tests passed", "failed": "tests failed", "skipped": "tests skipped"},
        {"tests": Table("Tests that did not pass", {"test": "test", "outcome": "outcome", "message": "message"})},
        (Goal("failed", "most", 0, "no test fails"),),
    ),
    Part(
        "layers",
        "battery.parts.layer_stack",
        "Qwen3-8B's layers forward and backward, 4K to 64K packed tokens: BF16, each FP8 recipe, without "
        "Transformer Engine",
        8,
        _TRAINER,
        {
            "matrix_tflops": "BF16 matrix product of 8192³ in the same process, TFLOP/s",
            "bf16_share": "BF16 layers at the goal's tokens ÷ the matrix product's speed",
            "fp8_speedup": "fastest FP8 recipe ÷ BF16 at the goal's tokens",
            "fp8_recipe": "that recipe",
            "torch_slowdown": "time without Transformer Engine ÷ with it",
        },
        {
            "speed": Table(
                "Layers forward and backward",
                {
                    "variant": "variant",
                    "tokens": "packed tokens",
                    "longest": "longest sequence",
                    "ms": "ms",
                    "tokens_per_s": "tokens/s",
                    "tflops": "TFLOP/s",
                    "share": "share of the BF16 matrix product",
                    "extra_gib": "extra GiB",
                },
            )
        },
        (
            Goal("bf16_share", "least", 0.5, "BF16 layers reach half of the matrix product's speed"),
            Goal("fp8_speedup", "least", 1.3, "FP8 layers are 1.3 times as fast as BF16"),
        ),
        gpu_gib=70,
    ),
    Part(
        "logprobs",
        "battery.parts.logprob_kernels",
        "log-probs of 65,536 tokens over 151,936: time, memory, chunk sizes, error against float32",
        4,
        _TRAINER,
        {
            "matrix_tflops": "BF16 matrix product of 8192³ in the same process, TFLOP/s",
            "best_chunk": "fastest chunk in BF16, positions",
            "head_share": "speed of forward and backward at it ÷ the matrix product's (four products)",
            "logprob_error": "mean |log-prob − float32|, nats",
            "logprob_error_max": "largest |log-prob − float32|, nats",
            "gradient_error": "relative error of the gradient of the hidden states",
            "sums_gb_s": "kernel of the sums, GB/s",
            "gradient_gb_s": "kernel of the gradient, GB/s",
            "plain_ratio_time": "time of plain PyTorch ÷ ours, at as many positions as fit",
        },
        {
            "chunks": Table(
                "Forward and backward of the head",
                {
                    "dtype": "dtype",
                    "chunk": "chunk",
                    "tokens": "tokens",
                    "ms": "ms",
                    "tflops": "TFLOP/s",
                    "extra_mb": "extra MB",
                },
            )
        },
        gpu_gib=20,
    ),
    Part(
        "sync",
        "battery.parts.weight_transfer",
        "weights to an engine on the same GPU, in BF16 and in FP8: GB/s, bit equality, log-prob agreement, sleep and "
        "wake around it",
        9,
        _SERVING,
        {
            "transport": "transport",
            **_SYNC,
            **{f"fp8_{name}": f"engine in FP8: {says}" for name, says in _SYNC.items()},
        },
        {
            "syncs": Table(
                "Syncs",
                {"engine": "engine", "version": "version", "sync_ms": "ms", "gb_s": "GB/s", "send_ms": "send ms"},
            ),
            "cycles": Table(
                "Cycles",
                {
                    "engine": "engine",
                    "cycle": "cycle",
                    "seconds": "s",
                    "asleep_gib": "GiB, engine asleep and parameters onloaded",
                    "awake_gib": "GiB, engine awake and trainer offloaded",
                },
            ),
        },
        (
            Goal("sync_gb_s", "least", 50, "a sync moves 50 GB/s"),
            Goal("bit_equal", "least", 1, "an engine holds the trainer's weights bit for bit"),
            Goal("agreement", "most", 0.02, "log-probs of engine and trainer agree to 0.02 nats in BF16"),
        ),
        gpu_gib=70,
        host_gib=60,
        disk_gib=15,
    ),
    Part(
        "engine",
        "battery.parts.engine_speed",
        "vLLM: start, throughput with and without graphs, sleep level 2 and back: bytes freed, 50 cycles",
        9,
        _SERVING,
        {
            "start_s": "start with graphs, s",
            "start_eager_s": "start without graphs, s",
            "graph_speedup": "sampled tokens/s with graphs ÷ without, at the smallest batch",
            "freed_gib": "memory freed by sleep, GiB",
            "left_gib": "memory left while asleep, GiB",
            "sleep_s": "sleep, s, median",
            "wake_s": "wake, s, median",
            "growth_gib": "memory while asleep, last cycle − second, GiB",
            "cycles": "cycles",
        },
        {
            "throughput": Table(
                "Sampling, medians",
                {
                    "graphs": "graphs",
                    "sequences": "sequences at once",
                    "prompt": "prompt tokens",
                    "sampled": "sampled tokens",
                    "prefill_tokens_per_s": "prompt tokens/s",
                    "tokens_per_s": "sampled tokens/s",
                    "ms_per_token": "ms per decoding step",
                },
            ),
            "sleep": Table(
                "Sleep and wake",
                {"cycle": "cycle", "asleep_gib": "asleep GiB", "sleep_s": "sleep s", "wake_s": "wake s"},
            ),
        },
        (
            Goal("left_gib", "most", 2, "a sleeping engine leaves at most 2 GiB"),
            Goal("growth_gib", "most", 0.1, "50 cycles without growth"),
        ),
        gpu_gib=40,
    ),
    Part(
        "offload",
        "battery.parts.offloading",
        "the trainer's state to host memory and back: GB/s, and what the device gets back",
        4,
        _TRAINER,
        {
            "bytes": "bytes moved each way",
            "offload_gb_s": "offload, GB/s, median",
            "onload_gb_s": "onload, GB/s, median",
            "plain_out_gb_s": "plain copy to pinned memory, GB/s",
            "plain_back_gb_s": "plain copy from pinned memory, GB/s",
            "freed_share": "memory that the device got back ÷ bytes of the state",
            "left_gib": "memory that this process keeps on the device beyond its context, GiB",
            "growth_gib": "memory while offloaded, last cycle − second, GiB",
            "bit_equal": "1 where parameters and optimizer came back bit for bit",
        },
        {
            "cycles": Table(
                "Cycles",
                {"cycle": "cycle", "offload_ms": "offload ms", "onload_ms": "onload ms", "left_gib": "left GiB"},
            )
        },
        (Goal("bit_equal", "least", 1, "everything comes back bit for bit"),),
        gpu_gib=40,
        host_gib=40,
    ),
    Part(
        "optimizer",
        "battery.parts.optimizer_steps",
        "one optimizer step: float32 and BF16 moments, in host memory",
        4,
        _TRAINER,
        {"step_share": "bytes/s of a step with float32 moments ÷ a copy's", "parameters": "parameters"},
        {
            "steps": Table(
                "Optimizer steps",
                {
                    "variant": "variant",
                    "ms": "ms",
                    "gb": "GB read and written",
                    "gb_s": "GB/s",
                    "ms_8b": "ms for 8.2 billion parameters (scaled)",
                    "extra_gib": "extra GiB",
                },
            )
        },
        gpu_gib=40,
    ),
    Part(
        "checkpoint",
        "battery.parts.checkpointing",
        "a checkpoint saved, loaded, and copied for writing during training: time, and peak memory of host and device",
        5,
        _TRAINER,
        {
            "bytes": "bytes of the checkpoint",
            "share_bytes": "bytes of this rank's state",
            "save_s": "save, s",
            "load_s": "load, s",
            "save_gb_s": "save, GB/s",
            "load_gb_s": "load, GB/s",
            "host_over_share_gib": "peak of host memory while saving, beyond this rank's state, GiB",
            "device_extra_gib": "peak of device memory while saving, beyond what was there, GiB",
            "bit_equal": "1 where log-probs after loading equal those before saving",
            "copy_s": "second copy to host memory, for which training waits, s",
            "copy_gb_s": "the same, GB/s",
            "copy_host_gib": "host memory that the first copy takes, GiB",
            "written_s": "writing the second copy, while nothing else runs, s",
        },
        {
            "memory": Table(
                "Peak memory",
                {"verb": "verb", "seconds": "s", "host_gib": "host GiB more", "device_gib": "device GiB more"},
            )
        },
        (
            Goal("host_over_share_gib", "most", 2, "host memory of a save: at most the rank's state and 2 GiB"),
            Goal("device_extra_gib", "most", 2, "device memory of a save: at most 2 GiB"),
            Goal("bit_equal", "least", 1, "a loaded checkpoint is the saved one"),
        ),
        gpu_gib=40,
        host_gib=50,
        disk_gib=25,
    ),
    Part(
        "loop",
        "battery.parts.whole_loop",
        "a whole run on one GPU, five steps of the embedded fleet: experiment=gpu_smoke",
        10,
        (*_SERVING, "ray", "hydra-core"),
        {
            "experiment": "experiment",
            "steps": "steps",
            "whole_s": "whole run, s",
            "step_s": "a step after the first, s, median",
            "tokens_per_s": "sampled tokens/s, median",
            "mismatch": "last |log-prob of the engine − of the trainer|, nats (policy/mismatch_kl)",
        },
        {
            "steps": Table(
                "Steps",
                {
                    "step": "step",
                    "step_s": "step s",
                    "generate_s": "generate s",
                    "train_s": "train s",
                    "sync_s": "sync s",
                    "reward": "reward",
                    "tokens_per_s": "tokens/s",
                },
            )
        },
        gpu_gib=20,
        host_gib=30,
        disk_gib=25,
        episode=True,
    ),
    Part(
        "ranks",
        "battery.parts.many_ranks",
        "the layers over all GPUs of the machine: tensor-parallel and data-parallel",
        6,
        _TRAINER,
        {"tensor_efficiency": "tokens/s per GPU with tensor parallelism ÷ of one GPU"},
        {
            "speed": Table(
                "Layers over several ranks",
                {
                    "tensor": "tensor",
                    "data": "data",
                    "tokens": "packed tokens of a replica",
                    "ms": "ms",
                    "tokens_per_s": "tokens/s of all",
                    "tflops": "TFLOP/s of one GPU",
                    "extra_gib": "extra GiB",
                },
            )
        },
        gpus=2,
        gpu_gib=70,
    ),
    Part(
        "traces",
        "battery.parts.traces",
        "profiler traces of the layers, in BF16 and in FP8, and of the head",
        4,
        _TRAINER,
        {
            "layers_busy": "share of a step of the layers in which the device computes",
            "head_busy": "share of forward and backward of the head in which it computes",
            "layers_launches": "kernel launches of a step, per layer",
            "layers_fp8_busy": "the same share in FP8",
            "layers_fp8_launches": "kernel launches in FP8, per layer",
        },
        {"kernels": Table("Kernels that take longest", {"of": "of", "kernel": "kernel", "ms": "ms", "calls": "calls"})},
        gpu_gib=70,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
