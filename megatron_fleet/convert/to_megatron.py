"""Plan a conversion from an HF folder to a Megatron ``torch_dist`` checkpoint for any layout and layer spec."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_fleet.convert.content import FileRange, TensorRows
from megatron_fleet.convert.plan import Bytes, Content, OutputFile, Plan
from megatron_fleet.convert.template import KEPT, plan_template
from megatron_fleet.models.model import Model
from megatron_fleet.weights.floats import widest
from megatron_fleet.weights.hf_folder import ITEM_BYTES
from megatron_fleet.weights.hf_model import HfModel, Plain
from megatron_fleet.weights.hf_rows import HfReader, PerThread, RowReader
from megatron_fleet.weights.mapping import Interval, Matrix, Piece, prove_coverage, stack_key
from megatron_fleet.weights.torch_dist import writer
from megatron_fleet.weights.torch_dist.container import wrap
from megatron_fleet.weights.torch_dist.folder import TRACKER
from megatron_fleet.weights.torch_dist.index import COMMON, METADATA, METADATA_JSON, Blob, Chunk, ChunkedTensor

FILE_BYTES = 1 << 30
"""Minimum data file size: the most that a killed conversion redoes, per machine."""
CHUNK_BYTES = 64 << 20
"""Maximum chunk size. A loading rank reads whole chunks, even for a few of their rows."""
RELEASE = "release/"
_WITH_STATE = re.compile(
    r"(.+\.(?:linear_\w+|\w*layernorm|enorm|hnorm|eh_proj|out_norm|out_proj|in_proj))\.weight(?:\.query)?"
)
"""Modules with an extra state: linear layers and, under Transformer Engine 2, standalone norms.

A layer whose weight is stored in parts has one state, and the part ``query``."""


def plan_to_megatron(model: HfModel, numbered: bool | None = None) -> Plan:
    """Plan the conversion of a folder.

    Args:
        numbered: whether keys contain the layer's number (Megatron's form for a list ``moe_layer_freq``) or layers are
            stacked; ``None``: stacked if all layers are of one kind, as Megatron does.

    Raises:
        UserError: see `hf_model.open_model`.
    """
    prove_coverage(model.table)
    numbered = not model.table.model.uniform if numbered is None else numbered
    builder = _DataFiles(model, numbered)
    for matrix in sorted(model.table.matrices(), key=builder.position):
        builder.add(matrix)
    files, objects = builder.finish()
    template_files, template_small = plan_template(model)
    identity = {"to": "torch_dist", "layers": "numbered" if numbered else "stacked", "source_sha256": _digest(model)}
    metadata = writer.metadata_bytes(builder.tensors, builder.aliases, objects)
    small = {f"{KEPT}{name}": data for name, data in template_small.items()}
    small |= {
        RELEASE + COMMON: writer.common_bytes(),
        RELEASE + METADATA_JSON: writer.metadata_json_bytes(),
        RELEASE + METADATA: metadata,
    }
    for file in template_files:
        file.name = KEPT + file.name
    return Plan([*files, *template_files], small, TRACKER, b"release", identity, model.folder.url)


def _digest(model: HfModel) -> str:
    """Hash of the source's headers."""
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for name, stored in sorted(model.stored.items()):
        digest.update(f"{name} {stored.file} {stored.dtype} {stored.shape} {stored.offset}\n".encode())
    return digest.hexdigest()


