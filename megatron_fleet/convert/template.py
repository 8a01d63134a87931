"""Template for an exact conversion back to HF: the layout of an HF folder's files, and the data Megatron does not hold.

A converted checkpoint stores it next to its weights in ``hf/``: config, tokenizer and so on; the header of every
safetensors file; and the bytes of tensors that Megatron does not hold: vision towers, stale buffers, and the scales of
quantised weights. An HF folder itself can also serve as a template.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.content import FileRange
from megatron_fleet.convert.plan import Bytes, OutputFile
from megatron_fleet.storage.folder import Readable
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.floats import cast, numpy_type
from megatron_fleet.weights.hf_folder import (
    INDEX,
    StoredTensor,
    as_folder,
    companions,
    parse_header,
    read_config,
    read_header,
    read_header_bytes,
    safetensors_header,
)
from megatron_fleet.weights.hf_model import (
    Fp8,
    HfModel,
    Int4,
    check_quantization,
    check_stored,
    make_table,
    open_model,
)
from megatron_fleet.weights.hf_rows import Hint
from megatron_fleet.weights.mapping import Interval

KEPT = "hf/"
"""Location of the template in a converted checkpoint."""
LAYOUT = "safetensors_layout.json"
PASSTHROUGH_BYTES = 4 << 30
"""Maximum size of a file of passthrough tensors."""


@dataclass(frozen=True, slots=True)
class Template:
    """Layout and non-Megatron content of an HF folder.

    Attributes:
        model: tensors as declared by the headers; the data need not exist.
        headers: file → length and JSON of its header, i.e. the bytes before the data.
        passthrough: tensor → folder and location of its bytes. Includes the original values of tensors that Megatron
            holds with an offset, which its float32 values may not give back.
        companions: small files by name, including the index.
    """

    model: HfModel
    headers: Mapping[str, bytes]
    passthrough: Mapping[str, tuple[Readable, StoredTensor]]
    companions: Mapping[str, bytes]


def open_template(place: Readable | Path | str, *, prediction: bool = True) -> Template:
    """Open an HF folder, a converted checkpoint or its ``hf/`` as a template.

    Args:
        prediction: whether the checkpoint has the model's MTP layers; if not, the template's pass through.

    Raises:
        UserError: it is neither.
    """
    folder = as_folder(place)
    sizes = folder.sizes()
    if LAYOUT in sizes:
        return _open_layout(folder, sizes, prediction)
    if KEPT + LAYOUT in sizes:
        return open_template(open_folder(f"{folder.url.rstrip('/')}/{KEPT}"), prediction=prediction)
    return template_of(open_model(folder, prediction=prediction))


def template_of(model: HfModel) -> Template:
    """Template of an HF folder that is already open."""
    folder, sizes = model.folder, model.folder.sizes()
    files = sorted({stored.file for stored in model.stored.values()})
    headers = {name: read_header_bytes(folder, name, sizes[name]) for name in files}
    small = dict(companions(folder))
    if INDEX in sizes:
        small[INDEX] = folder.read(INDEX)
    passthrough = {name: (folder, model.stored[name]) for name in _not_in_megatron(model)}
    return Template(model, headers, passthrough, small)


def _open_layout(folder: Readable, sizes: Mapping[str, int], prediction: bool) -> Template:
    headers, files = _read_layout(folder)
    stored = {name: entry for file, header in headers.items() for name, entry in parse_header(file, header).items()}
    passthrough: dict[str, tuple[Readable, StoredTensor]] = {}
    for name in files:
        if name not in sizes:
            raise UserError(f"{folder.url}/{name}: missing although {LAYOUT} lists it; copy the checkpoint again.")
        for tensor, entry in read_header(folder, name, sizes[name]).items():
            whole = stored.get(tensor)
            if whole is None or (whole.dtype, whole.shape) != (entry.dtype, entry.shape):
                raise UserError(
                    f"{folder.url}/{name}: tensor {tensor} is not as {LAYOUT} declares it; copy the checkpoint again."
                )
            passthrough[tensor] = folder, entry
    config = read_config(folder)
    check_quantization(folder, config, stored)
    model = check_stored(folder, config, make_table(config, stored, prediction), stored)
    skip = {LAYOUT, *files}
    small = {name: folder.read(name) for name in sizes if name not in skip and "/" not in name}
    return Template(model, headers, passthrough, small)


def _read_layout(folder: Readable) -> tuple[dict[str, bytes], list[str]]:
    """Headers by file, and the passthrough files."""
    try:
        layout = json.loads(folder.read(LAYOUT))
        headers = {name: base64.b64decode(text, validate=True) for name, text in layout["headers"].items()}
        for name, header in headers.items():
            parse_header(name, header)
        files = list(layout["passthrough"])
        for name in (*headers, *files):
            if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
                raise ValueError(f"{name!r:.100} is not a safetensors file of a folder")
        return headers, files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{folder.url}/{LAYOUT}: malformed ({e}); copy the checkpoint again.") from None


def originals(template: Template) -> dict[str, Callable[[Interval], npt.NDArray[np.float32]]]:
    """Readers of the original values of the tensors that Megatron holds with an offset."""

    def read(tensor: str, rows: Interval) -> npt.NDArray[np.float32]:
        folder, stored = template.passthrough[tensor]
        values = Hint(folder, stored.file, stored.offset, stored.shape).rows(rows, numpy_type(stored.dtype))
        return cast(values, stored.dtype, "F32")

    kept = template.model.table.offsets.keys() & template.passthrough.keys()
    return {tensor: partial(read, tensor) for tensor in kept}


def _not_in_megatron(model: HfModel) -> list[str]:
    """Passthrough tensors, the scales of quantised ones, and those that Megatron holds with an offset."""
    names = {id(stored): name for name, stored in model.stored.items()}
    scales = [
        names[id(part)]
        for encoding in model.encodings.values()
        if isinstance(encoding, Fp8 | Int4)
        for part in encoding.parts[1:]
    ]
    return [*model.passthrough, *scales, *model.table.offsets]


def plan_template(model: HfModel) -> tuple[list[OutputFile], dict[str, bytes]]:
    """Large and small files of ``hf/`` for a folder."""
    template = template_of(model)
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(
        template.passthrough, key=lambda n: (template.passthrough[n][1].file, template.passthrough[n][1].offset)
    ):
        nbytes = template.passthrough[name][1].nbytes
        if groups[-1] and size + nbytes > PASSTHROUGH_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    files = [
        _passthrough_file(f"passthrough-{k:05d}.safetensors", names, template)
        for k, names in enumerate(groups, 1)
        if names
    ]
    layout = {
        "headers": {name: base64.b64encode(data).decode() for name, data in template.headers.items()},
        "passthrough": [file.name for file in files],
    }
    return files, {**template.companions, LAYOUT: json.dumps(layout).encode()}


def _passthrough_file(name: str, tensors: list[str], template: Template) -> OutputFile:
    entries: dict[str, Any] = {}
    at = 0
    for tensor in tensors:
        _, stored = template.passthrough[tensor]
        span = [at, at + stored.nbytes]
        entries[tensor] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": span}
        at += stored.nbytes
    file = OutputFile(name)
    file.append(Bytes(safetensors_header(entries)))
    for tensor in tensors:
        folder, stored = template.passthrough[tensor]
        file.append(FileRange(folder, stored.file, stored.offset, stored.nbytes))
    return file
