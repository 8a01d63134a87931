"""``mfleet convert`` both ways against ``cp``: speed, memory, and a plan at the scale of Kimi K2.5. Prints JSON.

``ratio_to_megatron`` and ``ratio_to_hf`` are the speed of a conversion ÷ that of ``cp`` and fsync of the same folder in
the same run; whole processes, cold page cache, everything on the disk at the end. Conversions and copies alternate, and
medians are compared. ``peak_rss_gb`` is the largest resident set of any conversion.

    python benchmarks/convert.py [--dir /tmp] [--dense-gb 8] [--moe-gb 4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measured import stamp

from megatron_fleet.weights.hf_folder import safetensors_header
from megatron_fleet.weights.mapping import WeightTable

MFLEET = (sys.executable, "-m", "megatron_fleet.cli", "convert")
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
"""Qwen3-8B; its 36 layers come to 16.4 GB."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
"""Qwen3-30B-A3B of a quarter of its width: each layer has 393 tensors, most of them of 0.8 MB."""
KIMI = {
    "model_type": "kimi_k25",
    "vision_config": {},
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}
KIMI_FILES, KIMI_VISION = 64, 335
FILE_BYTES = 4_000_000_000


@dataclass
class Measured:
    """Seconds of repeats, and the largest resident set in bytes."""

    seconds: list[float] = field(default_factory=list)
    rss: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def write_checkpoint(folder: Path, config: dict[str, Any], nbytes: float) -> tuple[int, int]:
    """Random BF16 weights with as many layers as fit; returns bytes and tensors."""
    layers = 1
    while _bytes_of(config | {"num_hidden_layers": layers + 1}) <= nbytes:
        layers += 1
    config = config | {"num_hidden_layers": layers}
    tensors = WeightTable(config).tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).integers(0, 1 << 16, 64 << 20, np.uint16).view(np.uint8).data
    files = list(_split(tensors, FILE_BYTES))
    weight_map = {}
    for k, names in enumerate(files, 1):
        name = f"model-{k:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(names, name)
        with (folder / name).open("wb") as f:
            f.write(_header({n: ("BF16", tensors[n]) for n in names}))
            left = sum(2 * int(np.prod(tensors[n])) for n in names)
            while left:
                left -= f.write(noise[: min(left, len(noise))])
            os.fsync(f.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return _bytes_of(config), len(tensors)


def _bytes_of(config: dict[str, Any]) -> int:
    return sum(2 * int(np.prod(shape)) for shape in WeightTable(config).tensors.values())


def _split(tensors: dict[str, tuple[int, ...]], nbytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in tensors.items():
        if names and size + 2 * int(np.prod(shape)) > nbytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * int(np.prod(shape))
    yield names


def _header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    width = {"BF16": 2, "F32": 4, "I32": 4}
    entries: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + width[dtype] * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return safetensors_header(entries)


def forget(folder: Path) -> None:
    """Drop a folder from the page cache."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run(command: tuple[str, ...], source: Path, out: Path, into: Measured, keep: bool = False) -> None:
    """One process from a cold source to a new folder on the disk, timed."""
    shutil.rmtree(out, ignore_errors=True)
    forget(source)
    start = time.perf_counter()
    process = subprocess.Popen([*command, str(source), str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command}: {errors.decode()}")
    if command[0] == "cp":
        for path in (p for p in out.rglob("*") if p.is_file()):
            with path.open("rb") as f:
                os.fsync(f.fileno())
    into.seconds.append(time.perf_counter() - start)
    into.rss = max(into.rss, usage.ru_maxrss * 1024)
    if not keep:
        shutil.rmtree(out)


def both_ways(folder: Path, config: dict[str, Any], nbytes: float, repeats: int, workers: int) -> dict[str, Any]:
    """A checkpoint to Megatron and back, each next to a copy of its source."""
    hf, megatron, out = folder / "hf", folder / "megatron", folder / "out"
    size, tensors = write_checkpoint(hf, config, nbytes)
    options = ("--workers", str(workers))
    run((*MFLEET, "to-megatron", *options), hf, megatron, Measured(), keep=True)
    found = {name: Measured() for name in ("cp_hf", "to_megatron", "cp_megatron", "to_hf")}
    for _ in range(repeats):
        run(("cp", "-r"), hf, out, found["cp_hf"])
        run((*MFLEET, "to-megatron", *options), hf, out, found["to_megatron"])
        run(("cp", "-r"), megatron, out, found["cp_megatron"])
        run((*MFLEET, "to-hf", *options), megatron, out, found["to_hf"])
    shutil.rmtree(hf)
    shutil.rmtree(megatron)
    return {
        "gb": round(size / 1e9, 2),
        "tensors": tensors,
        "ratio_to_megatron": round(found["cp_hf"].median / found["to_megatron"].median, 3),
        "ratio_to_hf": round(found["cp_megatron"].median / found["to_hf"].median, 3),
        "gb_per_s": {name: round(size / m.median / 1e9, 3) for name, m in found.items()},
        "seconds": {name: [round(s, 2) for s in m.seconds] for name, m in found.items()},
        "peak_rss_gb": round(max(found["to_megatron"].rss, found["to_hf"].rss) / 1e9, 3),
    }


def kimi(folder: Path, shards: int, workers: int) -> dict[str, Any]:
    """Kimi K2.5's 208,550 tensors as sparse files: planned in full, and one part of the conversion carried out."""
    hf, out = folder / "kimi", folder / "kimi-megatron"
    hf.mkdir()
    tensors = kimi_tensors()
    names = list(tensors)
    step = -(-len(names) // KIMI_FILES)
    weight_map = {}
    for k in range(KIMI_FILES):
        name = f"model-{k + 1:05d}-of-{KIMI_FILES:06d}.safetensors"
        chosen = {n: tensors[n] for n in names[k * step : (k + 1) * step]}
        weight_map |= dict.fromkeys(chosen, name)
        header = _header(chosen)
        with (hf / name).open("wb") as f:
            f.write(header)
            last = json.loads(header[8:])[list(chosen)[-1]]["data_offsets"][1]
            f.truncate(len(header) + last)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (hf / "config.json").write_text(json.dumps(KIMI))
    plan, shard = Measured(), Measured()
    run((*MFLEET, "to-megatron", "--plan"), hf, out, plan, keep=True)
    run((*MFLEET, "to-megatron", "--shard", f"1/{shards}", "--workers", str(workers)), hf, out, shard, keep=True)
    partial = folder / f".{out.name}.partial"
    written = sum(p.stat().st_size for p in partial.rglob("*.distcp"))
    shutil.rmtree(partial)
    shutil.rmtree(hf)
    return {
        "tensors": len(tensors),
        "plan_seconds": round(plan.median, 2),
        "plan_peak_rss_gb": round(plan.rss / 1e9, 3),
        "shard": f"1/{shards}",
        "shard_gb": round(written / 1e9, 2),
        "shard_seconds": round(shard.median, 2),
        "shard_peak_rss_gb": round(shard.rss / 1e9, 3),
    }


def kimi_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every stored tensor: routed experts in INT4, the router's bias in float32, a vision tower's worth of others."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in WeightTable(KIMI).tensors.items():
        if ".mlp.experts." in name:
            base, (rows, columns) = name.removesuffix(".weight"), shape
            tensors[f"{base}.weight_packed"] = ("I32", (rows, columns // 8))
            tensors[f"{base}.weight_scale"] = ("BF16", (rows, columns // 32))
            tensors[f"{base}.weight_shape"] = ("I32", (2,))
        else:
            tensors[name] = ("F32" if name.endswith("bias") else "BF16", shape)
    return tensors | {f"vision_tower.{k}": ("BF16", (1152, 1152)) for k in range(KIMI_VISION)}


def kernels() -> dict[str, Any]:
    """Output of benchmarks/quant_kernels.py."""
    script = Path(__file__).with_name("quant_kernels.py")
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["kernels"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument(
        "--dense-gb", type=float, default=8.0, help="size of the dense checkpoint; needs 4 times the disk"
    )
    parser.add_argument("--moe-gb", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--kimi-shards", type=int, default=1000, help="one of so many parts is carried out")
    parser.add_argument("--only", choices=("dense", "moe", "kimi", "kernels"))
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "convert"}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="convert-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "dense": lambda: both_ways(folder, DENSE, args.dense_gb * 1e9, args.repeats, args.workers),
            "moe": lambda: both_ways(folder, EXPERTS, args.moe_gb * 1e9, args.repeats, args.workers),
            "kimi": lambda: kimi(folder, args.kimi_shards, args.workers),
            "kernels": kernels,
        }
        for part, measure in parts.items():
            if args.only in (None, part):
                report[part] = measure()
    sizes = [report[part] for part in ("dense", "moe") if part in report]
    if len(sizes) == 2:
        report["ratio_to_megatron"] = min(part["ratio_to_megatron"] for part in sizes)
        report["ratio_to_hf"] = min(part["ratio_to_hf"] for part in sizes)
        report["peak_rss_gb"] = max(part["peak_rss_gb"] for part in sizes)
    print(json.dumps(report | stamp(__file__)))


if __name__ == "__main__":
    main()
