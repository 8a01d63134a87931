"""Build a run's dataset: read, check, select and split its tasks, accounting for every row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.mixture import check_mixture
from megatron_fleet.data.rows import Parsed, checked, parse
from megatron_fleet.data.selection import excluded_tasks, select
from megatron_fleet.data.source import TaskSource, read_bytes, read_source
from megatron_fleet.data.split import MANIFEST, Split, SplitManifest, split
from megatron_fleet.data.task import Task
from megatron_fleet.storage.local import LocalFolder

RULES = {
    "duplicates",
    "modality",
    "environments",
    "difficulties",
    "exclusions",
    "max_tasks",
    "eval_fraction",
    "min_eval_per_env",
    "expected_eval_per_env",
    "max_eval_per_env",
    "max_eval",
    "held_out_environments",
    "max_env_share",
}
"""Keys of ``data`` that determine the split; the manifest records them."""


ANSWER_NAME = re.compile(r"(.*_)?(answers?|solutions?|labels?|expected|ground_?truth|gold|target|secret)(_.*)?", re.I)
"""Names of variables that look like an answer."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset of a run.

    Attributes:
        split: the selected tasks by side.
        removed: tasks that the selection removed, each with the reason.
        manifest: manifest of this split, including earlier assignments.
    """

    split: Split
    removed: list[tuple[Task, str]]
    manifest: SplitManifest


def load_tasks(address: str | Path) -> list[Task]:
    """Load all tasks of a file (a path, ``s3://…``, ``gs://…``, ``embedded``) or of a prepared folder, in order.

    Raises:
        UserError: it cannot be read, or a row is invalid or a duplicate; names row (from 1), field, expectation.
    """
    source = read_source(address)
    return checked(parse(source.rows), source.address, keep_first=False).tasks


def build(
    data: DataConfig, previous: SplitManifest | None = None, say: Callable[[str], None] = lambda _: None
) -> Dataset:
    """Read, check, select and split.

    Args:
        previous: manifest whose sides to keep, instead of the one that ``data`` names.
        say: called with a description of each phase as it begins.

    Raises:
        UserError: the source is malformed, or no task is left.
    """
    say(f"reading {data.tasks}")
    source = read_source(data.tasks)
    say(f"checking {len(source.rows)} tasks")
    keep_first, excluded = data.duplicates == "first", excluded_tasks(data)
    parsed = checked(parse(source.rows), source.address, keep_first, excluded)
    return divide(source, parsed, data, previous)


def divide(source: TaskSource, parsed: Parsed, data: DataConfig, previous: SplitManifest | None = None) -> Dataset:
    """Select and split the valid rows of a source; arguments and errors as for ``build``."""
    if previous is None:
        previous = _previous(data, source)
    selection = select(parsed.tasks, data)
    removed = [(task, "duplicate key") for task in parsed.repeated] + selection.removed
    if not selection.kept:
        raise UserError(f"data.tasks={data.tasks}: the filters remove all {len(source.rows)} tasks; loosen them.")
    if previous is not None and previous.sides().keys().isdisjoint(task.key for task in parsed.tasks):
        raise UserError(
            f"data.tasks={data.tasks}: the split manifest of {previous.source} has none of its tasks; name the "
            f"manifest of an earlier version of this data, or set data.split_manifest=null."
        )
    result = split(selection.kept, data, previous)
    result.notes.extend(shown_answers(selection.kept))
    rules = data.model_dump(mode="json", include=RULES)
    return Dataset(result, removed, _record(result, source.address, source.sha256, rules, previous))


def shown_answers(tasks: Iterable[Task]) -> list[str]:
    """Return a warning if the policy is shown variables that look like an answer."""
    found = Counter(name for task in tasks for name in task.env_variables if ANSWER_NAME.fullmatch(name))
    if not found:
        return []
    name, count = found.most_common(1)[0]
    return [
        f"env_variables.{name} of {count} tasks looks like an answer, and the policy is shown all env_variables; if it "
        f"is one, move it to the field answer, which only a reward function or class of yours reads."
    ]


def _previous(data: DataConfig, source: TaskSource) -> SplitManifest | None:
    if data.split_manifest is None:
        return source.manifest
    if source.manifest is not None:
        raise UserError(
            f"data.split_manifest={data.split_manifest} would split data.tasks={data.tasks} again, which is prepared "
            f"and has its own; remove data.split_manifest."
        )
    return SplitManifest.parse(read_bytes(data.split_manifest, "data.split_manifest"), data.split_manifest)


def _record(
    result: Split, address: str, sha256: str, rules: dict[str, object], previous: SplitManifest | None
) -> SplitManifest:
    """Build the split's manifest. Tasks that are missing from this data or filtered out keep their side."""
    sides = previous.sides() if previous is not None else {}
    sides |= {task.key: "train" for task in result.train}
    sides |= {task.key: "eval" for task in result.held_out}
    sides |= {task.key: "retired" for task in result.retired}
    train, held_out, retired = (
        sorted(key for key, side in sides.items() if side == name) for name in ("train", "eval", "retired")
    )
    return SplitManifest(address, sha256, rules, held_out, train, retired)


def run_dataset(config: Config) -> Dataset:
    """Build the dataset of a run. A run with a checkpoint to resume from keeps its original split.

    Raises:
        UserError: as for ``build``, ``check_verifiers`` and ``check_mixture``, or one of the two sets is too small for
            the configuration.
    """
    out = Path(config.run.out)
    kept, previous = out / MANIFEST, None
    if kept.is_file() and any((out / "checkpoints").glob("step_*")):
        previous = SplitManifest.parse(kept.read_bytes(), str(kept))
    dataset = build(config.data, previous)
    train, held_out = dataset.split.train, dataset.split.held_out
    check_verifiers([*train, *held_out], config)
    for name, tasks, least in (
        ("training", train, config.rollout.prompts_per_step),
        ("held-out", held_out, int(config.eval.in_training)),
    ):
        if len(tasks) < least:
            raise UserError(
                f"data.tasks={config.data.tasks}: only {len(tasks)} {name} tasks with "
                f"data.eval_fraction={config.data.eval_fraction:g}, at least {least} are needed; use more tasks, "
                f"or change the fraction."
            )
    check_mixture(train, config.rollout.prompts_per_step, config.data.mixture)
    return dataset


def check_verifiers(tasks: Iterable[Task], config: Config) -> None:
    """Raise UserError if ``tasks`` lack the verifiers that their environments need for scoring."""
    without = [task.key for task in tasks if not task.verifier_code.strip()]
    if without and config.env.about.scored_by_task:
        raise UserError(
            f"data.tasks={config.data.tasks}: {len(without)} tasks, the first of them {without[0]}, have no "
            f"verifier_code, and env.kind={config.env.kind} scores with it; add it, or leave them out with "
            f"data.exclusions."
        )


def save_manifest(dataset: Dataset, out: Path) -> None:
    """Write ``split.json`` into a run's outputs, for resuming it and for other runs."""
    LocalFolder(out).write(MANIFEST, dataset.manifest.dump())
