"""Evaluations and training steps in the files of Fleet's training system, read as episodes.

``dumped_evals/global_step_N_evals/{env}.jsonl``: ``input_prompt``, ``output_response`` (decoded text), ``score`` (a
number per token, or one), ``stop_reason``, ``env_extras.task_key``, ``data_source``; ``aggregated_results.jsonl``: the
metrics of the evaluation. ``dumped_trajectories/global_step_N.jsonl``: ``env_key``, ``reward``, ``stop_reason``,
``turns``, ``tokens``, ``prompt``, ``text``.

A verifier that failed is recorded there as a score of 0, and so is an episode whose environment failed; the latter has
a stop reason of its own and is read as unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.analysis.episodes import Episode, number_of, shown
from megatron_fleet.analysis.run_files import FLEET_EVALUATIONS, FLEET_TRAINING
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import environment_name, parse_json
from megatron_fleet.storage.local import open_regular
from megatron_fleet.telemetry.rewards import is_solved

AGGREGATED = "aggregated_results.jsonl"
LOST = {"env_init_failed", "env_init_error", "trajectory_error"}
"""Stop reasons of episodes whose environment failed."""
OUTCOMES = {**dict.fromkeys(LOST, Outcome.ENV_FAILED), "timeout": Outcome.TIMEOUT}
"""Other stop reasons have no single outcome of ours (``stop`` may be an answer or the turn limit, ``length`` the
context or one turn) and are shown as they are."""
SCORES = (
    "The trajectories are in the layout of Fleet's training system. A score of 0 there may also be an episode whose "
    "verifier failed or never ran; the files do not tell which, so pass@1 and rewards here may be too low.",
    "Episodes whose environment failed (stop reasons env_init_failed, env_init_error, trajectory_error) are recorded "
    "there with a score of 0; here their reward is unknown.",
)
MISSING = (
    "Not on record in that layout: whether `stop` was an answer or the turn limit, temperature, token ids, "
    "log-probabilities, weight versions, which image belongs to which message. Conversations are split at the chat "
    "markers of the decoded text; samples of a task are numbered in the order of the file."
)
NO_TASKS = "The files of training steps name no tasks: the SHA-256 of the prompt stands for the task."
NO_METRICS = "metrics.jsonl is missing: curves show only the evaluations and training steps found in the episode files."
_FILE = re.compile(rf"{FLEET_EVALUATIONS}/global_step_(\d+)_evals/(greedy/)?([^/]+)\.jsonl")
_TRAINING = re.compile(rf"{FLEET_TRAINING}/global_step_(\d+)\.jsonl")
_SAID = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|(?=<\|im_start\|>)|\Z)", re.DOTALL)
_RESULT = re.compile(r"\s*(?:<tool_response>\s*(.*?)\s*(?:</tool_response>\s*)?\Z|(?=Tool result:|Error:))", re.DOTALL)


def files_of_sets(names: Iterable[str]) -> dict[tuple[str, int], list[str]]:
    """Map ``(kind, step)`` → the names of its files, in order; kinds as in `Episode`."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        if (evaluation := _FILE.fullmatch(name)) and f"{evaluation[3]}.jsonl" != AGGREGATED:
            found.setdefault(("greedy" if evaluation[2] else "eval", int(evaluation[1])), []).append(name)
        elif training := _TRAINING.fullmatch(name):
            found.setdefault(("step", int(training[1])), []).append(name)
    return found


def aggregated(names: Iterable[str]) -> dict[int, str]:
    """Map the step of an evaluation → the name of the file with its metrics."""
    return {
        int(found[1]): name
        for name in sorted(names)
        if (found := _FILE.fullmatch(name)) and not found[2] and f"{found[3]}.jsonl" == AGGREGATED
    }


def read_aggregated(path: Path, step: int) -> dict[str, Any]:
    """Return the metrics of an evaluation as a row of a metrics log. Raises UserError when it is damaged."""
    row: dict[str, Any] = {}
    with open_regular(path) as file:
        for found in parse_rows(file.read(), str(path)):
            row |= {shown(str(name)): number_of(value) for name, value in found.items()}
    return {name: value for name, value in row.items() if value is not None} | {"step": step}


