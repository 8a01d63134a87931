"""Task rows from a table of questions: a file, a folder of a dataset, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import environment_name, user_path
from megatron_fleet.config.remote_model import DEFAULT_REVISION, HubModel, cache_folder, remote_model
from megatron_fleet.data.formats import SUFFIXES, read_rows
from megatron_fleet.data.rows import checked, parse
from megatron_fleet.data.source import read_bytes

KEY_DIGITS = 16
"""Hexadecimal digits of the hash in a key."""
CONVERTED = "refs/convert/parquet"
"""Revision in which the hub keeps its Parquet copy of every dataset, as ``config/split/0000.parquet``."""
SPLITS = ("train", "validation", "valid", "dev", "test")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files in a dataset's folder that hold no rows."""


def read_table(source: str, split: str, subset: str | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file, of one split of a dataset's folder, or of one on the hub (``owner/name``).

    Args:
        subset: name of a configuration of the dataset, a part of the names of its files.

    Raises:
        UserError: it cannot be read, or has no such split or subset.
    """
    if "://" not in source and user_path(source).is_dir():
        folder = user_path(source)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return [row for name in _of_split(names, split, subset, source) for row in _rows(str(folder / name))]
    hub = remote_model(source)
    if isinstance(hub, HubModel) and not source.endswith(SUFFIXES) and not user_path(source).exists():
        return [row for path in _download(hub, split, subset) for row in _rows(path)]
    return _rows(source)


def make_rows(
    table: Sequence[dict[str, Any]], source: str, environment: str, prompt: str, answer: str | None, key: str | None
) -> list[dict[str, Any]]:
    """Make rows of a task file; equal ones are made once.

    Args:
        environment: value of ``env_key``.
        prompt, answer, key: names of columns; a dot leads into a column of objects (``reward_model.ground_truth``).
            Without ``key``, a task's key is a hash of its prompt and answer.

    Raises:
        UserError: a column is missing or empty, or a row would not be a task.
    """
    made: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(table, start=1):
        values = {column: _value(row, column, number, source) for column in (prompt, answer, key) if column is not None}
        content = [values[prompt], values[answer] if answer is not None else None]
        name = f"{environment}-{_digest(content)}" if key is None else str(values[key])
        task = {"task_key": name, "env_key": environment, "prompt": content[0]}
        task |= {} if answer is None else {"answer": content[1]}
        if made.setdefault(name, task) != task:
            raise UserError(f"{source}: row {number}: another row has the {key} {name!r}; leave --key out.")
    rows = list(made.values())
    checked(parse(rows), source, keep_first=False)
    return rows


def environment_of(source: str) -> str:
    """Return the name of a file, folder or dataset as the name of an environment."""
    name = PurePosixPath(source.partition("@")[0] if "://" not in source else source).name
    return environment_name(name.removesuffix(PurePosixPath(name).suffix)).replace(":", "_") or "questions"


def as_file(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return a JSON task file with one row per line."""
    return b"[\n" + b",\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"\n]\n"


def _rows(file: str) -> list[dict[str, Any]]:
    rows = read_rows(read_bytes(file, "the path"), file)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{file}: row {number} is not an object with named columns; correct it.")
    return rows


def _value(row: dict[str, Any], column: str, number: int, source: str) -> Any:
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise UserError(f"{source}: row {number} has no column {column}; it has {', '.join(row)}.")
        value = value[name]
    if value is None or value == "":
        raise UserError(f"{source}: row {number} has nothing in column {column}; remove it or fill it in.")
    return value


def _digest(content: Any) -> str:
    written = json.dumps(content, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:KEY_DIGITS]


def _of_split(names: Sequence[str], split: str, subset: str | None, source: str) -> list[str]:
    """Choose the files of a split; all if the names tell of no split."""
    names = sorted(name for name in names if name.endswith(SUFFIXES) and PurePosixPath(name).name not in METADATA)
    parts = {name: re.split(r"[/._-]", name) for name in names}
    if subset is not None:
        names = [name for name in names if subset in PurePosixPath(name).parts]
    chosen = [name for name in names if split in parts[name]]
    if not chosen and not any(known in parts[name] for name in names for known in SPLITS):
        chosen = names
    if not chosen:
        there = ", ".join(names[:5]) or "no file of a known format"
        raise UserError(f"{source}: no file of split {split}{_of(subset)}; there is {there}. Choose with --split.")
    subsets = {PurePosixPath(name).parent for name in chosen}
    if len(subsets) > 1:
        found = ", ".join(sorted(map(str, subsets)))
        raise UserError(f"{source}: split {split} is in several folders ({found}); choose one with --subset.")
    return chosen


def _of(subset: str | None) -> str:
    return f" and subset {subset}" if subset is not None else ""


def _download(dataset: HubModel, split: str, subset: str | None) -> list[str]:
    """Download the files of a split into the hub's cache and return their paths.

    Without a revision they are the hub's own Parquet copy, or the dataset's files where there is none.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        if dataset.revision != DEFAULT_REVISION:
            return _downloaded(dataset, split, subset)
        try:
            return _downloaded(dataset.at(CONVERTED), split, subset)
        except errors.RevisionNotFoundError:
            return _downloaded(dataset, split, subset)
    except errors.RevisionNotFoundError:
        raise UserError(f"{dataset}: the dataset has no such revision; correct it.") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{dataset.repo}: there is no such file here, and no such dataset on the hub, or it is private; correct "
            f"the name, or set HF_TOKEN."
        ) from None
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{dataset.repo}: the Hugging Face hub does not provide it ({reason}); try again.") from None


def _downloaded(dataset: HubModel, split: str, subset: str | None) -> list[str]:
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    where: dict[str, Any] = {"repo_type": "dataset", "revision": dataset.revision}
    chosen = _of_split(hub.list_repo_files(dataset.repo, **where), split, subset, dataset.repo)
    cache = cache_folder(os.environ)
    return [str(hub.hf_hub_download(dataset.repo, name, cache_dir=cache, **where)) for name in chosen]
