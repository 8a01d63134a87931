"""Log-probs by transformers, Megatron and vLLM of the same sampled tokens."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from whole_runs import RUN_TIMEOUT_S, Run

SCORED = 6
"""Trajectories of a file that are scored; of some families, transformers takes a second for each."""


def assert_all_agree(run: Run, rollouts: str, model: Path, folder: Path) -> None:
    """On the trajectories of a file such as ``step_000001`` that engines sampled with the weights of ``model``."""
    scores = folder / "scores.npz"
    command = [sys.executable, __file__, str(model), str(run.out / "trajectories" / f"{rollouts}.parquet"), str(scores)]
    shared = {"PYTHONPATH": str(Path(__file__).parents[1])}  # what tests of several folders share
    subprocess.run(command, env=os.environ | shared, check=True, timeout=RUN_TIMEOUT_S)
    found, sampled = np.load(scores), run.arrays(rollouts)[:SCORED]
    hf, megatron = (np.concatenate([found[f"{by}{i}"] for i in range(len(sampled))]) for by in ("hf", "megatron"))
    vllm = np.concatenate([t["behaviour_logprobs"][t["action_mask"]] for t in sampled])
    assert np.abs(megatron - hf).mean() <= 1e-5
    assert np.abs(megatron - vllm).mean() <= 0.01


def score(model: str, shard: str, out: str) -> None:
    """Log-probs of all actions by transformers and by Megatron, in a process of their own."""
    gc.disable()  # imports take most of its time
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_fleet.algorithms.datum import Datum
    from megatron_fleet.config.load import load
    from megatron_fleet.telemetry.shards import Shard
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy
    from megatron_fleet.trainer.packing.pack_plan import plan_micro_batches

    arrays = Shard.open(Path(shard)).arrays()
    edges = arrays["offsets"][1:-1]
    ids, masks = (np.split(arrays[name], edges)[:SCORED] for name in ("token_ids", "action_mask"))
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = load(["experiment=quickstart", f"model.path={model}"])
    data = [Datum(i, m, m * 0.0, m * 0.0) for i, m in zip(ids, masks, strict=True)]
    lengths = [len(d) for d in data]
    (plan,) = plan_micro_batches(lengths, 1, config.policy.micro_batch_tokens, lengths)
    values = MegatronPolicy(config).forward([[data[i] for i in micro_batch] for micro_batch in plan])
    megatron = {
        i: v for micro_batch, found in zip(plan, values, strict=True) for i, v in zip(micro_batch, found, strict=True)
    }
    result = {}
    for i, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        given = torch.tensor(tokens[None].astype(np.int64))
        with torch.no_grad():
            logits = hf(given).logits[0, :-1]
        scores = torch.log_softmax(logits, -1).gather(1, given[0, 1:, None])[:, 0].numpy()
        where = np.flatnonzero(mask)
        result[f"hf{i}"], result[f"megatron{i}"] = scores[where - 1], megatron[i][where]
    np.savez(out, **result)


if __name__ == "__main__":
    score(*sys.argv[1:])