def parse_rows(data: bytes, where: str) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Raises UserError when it is damaged."""
    rows = [parse_json(line, where) for line in data.splitlines() if line.strip()]
    return [row for row in rows if isinstance(row, dict)]


def step_row(step: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the mean rewards of a training step as a row of a metrics log, over the known ones."""
    row: dict[str, Any] = {"step": step}
    for env in ("", *sorted({e.env for e in episodes})):
        rewards = [e.reward for e in episodes if e.reward is not None and env in ("", e.env)]
        if rewards:
            name = f"reward/{environment_name(env)}/" if env else "reward/"
            row[f"{name}avg_raw_reward"] = sum(rewards) / len(rewards)
    return row


def read_files(paths: Sequence[Path], kind: str, step: int, pass_threshold: float) -> tuple[list[Episode], int]:
    """Return the episodes of one evaluation or training step, and the number of lines left out as damaged.

    Raises OSError or UserError when a file cannot be read.
    """
    episodes: list[Episode] = []
    samples: Counter[str] = Counter()
    left_out = line = 0
    for path in paths:
        with open_regular(path) as file:
            for content in file:
                try:
                    record = parse_json(content, str(path))
                    build = _training if kind == "step" else _evaluation
                    fields = build(record, path.stem)
                    fields["sample"] = samples[fields["task"]]
                    solved = None if fields["reward"] is None else is_solved(fields["reward"], pass_threshold)
                    episodes.append(Episode(kind=kind, step=step, line=line, solved=solved, **fields))
                    samples[fields["task"]] += 1
                except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
                    left_out += 1
                line += 1
    return episodes, left_out


def _evaluation(record: Mapping[str, Any], env: str) -> dict[str, Any]:
    score, extras = record["score"], record.get("env_extras") or {}
    tokens = len(score) if isinstance(score, list) else 0
    source = record.get("data_source") or extras.get("data_source") or env
    task = extras.get("task_key") or _digest(record["input_prompt"])
    messages = split(str(record["input_prompt"]), str(record["output_response"]))
    return _common(record, score, messages) | {"task": shown(str(task)), "env": shown(str(source)), "tokens": tokens}


def _training(record: Mapping[str, Any], env: str) -> dict[str, Any]:
    messages = split(str(record["prompt"]), str(record["text"]))
    source = record.get("env_key") or record.get("data_source") or env
    found = _common(record, record["reward"], messages)
    if (turns := number_of(record.get("turns"))) is not None:
        found["metrics"]["turns"] = turns
    tokens = max(0, int(number_of(record.get("tokens")) or 0))
    return found | {"task": _digest(record["prompt"]), "env": shown(str(source)), "tokens": tokens}


def _common(record: Mapping[str, Any], score: Any, messages: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    stop = shown(str(record.get("stop_reason") or "not recorded"))
    reward = sum(map(_number, score)) if isinstance(score, list) else None if score is None else _number(score)
    lost = stop in LOST and not reward
    return {
        "outcome": str(OUTCOMES.get(stop, stop)),
        "reward": None if lost else reward,
        "reason": "recorded with a score of 0, although the environment failed" if lost else f"stop reason {stop}",
        "final_answer": None,
        "action_tokens": 0,
        "metrics": _counted(messages),
        "messages": messages,
    }


def _number(value: Any) -> float:
    if (number := number_of(value)) is None:
        raise ValueError("a score is not a number")
    return number


def _digest(prompt: Any) -> str:
    return "prompt " + hashlib.sha256(str(prompt).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def split(prompt: str, response: str) -> tuple[tuple[str, str], ...]:
    """Split decoded text into messages at ChatML markers; without any, the prompt and the response are one each."""
    found = [(role, text.strip()) for role, text in _SAID.findall(prompt + response)]
    if not found:
        return ("user", prompt), ("assistant", response)
    said, acted = [], False
    for role, text in found:
        if acted and role == "user" and (result := _RESULT.match(text)):
            role, text = "tool", result[1] if result[1] is not None else text
        acted = acted or role == "assistant"
        said.append((role, text))
    return tuple(said)


def _counted(messages: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Count turns, calls and errors in the text; nothing for one that could not be split."""
    if len(messages) <= 2 and not any(role == "tool" for role, _ in messages):
        return {}
    acted = [text for role, text in messages if role == "assistant"]
    errors = [_is_error(text) for role, text in messages if role == "tool"]
    return {
        "turns": float(len(acted)),
        "tool_calls": float(sum("<tool_call>" in text.rpartition("</think>")[2] for text in acted)),
        "tool_errors": float(sum(errors)),
    }


def _is_error(text: str) -> bool:
    """Return whether the text of a tool result is an error: it begins with ``Error``, or is an object with one."""
    if text.lstrip().startswith(("Error:", "error:")):
        return True
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))
