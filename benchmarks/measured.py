"""Sources that each benchmark measures. A result carries their digest, so that a page can mark it once they differ."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_fleet"
MEASURES: Mapping[str, tuple[str, ...]] = {
    "checkpoint": (
        "checkpoint/checkpoints.py", "checkpoint/manifest.py", "checkpoint/store.py", "storage/transfer.py",
        "storage/local.py", "storage/remote.py", "storage/s3.py", "trainer/megatron/saving.py",
        "trainer/megatron/state.py", "trainer/megatron/shard_reader.py", "weights/torch_dist",
    ),
    "controller": (
        "cluster/frames.py", "trainer/group.py", "trainer/links.py", "trainer/messages.py", "trainer/packing",
    ),
    "convert": ("convert", "storage/direct.py", "storage/local.py", "weights/quant", "weights/torch_dist"),
    "counts": ("trainer/megatron/step.py", "trainer/megatron/policy.py"),
    "env_concurrency": (
        "agents/episode.py", "embedded_fleet/environment.py", "embedded_fleet/server.py", "envs/openenv.py",
        "envs/openenv_client.py",
    ),
    "logprob_memory": ("trainer/megatron/logprob.py", "trainer/megatron/logprob_torch.py"),
    "long_engines": ("planning/rollout.py", "planning/workload.py"),
    "mixture": ("data/mixture.py",),
    "modes": ("loop/batches.py", "loop/train.py", "rollout", "algorithms"),
    "offload": ("trainer/megatron/offload.py",),
    "packing": ("trainer/packing",),
    "peers": (
        "agents", "algorithms", "embedded_fleet", "envs", "loop/batches.py", "loop/train.py", "rollout",
        "trainer/megatron/step.py", "trainer/packing",
    ),
    "quant_kernels": ("weights/quant",),
    "quickstart": ("algorithms", "agents", "embedded_fleet", "trainer/megatron/step.py", "loop/train.py"),
    "report": ("analysis",),
    "rollout": (
        "agents/episode.py", "embedded_fleet/environment.py", "envs/openenv.py", "envs/openenv_client.py",
        "rollout/collector.py", "rollout/engine_actor.py", "rollout/engine_client.py", "rollout/engine_server.py",
        "rollout/sampler.py", "rollout/service.py", "rollout/worker.py",
    ),
    "storage": ("storage/direct.py", "storage/local.py", "storage/remote.py", "storage/s3.py"),
    "train_step": (
        "trainer/megatron/build.py", "trainer/megatron/logprob.py", "trainer/megatron/logprob_torch.py",
        "trainer/megatron/policy.py", "trainer/megatron/step.py", "trainer/packing/pack.py",
    ),
    "transfers": ("storage/transfer.py", "storage/local.py", "storage/remote.py", "storage/s3.py"),
    "two_runs": ("cluster/launcher.py",),
    "verdicts": (
        "embedded_fleet/sandbox.py", "embedded_fleet/verifier_client.py", "embedded_fleet/verifier_host.py",
        "embedded_fleet/verify.py",
    ),
    "weight_sync": ("weight_sync/shm", "weight_sync/reloading.py", "weights/exchange.py", "weights/export.py"),
}  # fmt: skip
"""Benchmark → files and folders of the package whose time, memory or result it measures. A folder stands for its Python
files."""


def files(benchmark: str, package: Path = ROOT / PACKAGE) -> list[Path]:
    """Return the measured files, sorted by path."""
    return sorted(file for name in MEASURES[benchmark] for file in _files(package / name))


def digest(benchmark: str, package: Path = ROOT / PACKAGE) -> str:
    """Return a digest of the measured files, which changes with any of them. Needs no git."""
    lines = [f"{file.relative_to(package)} {_blob(file)}\n" for file in files(benchmark, package)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def stamp(script: str) -> dict[str, Any]:
    """Return what every result carries: the machine, the commit, and the `digest` of what ``script`` measures.

    ``commit`` is ``None`` outside a git checkout.
    """
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    commit = asked.stdout.strip() if asked.returncode == 0 else None
    return {"machine": describe(), "commit": commit, "sources": digest(Path(script).stem)}


def _files(path: Path) -> Iterator[Path]:
    return path.rglob("*.py") if path.is_dir() else iter([path])


def _blob(file: Path) -> str:
    """Hash of a file's content as git computes it, so that a digest can be computed from a commit too."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
