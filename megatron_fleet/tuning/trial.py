"""One candidate of the trainer's in a process of its own: ``python -m megatron_fleet.tuning.trial FOLDER``.

Reads ``FOLDER/request.json``; writes ``FOLDER/result.json`` and ``logprobs.npy``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.trainer.process import prepare_process
from megatron_fleet.tuning.search import describe_failure

WARM_UP = 2
"""Untimed steps before the timed ones, in which memory is allocated and kernels are selected."""
LR = 1e-6


def main(folder: Path) -> int:
    """Run the trial. A failure with a known reason is a result too."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        config = Config.model_validate(request["config"])
        prepare_process(config.policy, config.parallel)
        result, logprobs = measure(config, request["init"], request["repeats"])
        np.save(folder / "logprobs.npy", logprobs)
    except UserError as error:
        result = {"problem": str(error)}
    except Exception as error:
        result = {"problem": describe_failure(error)}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def measure(config: Config, init: Any, repeats: int) -> tuple[dict[str, Any], np.ndarray]:
    """Seconds of each step (forward, backward, optimizer) and of its micro-batch alone, peak bytes, and log-probs
    float32 ``[N]`` before the first step.

    Args:
        init: see `MegatronPolicy`.
    """
    import torch

    from megatron_fleet.algorithms.losses import sft_loss
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    cuda = torch.cuda.is_available()
    before = _resident()
    policy = MegatronPolicy(config, init=init)
    micro_batch = random_micro_batch(config.policy.micro_batch_tokens, config.rollout.max_context, policy.vocab_size)
    (values,) = policy.forward([micro_batch])
    logprobs = np.concatenate([found[datum.loss_mask] for datum, found in zip(micro_batch, values, strict=True)])
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    seconds, computing = [], []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        policy.forward_backward([micro_batch], sft_loss)
        synchronize()
        computing.append(time.perf_counter() - start)
        policy.optim_step(LR)
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else _resident() - before
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    policy.close()
    times = {"seconds": seconds[WARM_UP:], "micro_batch_seconds": computing[WARM_UP:]}
    return {**times, "peak_bytes": peak, "device": name}, logprobs.astype(np.float32)


def random_micro_batch(tokens: int, longest: int, vocab: int) -> Sequence[Datum]:
    """A micro-batch of ``tokens`` random tokens in sequences of at most ``longest``, all trained except the first of
    each; the weights are the reciprocal of the number of trained tokens.
    """
    rng = np.random.default_rng(0)
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest > 1 else [])
    trained = sum(lengths) - len(lengths)
    micro_batch = []
    for length in lengths:
        mask = np.arange(length) > 0
        weights, zeros = (mask / trained).astype(np.float32), np.zeros(length, np.float32)
        micro_batch.append(
            Datum(rng.integers(0, vocab, length).astype(np.int32), mask, weights, zeros, loss_scale=1 / trained)
        )
    return micro_batch


def _resident() -> int:
    """Peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
