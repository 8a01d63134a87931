"""Plan a conversion from a Megatron ``torch_dist`` checkpoint to an HF folder, with a template's layout and format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.content import (
    FileRange,
    Fp8Codes,
    Fp8Scales,
    Int4Codes,
    Int4Scales,
    Joined,
    TensorRows,
)
from megatron_fleet.convert.origin import MANIFEST, checksums, find_template
from megatron_fleet.convert.plan import CHECKPOINT, Bytes, Content, OutputFile, Plan
from megatron_fleet.convert.template import Template, originals
from megatron_fleet.models.hf_config import architecture_of, drop_quantization, text_config
from megatron_fleet.storage.folder import Folder
from megatron_fleet.weights.checkpoint_reader import CheckpointReader, MegatronCheckpoint, StoredMatrices
from megatron_fleet.weights.floats import widest
from megatron_fleet.weights.fp8_model import declare_fp8, fp8_tensors
from megatron_fleet.weights.hf_folder import INDEX, ITEM_BYTES, SINGLE, StoredTensor, parse_header, safetensors_header
from megatron_fleet.weights.hf_model import BLOCK, Encoding, Int4, Plain
from megatron_fleet.weights.hf_rows import Fp8Weights, Hint, Int4Weights, PerThread

SHARD_BYTES = 5_000_000_000
"""Maximum safetensors file size of a new layout, same as the Hub's own tools."""
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FP8 = "FP8"
MARKER = "config.json"


def plan_to_hf(place: Folder | Path | str, template: Folder | Path | str | None, dtype: str | None = None) -> Plan:
    """Plan the conversion of a checkpoint.

    Args:
        template: HF folder of the model; ``None``: the template stored in the checkpoint, or the folder its run
            started from.
        dtype: ``None`` reproduces the template's files, dtypes and quantised forms, or keeps the checkpoint's dtype if
            the template does not describe files; ``BF16``, ``F16`` or ``F32`` stores all weights except router biases
            in that dtype, in files of 5 GB; ``FP8`` stores linear layers so (`fp8_model.fp8_tensors`), the rest in
            BF16.

    Raises:
        UserError: checkpoint and template do not match, there is no template, or no layer can be FP8.
    """
    checkpoint = MegatronCheckpoint(place)
    found = find_template(checkpoint, template)
    matrices = StoredMatrices(checkpoint, found.model.table)
    kept = originals(found)
    readers = PerThread(lambda: CheckpointReader(matrices, kept))
    small = {name: data for name, data in found.companions.items() if name != MARKER}
    if dtype is None and not found.headers:
        plain = found.model.table.tensors.keys() - _kept_types(found)
        dtype = widest([matrices.dtype(tensor) for tensor in plain])
    if dtype is None:
        contents = _TemplateContents(found, readers)
        files = [_file(name, header, contents.get) for name, header in sorted(found.headers.items())]
        config = found.companions[MARKER]
    else:
        if dtype == FP8 and not fp8_tensors(found.model.table):
            raise UserError(
                f"{found.model.folder.url}: no layer can be quantised in blocks of {BLOCK} x {BLOCK}: their sides "
                f"are not multiples of {BLOCK}; choose --dtype bfloat16."
            )
        files, index = _new_layout(found, readers, dtype)
        small = {name: data for name, data in small.items() if name != INDEX} | index
        config = _plain_config(found, dtype)
    identity = {"to": "hf", "dtype": dtype or "template", "source_sha256": _digest(checkpoint, found)}
    if MANIFEST in checkpoint.sizes:  # names the values, too: a run may reach one step twice, by another way
        identity[CHECKPOINT] = hashlib.sha256(checkpoint.read(MANIFEST)).hexdigest()
    return Plan(files, small, MARKER, config, identity, checkpoint.url, checksums(checkpoint))


def _digest(checkpoint: MegatronCheckpoint, template: Template) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(checkpoint.index.tensors.items()):
        digest.update(f"{key} {tensor}\n".encode())
    for name, header in sorted(template.headers.items()):
        digest.update(name.encode() + header)
    return digest.hexdigest()


