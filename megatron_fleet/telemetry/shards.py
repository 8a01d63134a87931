"""Parquet files of episodes, one row each: what was said, sampled and scored. The one format, and its one reader.

A file is written whole under a temporary name and then renamed. Its index is at its end and every page has a checksum,
so a truncated or changed file is refused and never read as data.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.local import LocalFolder, os_errors_as_user_error

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Trajectory

SUFFIX = ".parquet"
ROWS = 64
"""Episodes in a row group, the least that is decoded to read one."""
SCALARS = ("task", "env", "group", "sample", "outcome", "reward", "reason", "final_answer", "tokens", "action_tokens")
"""Columns of numbers and short texts; enough to select episodes."""
TOKENS = ("token_ids", "action_mask", "behaviour_logprobs")
"""Columns that are arrays, ``[T]`` in each row."""
RECORD = (*SCALARS, "metrics", "segment_starts", "spans", "image_spans", "messages")
"""Columns that a reader of conversations needs."""
IMAGES = "images"
"""Column with the digests of an episode's images, and the folder of a run with their files."""
LEVEL = 6
"""Of zstd: a fifth smaller than level 1 and as fast to read."""


def pyarrow_is_there() -> None:
    """Raise UserError unless pyarrow can be imported."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("files of episodes need pyarrow, which this Python environment lacks; run ./setup.sh.")


def digests(trajectory: Trajectory) -> list[str]:
    """Return the distinct digests of the images in its messages and its tokens, in order."""
    said = (name for message in trajectory.messages for name in message.get("images", ()))
    return list(dict.fromkeys([*said, *(span.digest for span in trajectory.image_spans)]))


@cache
def schema() -> Any:
    """Schema of a file; a file with another one is refused, so readers need not check types."""
    import pyarrow as pa

    def field(name: str, kind: Any, nullable: bool = False) -> Any:
        return pa.field(name, kind, nullable=nullable)

    def many(kind: Any) -> Any:
        return pa.list_(field("element", kind))

    def struct(**kinds: Any) -> Any:
        return pa.struct([field(name, kind) for name, kind in kinds.items()])

    text, number = pa.string(), pa.int32()
    span = struct(kind=text, start=number, end=number, turn=number, weight_version=pa.int64())
    image = struct(start=number, end=number, turn=number, digest=text)
    kinds = {
        **dict.fromkeys(("task", "env"), text),
        **dict.fromkeys(("group", "sample"), pa.int64()),
        "outcome": text,
        "reward": pa.float64(),
        **dict.fromkeys(("reason", "final_answer"), text),
        **dict.fromkeys(("tokens", "action_tokens"), number),
        "metrics": many(struct(name=text, value=pa.float64())),
        "segment_starts": many(number),
        "spans": many(span),
        "image_spans": many(image),
        IMAGES: many(text),
        "messages": many(struct(role=text, content=text, images=many(text))),
        "token_ids": many(number),
        "action_mask": many(pa.bool_()),
        "behaviour_logprobs": many(pa.float32()),
    }
    return pa.schema([field(name, kind, name in ("reward", "final_answer")) for name, kind in kinds.items()])


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """Encode episodes as a file. Expert routing and the bytes of images are left out."""
    return write([_table(trajectories[at : at + ROWS]) for at in range(0, len(trajectories), ROWS)])


def write(tables: Sequence[Any]) -> bytes:
    """Write Arrow tables of `schema` as one file, each beginning a row group."""
    from pyarrow import parquet

    out = io.BytesIO()
    texts = ["task", "env", "outcome", "reason", "spans.list.element.kind", "messages.list.element.role"]
    texts += ["metrics.list.element.name", "messages.list.element.content"]
    writer = parquet.ParquetWriter(
        out,
        schema(),
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=texts,
        column_encoding={"behaviour_logprobs.list.element": "BYTE_STREAM_SPLIT"},
        data_page_size=8 << 20,  # a page is compressed by itself, and episodes of a task repeat its prompt
        dictionary_pagesize_limit=8 << 20,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )
    with writer:
        for table in tables:
            writer.write_table(table, row_group_size=ROWS)
    return out.getvalue()


def _table(trajectories: Sequence[Trajectory]) -> Any:
    import pyarrow as pa

    rows = [_row(t) for t in trajectories]
    columns = {name: [row[name] for row in rows] for name in schema().names if name not in TOKENS}
    arrays = {name: _lists([getattr(t, name) for t in trajectories], schema().field(name).type) for name in TOKENS}
    return pa.table(columns | arrays, schema=schema())


def _row(t: Trajectory) -> dict[str, Any]:
    from megatron_fleet.telemetry.sinks import json_number

    return {
        "task": _text(t.task_key),
        "env": _text(t.env_key),
        "group": t.group,
        "sample": t.sample,
        "outcome": str(t.outcome),
        "reward": json_number(t.reward),
        "reason": _text(t.reward_reason),
        "final_answer": None if t.final_answer is None else _text(t.final_answer),
        "tokens": len(t.token_ids),
        "action_tokens": int(t.action_mask.sum()),
        "metrics": [{"name": name, "value": float(value)} for name, value in t.metrics.items()],
        "segment_starts": list(t.segment_starts),
        "spans": [
            {"kind": s.kind, "start": s.start, "end": s.end, "turn": s.turn, "weight_version": s.weight_version}
            for s in t.spans
        ],
        "image_spans": [
            {"start": s.start, "end": s.end, "turn": _turn(t, s.start), "digest": s.digest} for s in t.image_spans
        ],
        IMAGES: digests(t),
        "messages": [
            {"role": m["role"], "content": _text(m["content"]), "images": list(m.get("images", ()))} for m in t.messages
        ],
    }


def _turn(t: Trajectory, place: int) -> int:
    return next(span.turn for span in t.spans if span.start <= place < span.end)


def _text(text: str) -> str:
    """Text without unpaired surrogates, which UTF-8 has no bytes for."""
    return text.encode("utf-8", "replace").decode()


def _lists(arrays: Sequence[np.ndarray], kind: Any) -> Any:
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    values = pa.array(np.concatenate([np.empty(0, arrays[0].dtype), *arrays]), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)


class Shard:
    """An open file of episodes, local or in a store; only what is asked for is read.

    Every method raises UserError when the file cannot be read, is cut or changed, or is of another format.
    """

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        """Read the index at the end of the file. ``size``: its bytes."""
        pyarrow_is_there()
        from pyarrow import parquet

        self.where = folder.join(name)
        with _refusing(self.where):
            file = io.BufferedReader(_Bytes(folder, name, size), 1 << 16)
            self._file = parquet.ParquetFile(file, page_checksum_verification=True, memory_map=False)
            if not self._file.schema_arrow.equals(schema()):
                raise ValueError("other columns")
        self.rows: int = self._file.metadata.num_rows

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Open a local file."""
        with os_errors_as_user_error(path, "read"):
            size = path.stat().st_size
        return cls(LocalFolder(path.parent), path.name, size)

    def records(self, columns: Sequence[str] = RECORD, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the rows as objects of JSON's kinds. ``rows``: only these, ascending; ``None`` = all."""
        table = self._table(columns, rows)
        with _refusing(self.where):
            found = table.to_pylist()
        for row in found:
            if "metrics" in row:
                row["metrics"] = {item["name"]: item["value"] for item in row["metrics"]}
            for name in {"spans", "image_spans"} & row.keys():
                row[name] = [list(item.values()) for item in row[name]]
            for message in row.get("messages", ()):
                if not message["images"]:
                    del message["images"]
        return found

    def arrays(self, rows: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """Return ``token_ids`` int32, ``action_mask`` bool and ``behaviour_logprobs`` float32, concatenated over rows,
        and ``offsets`` int64 ``[rows + 1]``: row i has ``[offsets[i], offsets[i+1])``.
        """
        table = self._table(TOKENS, rows)
        found, edges = {}, []
        with _refusing(self.where):
            for name in TOKENS:
                column = table.column(name).combine_chunks()
                lengths = column.value_lengths().to_numpy(zero_copy_only=False)
                edges.append(np.cumsum([0, *lengths], dtype=np.int64))
                found[name] = column.flatten().to_numpy(zero_copy_only=False)
            if any(not np.array_equal(edge, edges[0]) for edge in edges):
                raise ValueError("lengths differ")
        return found | {"offsets": edges[0]}

    def table(self, rows: Sequence[int]) -> Any:
        """Return rows with all columns, as an Arrow table that `write` takes."""
        return self._table(schema().names, rows)

    def _table(self, columns: Sequence[str], rows: Sequence[int] | None) -> Any:
        import pyarrow as pa

        with _refusing(self.where):
            if rows is None:
                return self._file.read(list(columns))
            starts = np.cumsum([0] + [self._file.metadata.row_group(i).num_rows for i in range(self._groups)])
            parts = []
            for group in range(self._groups):
                own = [row - int(starts[group]) for row in rows if starts[group] <= row < starts[group + 1]]
                if own:
                    parts.append(self._file.read_row_group(group, list(columns)).take(own))
            empty = pa.schema([schema().field(name) for name in columns]).empty_table()
            return pa.concat_tables(parts) if parts else empty

    @property
    def _groups(self) -> int:
        count: int = self._file.metadata.num_row_groups
        return count


class _Bytes(io.RawIOBase):
    """A file in a folder, read in pieces."""

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        self._folder, self._name, self._size, self._at = folder, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._at))
        view[:length] = self._folder.read(self._name, self._at, length) if length else b""
        self._at += length
        return length


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Turn whatever the decoder raises on a damaged file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where} is cut off, damaged or not a file of episodes ({why:.100}); leave it out.") from None
