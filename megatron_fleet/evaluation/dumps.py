"""Evaluation dumps in the file format of Fleet's tools.

``dumped_evals/global_step_N_evals/{env}.jsonl`` has one line per episode at the training temperature, its ``greedy/``
folder the same for greedy episodes, and ``aggregated_results.jsonl`` one line with the metrics of the evaluation.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.algorithms.advantages import is_known
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.episodes import by_environment, response_tokens
from megatron_fleet.telemetry.shards import IMAGES, digests

AGGREGATED = "aggregated_results.jsonl"
ENV_CLASS = "fleet_task"

STOP_REASONS = {
    Outcome.COMPLETED: "stop",
    Outcome.MAX_TURNS: "stop",
    Outcome.NO_ACTION: "stop",
    Outcome.CONTEXT_OVERFLOW: "length",
    Outcome.GENERATION_TRUNCATED: "length",
    Outcome.TIMEOUT: "timeout",
    Outcome.ENV_FAILED: "env_init_failed",
}
"""Fleet's stop reasons; outcomes without an equivalent keep their own name."""

Decode = Callable[[Sequence[int]], str]


class EvalDumps:
    """Writer of the dumps below one folder."""

    def __init__(self, folder: Path, decode: Decode, max_turns: int, resumed_step: int | None) -> None:
        """Remove dumps of a failed attempt.

        Args:
            decode: text of token ids, control tokens included.
            max_turns: recorded in every line.
            resumed_step: keep dumps up to it; ``None`` = a new run, keep nothing.
        """
        self._folder, self._decode, self._max_turns = folder, decode, max_turns
        for path in folder.glob("global_step_*_evals"):
            step = re.fullmatch(r"global_step_(\d+)_evals", path.name)
            # Only folders: a dump is one, and the removal would wait for the writer of a pipe.
            if step and path.is_dir() and (resumed_step is None or int(step[1]) > resumed_step):
                shutil.rmtree(path)

    def write(
        self, step: int, sampled: Sequence[Group], greedy: Sequence[Group], metrics: Mapping[str, float]
    ) -> dict[str, Path]:
        """Write the dump of one evaluation; return its files by their names inside it."""
        folder = self._folder / f"global_step_{step}_evals"
        texts = self._texts("", sampled) | self._texts("greedy/", greedy)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        texts[AGGREGATED] = json.dumps(finite) + "\n"
        files = {name: folder / name for name in texts}
        for name, path in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, texts[name].encode("utf-8", "replace"))
        return files

    def _texts(self, prefix: str, groups: Sequence[Group]) -> dict[str, str]:
        return {
            f"{prefix}{env}.jsonl": "".join(self._line(t) for g in own for t in g.trajectories)
            for env, own in by_environment(groups).items()
        }

    def _line(self, trajectory: Trajectory) -> str:
        record = dump_record(trajectory, self._decode, self._max_turns)
        return json.dumps(record, ensure_ascii=False) + "\n"


def dump_record(t: Trajectory, decode: Decode, max_turns: int) -> dict[str, Any]:
    """Build one line. ``score`` has a number per response token, the reward at the last one; ``null`` = unknown.

    Prompts after the first, which repeat earlier messages after the history was rewritten, are left out. An episode
    without token ids, such as one whose prompt was too long, is recorded by its messages. An image has one placeholder
    in the text; ``images`` has the digests, which name the files.
    """
    length = response_tokens(t)
    if t.spans:
        said = np.ones(len(t.token_ids), bool)
        for image in t.image_spans:
            said[image.start + 1 : image.end] = False
        first = t.spans[0].end
        response = said.copy()
        for span in t.spans:
            response[span.start : span.end] &= span.kind != "prompt"
        texts = decode(t.token_ids[:first][said[:first]].tolist()), decode(t.token_ids[response].tolist())
    else:
        texts = _said(t, first=True), _said(t, first=False)
    return {
        "input_prompt": texts[0],
        "output_response": texts[1],
        "score": [0.0] * (max(length, 1) - 1) + [float(t.reward)] if is_known(t.reward) else None,
        "stop_reason": STOP_REASONS.get(t.outcome, str(t.outcome)),
        "env_class": ENV_CLASS,
        "env_extras": {"task_key": t.task_key, "data_source": t.env_key, "max_turns": max_turns},
        "data_source": t.env_key,
        **({IMAGES: names} if (names := digests(t)) else {}),
    }


def _said(t: Trajectory, first: bool) -> str:
    """Return the text of the messages before the policy's first one (``first``), or of those from it on."""
    roles = [message["role"] for message in t.messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    chosen = t.messages[:start] if first else t.messages[start:]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in chosen)