@dataclass
class _Entry:
    """A checkpoint tensor under construction."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


class _DataFiles:
    """Lays out matrices in data files."""

    def __init__(self, model: HfModel, numbered: bool) -> None:
        self._model, self._numbered = model, numbered
        self._entries: dict[str, _Entry] = {}
        self._files: list[OutputFile] = []
        self._objects: list[str] = []
        self._readers: PerThread[RowReader] = PerThread(lambda: HfReader(model))
        self.aliases: dict[str, str] = {}
        # One dtype per key: stacked layers and experts share it.
        found: dict[str, list[str]] = {}
        for matrix in model.table.matrices():
            found.setdefault(self._address(matrix.key, matrix.expert).key, []).append(self._dtype(matrix))
        self._dtypes = {key: widest(dtypes) for key, dtypes in found.items()}

    def position(self, matrix: Matrix) -> tuple[str, int]:
        """Position of a matrix's first rows in the source, so that its files are read sequentially."""
        first = matrix.pieces[0].tensor
        encoding = self._model.encodings[first or ""]
        stored = encoding.stored if isinstance(encoding, Plain) else encoding.parts[0]
        return stored.file, stored.offset

    @property
    def tensors(self) -> dict[str, ChunkedTensor]:
        """Key → tensor, once all matrices were added."""
        return {
            key: ChunkedTensor(e.dtype, e.shape, tuple(sorted(e.chunks))) for key, e in sorted(self._entries.items())
        }

    def add(self, matrix: Matrix) -> None:
        """Lay out one matrix in chunks of rows."""
        place = self._address(matrix.key, matrix.expert)
        dtype = self._dtypes[place.key]
        entry = self._entries.setdefault(place.key, _Entry(dtype, (*place.counts, *matrix.shape)))
        for alias in matrix.aliases:
            self.aliases[self._address(alias, matrix.expert).key] = place.key
        width = math.prod(matrix.shape[1:]) * ITEM_BYTES[dtype]
        step = max(1, CHUNK_BYTES // width)
        for row in range(0, matrix.shape[0], step):
            rows = row, min(row + step, matrix.shape[0])
            sizes = (*(1 for _ in place.lead), rows[1] - rows[0], *matrix.shape[1:])
            offsets = (*place.lead, row, *(0 for _ in matrix.shape[1:]))
            container = wrap(dtype, sizes)
            file = self._file()
            start = file.append(Bytes(container.prefix))
            for content in self._contents(matrix, rows, dtype):
                file.append(content)
            file.append(Bytes(container.suffix))
            entry.chunks.append(Chunk(offsets, sizes, file.name.removeprefix(RELEASE), start, container.length))
        self._objects.extend(extra_states(self._model.table.model, matrix, self._numbered))

    def finish(self) -> tuple[list[OutputFile], dict[str, Blob]]:
        """The files, and the objects: an identical extra state for each Transformer Engine layer."""
        blob = writer.extra_state_blob()
        file = self._file()
        place = Blob(file.name.removeprefix(RELEASE), file.append(Bytes(blob)), len(blob))
        return self._files, dict.fromkeys(sorted(self._objects), place)

    def _dtype(self, matrix: Matrix) -> str:
        if matrix.rule.float32:
            return "F32"
        reader = self._readers()
        return widest([reader.dtype(piece.tensor or "") for piece in matrix.pieces])

    def _address(self, key: str, expert: int | None) -> Address:
        return address(self._model.table.model, key, expert, self._numbered)

    def _contents(self, matrix: Matrix, rows: Interval, dtype: str) -> Iterator[Content]:
        for piece in matrix.restrict(rows):
            yield self._content(piece, math.prod(matrix.shape[1:]), dtype, matrix.rule.offset)

    def _content(self, piece: Piece, columns: int, dtype: str, offset: float) -> Content:
        assert piece.tensor is not None  # no padding on disk: Megatron adds it when loading
        encoding = self._model.encodings[piece.tensor]
        if isinstance(encoding, Plain) and encoding.stored.dtype == dtype and not offset:
            stored, width = encoding.stored, columns * ITEM_BYTES[dtype]
            first, last = piece.tensor_rows
            return FileRange(self._model.folder, stored.file, stored.offset + first * width, (last - first) * width)
        return TensorRows(self._readers, piece.tensor, piece.tensor_rows, columns, dtype, offset)

    def _file(self) -> OutputFile:
        """The data file currently being filled."""
        if not self._files or self._files[-1].size >= FILE_BYTES:
            self._files.append(OutputFile(f"{RELEASE}__0_{len(self._files)}.distcp"))
        return self._files[-1]


@dataclass(frozen=True, slots=True)
class Address:
    """Location of a matrix: ``key`` at the leading indices ``lead``; ``counts`` has the size of each leading axis."""

    key: str
    lead: tuple[int, ...]
    counts: tuple[int, ...]


def address(model: Model, key: str, expert: int | None, numbered: bool) -> Address:
    """Address of a key that contains the layer's number.

    Args:
        numbered: leave the number in the key, as Megatron does when ``moe_layer_freq`` is a list, instead of making it
            the first index.
    """
    lead, counts = ((), ()) if expert is None else ((expert,), (model.experts,))
    if not numbered:
        stacked, layer = stack_key(key)
        if layer is not None:
            return Address(stacked, (layer, *lead), (model.layers, *counts))
    return Address(key, lead, counts)


def extra_states(model: Model, matrix: Matrix, numbered: bool) -> Iterator[str]:
    """Keys of the extra states of the modules that hold a matrix; without them a checkpoint does not load.

    They are empty unless Transformer Engine trains with delayed FP8 scaling.
    """
    for name in (matrix.key, *matrix.aliases):
        module = _WITH_STATE.fullmatch(name)
        if module is None:
            continue
        yield _state(address(model, f"{module[1]}._extra_state", matrix.expert, numbered))
        # Megatron-Core 0.16 gives MTP layers one more.
        if name.startswith("mtp.") and module[1].endswith("linear_proj"):
            attention = module[1].removesuffix("linear_proj")
            yield _state(address(model, f"{attention}core_attention._extra_state", None, numbered))


def _state(place: Address) -> str:
    index, count = (".".join(map(str, v)) for v in (place.lead or (0,), place.counts or (1,)))
    return f"{place.key}/shard_{index}_{count}"
