"""The kernels of quantised weights on one core, next to copying the same BF16 bytes. Prints one line of JSON.

``gb_per_s`` is BF16 bytes written or read per second, ``ratio_to_memcpy`` that ÷ the rate of a copy. Repeats of all
kernels and of the copy alternate, so that a busy machine disturbs them alike; processor time is measured, and the
fastest repeat of each counts.

    python benchmarks/quant_kernels.py [--rows 2048] [--cols 7168] [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from measured import stamp

from megatron_fleet.weights.quant import fp8, int4


def bf16_noise(rows: int, cols: int) -> np.ndarray:
    """BF16 bits of normal numbers, as weights are after a step of training: on no quantised grid."""
    values = np.random.default_rng(0).standard_normal((rows, cols), np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def int4_kernels(changed: np.ndarray) -> dict[str, Callable[[], object]]:
    rows, cols = changed.shape
    # A source whose rule is not the declared one: its scales are a tenth smaller than absmax / 7.
    scales = int4.group_scales(changed) - np.uint16(12)
    packed = np.empty((rows, cols // 8), np.int32)
    int4.quantize(changed, scales, packed)
    unmodified, again = np.empty_like(changed), np.empty_like(packed)
    int4.dequantize(packed, scales, unmodified)
    return {
        "int4.dequantize": partial(int4.dequantize, packed, scales, unmodified),
        "int4.quantize": partial(int4.quantize, unmodified, scales, again),
        "int4.group_scales": partial(int4.group_scales, changed),
        "int4.choose_scales, unmodified, hint": partial(int4.choose_scales, unmodified, scales),
        "int4.choose_scales, unmodified": partial(int4.choose_scales, unmodified),
        "int4.choose_scales, trained, hint": partial(int4.choose_scales, changed, scales),
        "int4.recovery": partial(int4.recovery, packed, scales),
    }


def fp8_kernels(changed: np.ndarray) -> dict[str, Callable[[], object]]:
    scales = fp8.block_scales(changed)
    codes = np.empty(changed.shape, np.uint8)
    fp8.quantize(changed, scales, codes)
    unmodified, again = np.empty_like(changed), np.empty_like(codes)
    products = np.empty(changed.shape, np.float32)
    fp8.dequantize(codes, scales, unmodified)
    return {
        "fp8.dequantize": partial(fp8.dequantize, codes, scales, unmodified),
        "fp8.dequantize, float32": partial(fp8.dequantize, codes, scales, products),
        "fp8.quantize": partial(fp8.quantize, unmodified, scales, again),
        "fp8.block_scales": partial(fp8.block_scales, changed),
        "fp8.choose_scales, unmodified": partial(fp8.choose_scales, unmodified, scales),
        "fp8.choose_scales, trained": partial(fp8.choose_scales, changed, scales),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=7168, help="a multiple of 32")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    changed = bf16_noise(args.rows, args.cols)
    kernels = {
        "memcpy": partial(np.copyto, np.empty_like(changed), changed),
        **int4_kernels(changed),
        **fp8_kernels(changed),
    }
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(args.repeats + 1):
        for name, kernel in kernels.items():
            start = time.thread_time()
            kernel()
            seconds[name] = min(seconds[name], time.thread_time() - start)
    memcpy = seconds.pop("memcpy")
    report = {
        "benchmark": "quant_kernels",
        "kernels": {
            name: {"gb_per_s": round(changed.nbytes / value / 1e9, 2), "ratio_to_memcpy": round(memcpy / value, 3)}
            for name, value in seconds.items()
        },
        "memcpy_gb_per_s": round(changed.nbytes / memcpy / 1e9, 2),
        "shape": [args.rows, args.cols],
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