def _file(name: str, header: bytes, content: Callable[[str, StoredTensor], Content]) -> OutputFile:
    """A safetensors file with the given header."""
    file = OutputFile(name)
    file.append(Bytes(header))
    for tensor, stored in parse_header(name, header).items():
        made = content(tensor, stored)
        assert made.nbytes == stored.nbytes, tensor
        file.append(made)
    return file


class CopiedRows(TensorRows):
    """A whole tensor that the checkpoint has in the target dtype: its rows are read directly into the output."""

    __slots__ = ("_checkpoint",)

    def __init__(self, readers: PerThread[CheckpointReader], tensor: str, count: int, columns: int, dtype: str) -> None:
        super().__init__(readers, tensor, (0, count), columns, dtype)
        self._checkpoint = readers

    def fill(self, start: int, out: memoryview) -> None:
        width, end = self._row_bytes, start + len(out)
        first, last = -(-start // width), end // width
        if first >= last:
            super().fill(start, out)
            return
        a, b = first * width - start, last * width - start
        super().fill(start, out[:a])
        self._checkpoint().read_into(self._tensor, (first, last), out[a:b])
        super().fill(last * width, out[b:])


class _TemplateContents:
    """Content of each tensor in a template's files."""

    def __init__(self, template: Template, readers: PerThread[CheckpointReader]) -> None:
        self._template, self._readers = template, readers
        self._table = template.model.table
        self._parts = self._find_parts(template.model.encodings)

    def get(self, name: str, stored: StoredTensor) -> Content:
        """Content of one stored tensor. Raises UserError if neither checkpoint nor template has it."""
        if name in self._parts:
            return self._parts[name]()
        if name in self._table.repeated:
            return self.rows(self._table.repeated[name], stored.dtype)
        if name in self._template.passthrough:
            folder, place = self._template.passthrough[name]
            return FileRange(folder, place.file, place.offset, place.nbytes)
        raise UserError(f"{self._template.model.folder.url}: the bytes of tensor {name} are missing; give --template.")

    def _find_parts(self, encodings: Mapping[str, Encoding]) -> dict[str, Callable[[], Content]]:
        """Stored tensor → factory of its content."""
        names = {id(stored): name for name, stored in self._template.model.stored.items()}
        parts: dict[str, Callable[[], Content]] = {}
        stacks: dict[str, list[tuple[int, str, str]]] = {}
        for tensor, encoding in encodings.items():
            if isinstance(encoding, Plain) and encoding.stack is not None:
                where = self._table.stacked[tensor]
                stacks.setdefault(where.tensor, []).append((where.rows[0], tensor, encoding.stack.dtype))
                continue
            if isinstance(encoding, Plain):
                parts[tensor] = partial(self.rows, tensor, encoding.stored.dtype)
                continue
            codes, scales = (names[id(part)] for part in encoding.parts[:2])
            if isinstance(encoding, Int4):
                int4 = Int4Weights(self._readers, tensor, self._table.tensors[tensor], self._hint(scales))
                parts |= {codes: partial(Int4Codes, int4), scales: partial(Int4Scales, int4)}
            else:
                power_of_two, shape = _power_of_two(self._template.model.config), self._table.tensors[tensor]
                stored = encoding.scales.dtype
                fp8 = Fp8Weights(self._readers, tensor, shape, self._hint(scales), power_of_two, stored)
                parts |= {codes: partial(Fp8Codes, fp8), scales: partial(Fp8Scales, fp8)}
        return parts | {stack: partial(self._stacked, sorted(members)) for stack, members in stacks.items()}

    def _stacked(self, members: list[tuple[int, str, str]]) -> Joined:
        """A tensor that stacks experts, of its parts in order (first row, name, dtype)."""
        return Joined([self.rows(tensor, dtype) for _, tensor, dtype in members])

    def rows(self, tensor: str, dtype: str) -> TensorRows:
        """A whole tensor as floats."""
        shape = self._table.tensors[tensor]
        if self._readers().dtype(tensor) == dtype:
            return CopiedRows(self._readers, tensor, shape[0], math.prod(shape[1:]), dtype)
        return TensorRows(self._readers, tensor, (0, shape[0]), math.prod(shape[1:]), dtype)

    def _hint(self, scales: str) -> Hint | None:
        if scales not in self._template.passthrough:
            return None
        folder, place = self._template.passthrough[scales]
        return Hint(folder, place.file, place.offset, place.shape)


def _power_of_two(config: Mapping[str, Any]) -> bool:
    text = text_config(config, architecture_of(config))
    declared = config.get("quantization_config") or text.get("quantization_config") or {}
    return declared.get("scale_fmt") == "ue8m0"


def _new_layout(
    template: Template, readers: PerThread[CheckpointReader], dtype: str
) -> tuple[list[OutputFile], dict[str, bytes]]:
    """Weights in one dtype, or in FP8 and BF16, passthrough tensors unchanged, in files of at most ``SHARD_BYTES``."""
    contents = _TemplateContents(template, readers)
    table = template.model.table
    quantised, dtype = (fp8_tensors(table), "BF16") if dtype == FP8 else ((), dtype)
    types = dict.fromkeys(table.tensors, dtype) | _kept_types(template)
    tensors: dict[str, tuple[str, tuple[int, ...], Content]] = {
        name: (types[name], shape, contents.rows(name, types[name])) for name, shape in table.tensors.items()
    }
    for name in quantised:
        tensors |= _fp8_parts(readers, name, table.tensors[name])
    stored_copies = (name for name in table.repeated if name in template.model.stored)
    tensors |= {
        name: (dtype, table.tensors[table.repeated[name]], contents.rows(table.repeated[name], dtype))
        for name in stored_copies
    }
    for name in template.model.passthrough:
        stored = template.model.stored[name]
        tensors[name] = (stored.dtype, stored.shape, contents.get(name, stored))
    groups: list[list[str]] = [[]]
    size = 0
    for name, (_, _, content) in tensors.items():
        if groups[-1] and size + content.nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += content.nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    files = [_plain_file(name, group, tensors) for name, group in zip(names, groups, strict=True)]
    if count == 1:
        return files, {}
    weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    total = sum(content.nbytes for _, _, content in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files, {INDEX: (json.dumps(index, indent=2) + "\n").encode()}


def _fp8_parts(
    readers: PerThread[CheckpointReader], tensor: str, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...], Content]]:
    """Stored name → dtype, shape and content of the codes and the scales of a tensor quantised anew."""
    weights = Fp8Weights(readers, tensor, shape, None, power_of_two=False)
    scales = tensor.removesuffix(".weight") + ".weight_scale_inv"
    return {
        tensor: ("F8_E4M3", shape, Fp8Codes(weights)),
        scales: ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), Fp8Scales(weights)),
    }


