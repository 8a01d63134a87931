"""Measure the cost of the controller itself. Prints one line of JSON.

``steps``: with emulated ranks (no model, another process), processor milliseconds of the controller per training step
(plan, encode, send, gather), and bytes sent to each replica over the bytes of its arrays (1.0: one copy of all; most
fields are sent for trained tokens only), for 1, 8 and 64 ranks (tensor parallel 8 above 1). ``large``: the same once
for 4,096 sequences with the experts of each token, for 256 ranks, with the peak memory that sending took over the
data's own size. ``run``: a real quickstart, its controller's processor time per step and per episode.

    python benchmarks/controller.py [--steps 10] [--sequences 128] [--large 4096] [--run-steps 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measured import stamp

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.cluster.launcher import ExternalRanks
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.links import RankListener

HERE = Path(__file__).parent
TENSOR = 8
MEDIAN, SIGMA, LONGEST = 10_000, 0.9, 57_000
"""Tokens of sequences: log-normal, as Fleet's."""
ROUTING = (58, 8)
"""Layers with experts, and experts per token, of a model of a trillion parameters."""


def make_data(count: int, routing: bool, seed: int = 0, scale: float = 1.0) -> list[Datum]:
    """Sequences; one token in eight is trained. ``scale``: of their lengths."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        tokens = int(scale * min(LONGEST, max(64, rng.lognormal(np.log(MEDIAN), SIGMA))))
        mask = rng.random(tokens) < 0.125
        mask[0] = False
        values = mask.astype(np.float32)
        extras = {"routing": np.zeros((tokens, *ROUTING), np.int16)} if routing else {}
        data.append(Datum(np.zeros(tokens, np.int32), mask, values, values, extras=extras))
    return data


def nbytes(data: list[Datum]) -> int:
    """Bytes of all arrays."""
    core = [array for d in data for array in (d.token_ids, d.loss_mask, d.scaled_advantages, d.behaviour_logprobs)]
    return sum(array.nbytes for array in [*core, *(extra for d in data for extra in d.extras.values())])


async def measure(config: Config, data: list[Datum], world: int, steps: int) -> dict[str, Any]:
    """Controller milliseconds per step, bytes sent, growth of memory."""
    tensor = TENSOR if world > 1 else 1
    token = secrets.token_hex(16)
    listener = RankListener(token, "{}", world)
    await listener.listen("127.0.0.1", 0)
    command = [sys.executable, str(HERE / "emulated_ranks.py"), "--world", str(world), "--tensor", str(tensor)]
    environment = os.environ | {"MFLEET_CONTROLLER": listener.address, "MFLEET_TOKEN": token}
    ranks = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    group = TrainerGroup(config, listener, ExternalRanks(Path("logs")), token, SequenceCost(1.0, 1e-4, 1.0))
    try:
        await group.gather()
        await group.build()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, wall = time.process_time(), time.monotonic()
        for _ in range(steps):
            await group.forward_backward(data, LossSpec.of(config.algorithm))
            await group.optim_step(AdamParams(1e-4))
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    finally:
        await group.close()
    received = json.loads(ranks.communicate(timeout=60)[0])["data_bytes"]
    replicas = [sum(received[r : r + tensor]) for r in range(0, world, tensor)]
    leaders_only = all(received[r] == 0 for r in range(world) if r % tensor)
    return {
        "ranks": world,
        "replicas": world // tensor,
        "sequences": len(data),
        "cpu_ms_per_step": 1e3 * cpu / steps,
        "wall_ms_per_step": 1e3 * wall / steps,
        "copies_per_replica": sum(replicas) / steps / nbytes(data),
        "only_first_ranks_get_data": leaders_only,
        "data_mb": nbytes(data) / 1e6,
        "peak_growth_mb": grown / 1e3,
    }


def real_run(steps: int) -> dict[str, float]:
    """Processor time of the controller of a quickstart."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "megatron_fleet.cli", "train", "experiment=quickstart", "eval=none"]
        process = subprocess.Popen(
            [*command, f"run.out={out}/run", f"run.steps={steps}", "checkpoint.export.last=false"],
            stdout=subprocess.DEVNULL,
        )
        me, first, last = psutil.Process(process.pid), None, None
        rows = Path(out, "run", "metrics.jsonl")
        while process.poll() is None:
            count = len(rows.read_text().splitlines()) if rows.exists() else 0
            try:
                spent = sum(me.cpu_times()[:2])
            except psutil.Error:
                break
            if count and first is None:
                first = count, spent
            last = count, spent
            time.sleep(0.2)
        assert process.wait() == 0 and first is not None and last is not None
        done = max(1, last[0] - first[0])
        config = load(["experiment=quickstart"])
        episodes = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        per_step = 1e3 * (last[1] - first[1]) / done
        return {"steps": done, "cpu_ms_per_step": per_step, "cpu_ms_per_episode": per_step / episodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--large", type=int, default=4096, help="sequences for 256 ranks; 0: leave it out")
    parser.add_argument("--large-scale", type=float, default=0.05, help="of their lengths: the routing of all is 40 GB")
    parser.add_argument("--run-steps", type=int, default=4, help="of a real quickstart; 0: leave it out")
    given = parser.parse_args()
    config = load(["experiment=quickstart", f"policy.micro_batch_tokens={65536}", "rollout.max_context=65536"])
    data = make_data(given.sequences, routing=False)
    report = stamp(__file__)
    report["steps"] = [asyncio.run(measure(config, data, world, given.steps)) for world in (1, 8, 64)]
    if given.large:
        large = make_data(given.large, routing=True, scale=given.large_scale)
        report["large"] = asyncio.run(measure(config, large, 256, 1))
    if given.run_steps:
        report["run"] = real_run(given.run_steps)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
