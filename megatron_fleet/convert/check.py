"""Check of an HF folder in vLLM: its log-probs of a few tokens, compared with those that a run's trainer computed.

A run saves the trainer's with each checkpoint (`checkpoint.export.check`), so any machine can check an export of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json, read_object
from megatron_fleet.platform.processes import imports_uncollected
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.storage.open import open_folder

STATE, PROBE = "trainer_state.json", "probe"
"""File of a checkpoint, and its entry with tokens and the trainer's log-probs."""
KV_CACHE_BYTES = 256 << 20
"""On CPUs; a GPU's memory is shared out by vLLM."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids, and the trainer's log-prob of each given those before it; entry 0 of each sequence means nothing."""

    step: int
    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Result:
    """Mean and largest absolute difference of log-probs in nats, and the number of tokens compared."""

    step: int
    tokens: int
    mean: float
    largest: float

    def write(self, path: Path) -> None:
        """Write as JSON."""
        write_atomically(path, (json.dumps(asdict(self)) + "\n").encode())

    @staticmethod
    def read(path: Path) -> Result:
        """Read what `write` wrote. Raises UserError."""
        remedy = "remove it"
        found = parse_json(open_folder(path.parent).read(path.name), str(path), remedy)
        try:
            return Result(int(found["step"]), int(found["tokens"]), float(found["mean"]), float(found["largest"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not the result of a check; {remedy}.") from None


def read_probe(place: str) -> Probe:
    """Read the probe of a checkpoint, or a file that `copy_probe` wrote. Raises UserError when there is none."""
    where, remedy = place if place.endswith(".json") else f"{place.rstrip('/')}/{STATE}", "use another checkpoint"
    folder, _, name = where.rpartition("/")
    state = parse_json(open_folder(folder or ".").read(name), where, remedy)
    found = state.get(PROBE) if isinstance(state, dict) else None
    if found is None:
        raise UserError(f"{where} holds no log-probs to compare with; the run needs checkpoint.export.check=true.")
    try:
        tokens = [[int(token) for token in row] for row in found["tokens"]]
        logprobs = [[float(value) for value in row] for row in found["logprobs"]]
        if [len(row) for row in tokens] != [len(row) for row in logprobs] or not any(len(row) > 1 for row in tokens):
            raise ValueError
        return Probe(int(state["step"]), tokens, logprobs)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: {PROBE} is malformed; {remedy}.") from None


def copy_probe(checkpoint: Path, path: Path) -> bool:
    """Write a checkpoint's probe to a file, if it has one; returns whether it has."""
    state = read_object(checkpoint / STATE)
    if state.get(PROBE) is not None:
        write_atomically(path, json.dumps({"step": state["step"], PROBE: state[PROBE]}).encode())
    return PROBE in state


def compare(probe: Probe, scores: Sequence[Sequence[float]]) -> Result:
    """Compare log-probs with the trainer's. A value that is not a number makes the mean one that is not, too."""
    pairs = [(ours[1:], theirs[1:]) for ours, theirs in zip(probe.logprobs, scores, strict=True)]
    differences = np.abs(np.concatenate([np.subtract(ours, theirs) for ours, theirs in pairs]))
    return Result(probe.step, differences.size, float(differences.mean()), float(differences.max()))


def scores_in_vllm(folder: Path, sequences: Sequence[Sequence[int]], tensor_parallel: int) -> list[list[float]]:
    """Load an HF folder in vLLM, with its tokenizer and generation config, and score sequences.

    Changes this process's environment: call it in a process of its own, which has not imported torch yet.

    Returns:
        The log-prob of each token given those before it; 0 for the first one.
    """
    from megatron_fleet.cluster.inventory import cuda_is_installed
    from megatron_fleet.rollout.engine_arguments import CPU_ATTENTION, cpu_model_args, environment, family_mixer
    from megatron_fleet.rollout.engine_images import find_torchvision
    from megatron_fleet.weight_sync.vllm_plugin import MIXER

    os.environ |= environment(cuda_is_installed())
    if (mixer := family_mixer(folder)) is not None:
        os.environ[MIXER] = mixer.engine
    find_torchvision()  # before vLLM looks for it
    with imports_uncollected():
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "dtype": _dtype(folder),
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": max(map(len, sequences)) + 1,
        "max_num_seqs": len(sequences),
        "enforce_eager": True,
        "generation_config": "auto",
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments |= {"attention_config": CPU_ATTENTION, "kv_cache_memory_bytes": KV_CACHE_BYTES, "block_size": 32}
        arguments |= cpu_model_args(folder)
    outputs = LLM(str(folder), **arguments).generate(
        [{"prompt_token_ids": list(sequence)} for sequence in sequences],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    found: list[list[float]] = []
    for output in outputs:
        known = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append([0.0, *(entry[token].logprob for token, entry in known)])
    return found


def _dtype(folder: Path) -> str:
    """Return the dtype that ``config.json`` names; vLLM by itself computes in half precision where it says float32."""
    config = read_object(folder / "config.json")
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    return next((str(part[key]) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), "auto")
