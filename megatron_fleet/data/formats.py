"""Files with a row per task, by format: JSON, JSON Lines, CSV, Parquet and Arrow."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json

LINES, TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv")
SUFFIXES = (".json", *LINES, *TABLES, ".parquet", ".arrow")
"""Ends of the names of task files."""
MAX_CELL_CHARS = 1 << 30
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_BOM = b"\xef\xbb\xbf"
_NOT_READ = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
    b"BZh": "compressed with bzip2; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it",
    b"PK\x03\x04": "a zip archive, as Excel's files are; unpack it, or save the sheet as CSV",
    b"SQLite format 3": "an SQLite database; export its table as CSV",
    b"\x89HDF": "an HDF5 file; export it as JSON Lines",
    b"\x80\x04": "a Python pickle, which is not read; write it as JSON Lines",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file with `git lfs pull`",
    b"<!DOCTYPE": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}
"""First bytes of formats that are recognised and refused → their names and what to do."""


def read_rows(data: bytes, file: str) -> list[Any]:
    """Return the rows of a file, not validated. Its first bytes decide what it is, and for text the end of its name.

    JSON is a list of rows, or an object with that list under ``tasks``. A byte order mark is skipped. The first line of
    a CSV table names its columns; commas, semicolons or tabs separate them, and an empty cell is ``None``. Values of
    Parquet and Arrow files become what JSON has, others (dates, bytes) text.

    Raises:
        UserError: it is none of these formats, is damaged or has no row; names the format if it is a known one.
    """
    rows = _rows(data, file)
    if not rows:
        raise UserError(f"{file} holds no task.")
    return rows


def _rows(data: bytes, file: str) -> list[Any]:
    if data.startswith(_PARQUET):
        return read_parquet(data, file)
    if data.startswith((_ARROW_FILE, _ARROW_STREAM)):
        return _read_arrow(data, file)
    for beginning, what in _NOT_READ.items():
        if data.startswith(beginning):
            raise UserError(f"{file}: this is {what}.")
    data = data.removeprefix(_BOM)
    try:
        decoded = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start}: not UTF-8 text; save it as UTF-8.") from None
    if file.endswith(TABLES):
        return _read_csv(decoded, file)
    text = data.lstrip()
    if text.startswith(b"[") or not (file.endswith(LINES) or _is_lines(text)):
        return _task_list(parse_json(data, file), file)
    return [_line(line, number, file) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]


def _is_lines(text: bytes) -> bool:
    """Return whether a text begins with an object and another one follows on a line of its own."""
    first, _, rest = text.partition(b"\n")
    if not first.startswith(b"{") or not rest.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(first)
    except ValueError:
        return False
    return True


def _line(line: bytes, number: int, file: str) -> Any:
    try:
        return parse_json(line, file)
    except UserError:
        parse_json(b"\n" * (number - 1) + line, file)
        raise


def _task_list(content: Any, file: str) -> list[Any]:
    rows = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(
            f'{file}: expected a list of tasks, an object with such a list under "tasks", or an object per line (JSON '
            f"Lines)."
        )
    return rows


def _read_csv(text: str, file: str) -> list[dict[str, Any]]:
    header = text.lstrip().partition("\n")[0]
    csv.field_size_limit(MAX_CELL_CHARS)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    except csv.Error as error:
        raise UserError(f"{file}: line {reader.line_num}: not CSV ({error}); correct the quotes there.") from None
    if not lines:
        return []
    (_, names), *rows = lines
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{file}: two columns are named {twice!r}; rename one.")
    for number, cells in rows:
        if len(cells) != len(names):
            raise UserError(
                f"{file}: the row that ends in line {number} has {len(cells)} cells, and the first line names "
                f"{len(names)} columns; correct it."
            )
    return [{name: cell or None for name, cell in zip(names, cells, strict=True)} for _, cells in rows]


def read_parquet(data: bytes, file: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file.

    Args:
        columns: only those of them that are there; ``None``: all.

    Raises:
        UserError: it is damaged, or pyarrow is missing.
    """
    pa = pyarrow()
    from pyarrow import parquet

    try:
        # Without threads: pyarrow's may abort a process that ends soon after reading ("terminate called without an
        # active exception", once in a few hundred).
        table = parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        return _as_json(table.read(columns=columns, use_threads=False))
    except (OSError, ValueError, TypeError, LookupError) as error:  # covers all that pyarrow raises
        raise UserError(f"{file}: no table of tasks ({_reason(error)}); write the Parquet file again.") from None


def _read_arrow(data: bytes, file: str) -> list[dict[str, Any]]:
    pa = pyarrow()
    try:
        read = pa.ipc.open_file if data.startswith(_ARROW_FILE) else pa.ipc.open_stream
        return _as_json(read(pa.BufferReader(data)).read_all())
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{file}: no table of tasks ({_reason(error)}); write the Arrow file again.") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _as_json(table: Any) -> list[dict[str, Any]]:
    """Return a pyarrow table as JSON values. A struct has all keys in every row, so those without a value are left
    out."""
    rows = table.to_pylist(maps_as_pydicts="lossy")
    written = json.dumps(rows, default=str, ensure_ascii=False)
    return [
        {name: _given(value) if isinstance(value, dict) else value for name, value in row.items()}
        for row in json.loads(written)
    ]


def _given(value: dict[str, Any]) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if inner is not None}


def pyarrow() -> Any:
    """Import pyarrow. Raises UserError if it is not installed."""
    try:
        import pyarrow as module
        import pyarrow.ipc
    except ImportError:
        raise UserError("Parquet files need pyarrow, which this Python environment lacks; run ./setup.sh.") from None
    return module
