"""The memory that a conversion takes does not depend on the model's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
from tiny_configs import FP8, raw_config
from waiting import HANG_S

from megatron_fleet.weights.hf_folder import safetensors_header
from megatron_fleet.weights.mapping import WeightTable

BOUND_MB = 200
"""Memory of two workers: their buffers, and what modules and compiled kernels take."""
MEASURE = """
import mmap, sys, threading, tracemalloc
from megatron_fleet import cli
lock, mapped = threading.RLock(), {"now": 0, "most": 0}
class Counted(mmap.mmap):
    def __new__(cls, fileno, length, *arguments, **more):
        made = super().__new__(cls, fileno, length, *arguments, **more)
        made.length = length
        with lock:
            mapped["now"] += length
            mapped["most"] = max(mapped.values())
        return made
    def __del__(self):
        with lock:
            mapped["now"] -= self.length
mmap.mmap = Counted
tracemalloc.start()
code = cli.main(sys.argv[1:])
print(code, (tracemalloc.get_traced_memory()[1] + mapped["most"]) >> 20)
"""
"""Counts what Python, numpy and buffers asked for, whatever the allocator makes of it."""


def write_model(folder: Path, family: str, layers: int) -> int:
    """A model whose quantised weights are the larger part; returns its bytes."""
    folder.mkdir()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 2000}
    config = raw_config(family, "v4") | sizes | ({"quantization_config": FP8} if family == "deepseek_v3" else {})
    if family == "deepseek_v3":
        config |= {"first_k_dense_replace": layers - 1, "q_lora_rank": 256, "kv_lora_rank": 128}
    (folder / "config.json").write_text(json.dumps(config))
    entries, at = {}, 0
    for name, shape in WeightTable(config).tensors.items():
        quantised = family == "deepseek_v3" and "proj" in name
        blocks = [-(-n // 128) for n in shape]
        stored = [(name, "F8_E4M3" if quantised else "BF16", list(shape), 1 if quantised else 2)]
        stored += [(f"{name}_scale_inv", "F32", blocks, 4)] if quantised else []
        for part, dtype, dims, width in stored:
            size = width * int(np.prod(dims))
            entries[part] = {"dtype": dtype, "shape": dims, "data_offsets": [at, at + size]}
            at += size
    # Bytes that are finite numbers in every type.
    data = np.random.default_rng(0).integers(0x30, 0x3F, at, np.uint8).tobytes()
    (folder / "model.safetensors").write_bytes(safetensors_header(entries) + data)
    return at


def peak_mb(*arguments: object) -> int:
    command = [sys.executable, "-c", MEASURE, "convert", *map(str, arguments), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANG_S, check=True)
    code, peak = done.stdout.split()[-2:]
    assert code == "0", done.stderr
    return int(peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "many"), [("qwen3", 8), pytest.param("deepseek_v3", 14, marks=pytest.mark.nightly(minutes=1))]
)
@pytest.mark.in_turn(number=0, of=2)
def test_a_larger_model_takes_no_more(family, many, tmp_path):
    peaks = {}
    for layers in (2, many):
        nbytes = write_model(tmp_path / f"hf{layers}", family, layers)
        assert (nbytes > 150e6) == (layers == many)
        there = peak_mb("to-megatron", tmp_path / f"hf{layers}", tmp_path / f"mg{layers}")
        back = peak_mb("to-hf", tmp_path / f"mg{layers}", tmp_path / f"back{layers}")
        equal = peak_mb("verify", tmp_path / f"hf{layers}", tmp_path / f"mg{layers}")
        peaks[layers] = np.array([there, back, equal])
    assert (peaks[many] < BOUND_MB).all(), peaks
    assert (peaks[many] - peaks[2] < 60).all(), peaks