def _kept_types(template: Template) -> dict[str, str]:
    """Tensors that keep the template's dtype: a router bias of another precision would select other experts."""
    kept = {p.tensor for matrix in template.model.table.matrices() if matrix.rule.float32 for p in matrix.pieces}
    encodings = ((name, template.model.encodings.get(name)) for name in kept if name is not None)
    return {name: e.stored.dtype if isinstance(e, Plain) else "F32" for name, e in encodings}


def _plain_file(name: str, group: list[str], tensors: Mapping[str, tuple[str, tuple[int, ...], Content]]) -> OutputFile:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    # Wide dtypes first, so that every tensor is aligned to its dtype.
    ordered = sorted(group, key=lambda n: -ITEM_BYTES[tensors[n][0]])
    for tensor in ordered:
        dtype, shape, content = tensors[tensor]
        entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + content.nbytes]}
        at += content.nbytes
    file = OutputFile(name)
    file.append(Bytes(safetensors_header(entries)))
    for tensor in ordered:
        file.append(tensors[tensor][2])
    return file


def _plain_config(template: Template, dtype: str) -> bytes:
    """``config.json`` for unquantised weights of one dtype, or for FP8 and BF16."""
    config, quantised = json.loads(template.companions[MARKER]), dtype == FP8
    dtype = "BF16" if quantised else dtype
    text = architecture_of(config).text
    drop_quantization(config)
    for part in (config, config[text] if text else {}):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = DTYPE_NAMES[dtype]
    if "dtype" not in config and "torch_dtype" not in config:
        config["torch_dtype"] = DTYPE_NAMES[dtype]
    if quantised:
        config["quantization_config"] = declare_fp8(template.model, fp8_tensors(template.model.table))
    return (json.dumps(config, indent=2) + "\n").encode()
