"""Task sources: a file on a disk or on S3, the embedded fleet, or a folder written by `mfleet data prepare`.

`formats` reads the rows of a file.

A prepared folder has ``train.parquet``, ``eval.parquet`` and ``split.json``, on a disk or on S3. The first four columns
are those of Fleet's own preparation (``prompt`` as a list of one user message, ``env_class``, ``task_key``,
``data_source``), so that its tools read the files; the rest are the other fields of a task. ``env_variables`` and
``answer`` are JSON text, because their types differ from task to task. The manifest has the files' checksums and is
written last.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import megatron_fleet
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_file, user_path
from megatron_fleet.data.formats import SUFFIXES, pyarrow, read_parquet, read_rows
from megatron_fleet.data.rows import ALIASES
from megatron_fleet.data.split import MANIFEST, SplitManifest
from megatron_fleet.data.task import Task
from megatron_fleet.storage.open import open_folder, open_staging

EMBEDDED = "embedded"
"""Name that stands for the embedded fleet's own task file in place of a path."""
TRAIN, EVAL = "train.parquet", "eval.parquet"
COLUMNS = [names[0] for names in ALIASES.values()]
"""Columns of a prepared folder that are fields of a task."""
ENV_CLASS = "fleet_task"
"""Name of the only kind of environment in Fleet's trainer."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Contents of a task source.

    Attributes:
        address: as given.
        sha256: hexadecimal hash of the file's bytes, or of a prepared folder's ``split.json``, which has the hashes of
            its files.
        rows: unvalidated rows of the file.
        manifest: split manifest of a prepared folder.
    """

    address: str
    sha256: str
    rows: list[Any]
    manifest: SplitManifest | None = None


def read_source(address: str | Path) -> TaskSource:
    """Read the rows of a task file or of a prepared folder.

    Raises:
        UserError: it cannot be read, or has no rows (see `formats.read_rows`).
    """
    address = str(address)
    if is_prepared(address):
        data, rows = _read_prepared(address)
        return TaskSource(address, hashlib.sha256(data).hexdigest(), rows, SplitManifest.parse(data, address))
    data = read_bytes(address)
    return TaskSource(address, hashlib.sha256(data).hexdigest(), read_rows(data, address))


def is_prepared(address: str) -> bool:
    """Return whether an address is a prepared folder. In a store everything is that has no name of a task file."""
    if "://" in address:
        return not address.endswith(SUFFIXES)
    return address != EMBEDDED and user_path(address).is_dir()


def read_bytes(address: str, key: str = "data.tasks") -> bytes:
    """Read a whole file: local (``~`` expanded), on S3, or the embedded fleet's own.

    Args:
        key: configuration key that gave the address.

    Raises:
        UserError: the file cannot be read.
    """
    if "://" in address:
        from megatron_fleet.storage.open import open_folder

        if address.count("/") < 3:
            raise UserError(f"{key}={address} names no file in a bucket; write s3://bucket/file.json or gs://….")
        folder, _, name = address.rpartition("/")
        return open_folder(folder).read(name)
    if address == EMBEDDED:
        file = Path(megatron_fleet.__file__).parent / "embedded_fleet" / "tasks.json"
    else:
        file = user_path(address)
    return read_file(file, f"correct {key}")


def write_prepared(out: str | Path, train: Sequence[Task], held_out: Sequence[Task], manifest: SplitManifest) -> bool:
    """Write the folder atomically. Return ``False`` if it exists already with the same content.

    Raises:
        UserError: something else is there, or it cannot be written.
    """
    files = {TRAIN: _to_parquet(train), EVAL: _to_parquet(held_out)}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    marker = replace(manifest, files=hashes).dump()
    staging = open_staging(out, MANIFEST)
    if staging.exists():
        if open_folder(out).read(MANIFEST) != marker:
            raise UserError(f"{out}: another prepared folder is there already; name a new one or remove it.")
        return False
    for name, data in files.items():
        staging.folder.write(name, data)
    staging.commit(marker)
    return True


def _read_prepared(address: str) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the manifest's bytes and the rows of both files, training first.

    Raises:
        UserError: the folder is not a prepared one, or a file does not match its checksum in the manifest.
    """
    folder = open_folder(address if "://" in address else user_path(address))
    sizes = folder.sizes()
    missing = [name for name in (MANIFEST, TRAIN, EVAL) if name not in sizes]
    if missing:
        raise UserError(
            f"data.tasks={address}: {missing[0]} is missing there; give a task file or a folder of `mfleet data "
            f"prepare`."
        )
    data = folder.read(MANIFEST)
    files = SplitManifest.parse(data, folder.join(MANIFEST)).files
    rows: list[dict[str, Any]] = []
    for name in (TRAIN, EVAL):
        content = folder.read(name)
        if hashlib.sha256(content).hexdigest() != files.get(name):
            raise UserError(
                f"{folder.join(name)} is not the file that {MANIFEST} was written for; prepare the data again."
            )
        try:
            rows += [_with_answer(row) for row in read_parquet(content, folder.join(name), COLUMNS)]
        except ValueError:
            raise UserError(f"{folder.join(name)}: an answer is not JSON; prepare the data again.") from None
    return data, rows


def _to_parquet(tasks: Sequence[Task]) -> bytes:
    pa = pyarrow()
    from pyarrow import parquet

    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    types = {"prompt": pa.list_(message), "difficulty": pa.int8()}
    rows = [_row(task) for task in tasks]
    names = ["prompt", "env_class", "task_key", "data_source"]
    names += [name for name in COLUMNS if name not in names]
    schema = pa.schema([(name, types.get(name, text)) for name in names])
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), out, compression="zstd")
    return out.getvalue()


def _row(task: Task) -> dict[str, Any]:
    fields = asdict(task)
    return {
        **{names[0]: fields[field] for field, names in ALIASES.items()},
        "prompt": [{"role": "user", "content": task.prompt}],
        "env_class": ENV_CLASS,
        "data_source": task.env_key,
        "env_variables": json.dumps(task.env_variables, ensure_ascii=False),
        "answer": None if task.answer is None else json.dumps(task.answer, ensure_ascii=False),
    }


def _with_answer(row: dict[str, Any]) -> dict[str, Any]:
    return row if row.get("answer") is None else row | {"answer": json.loads(row["answer"])}
