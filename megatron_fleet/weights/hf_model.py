"""An HF model folder matched against its weight table: the stored form of every tensor of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import QUANTIZATION, architecture_of, text_config
from megatron_fleet.storage.folder import Readable
from megatron_fleet.weights.floats import FLOATS
from megatron_fleet.weights.hf_folder import ITEM_BYTES, StoredTensor, as_folder, read_config, read_headers
from megatron_fleet.weights.mapping import StackedRows, WeightTable

_OTHER_RELEASE = "use the release in BF16, or one in FP8 with blocks of 128 x 128"
_METHODS = {
    "awq": "AWQ, 4-bit integers with zero points",
    "gptq": "GPTQ, integers of 2 to 8 bits",
    "gptq_marlin": "GPTQ, integers of 2 to 8 bits",
    "auto-round": "AutoRound, integers of 2 to 8 bits",
    "bitsandbytes": "bitsandbytes, NF4 or 8-bit integers",
    "mxfp4": "MXFP4, 4-bit floats in groups of 32",
    "modelopt": "NVIDIA ModelOpt, FP8 with one scale per tensor or NVFP4",
    "modelopt_fp4": "NVFP4, 4-bit floats in groups of 16",
    "fbgemm_fp8": "FBGEMM, FP8 with one scale per row",
    "quark": "AMD Quark, FP8 or MXFP4",
    "gguf": "GGUF, of llama.cpp",
}
"""``quant_method`` of ``config.json`` that is not supported → what it is."""
_FORMATS = {
    "float-quantized": "FP8 with one scale per tensor or row",
    "nvfp4-pack-quantized": "NVFP4, 4-bit floats in groups of 16",
    "mxfp4-pack-quantized": "MXFP4, 4-bit floats in groups of 32",
    "int-quantized": "8-bit integers",
    "naive-quantized": "unpacked codes",
    "marlin-24": "2:4 sparse integers",
}
"""``format`` of compressed-tensors that is not supported → what it is."""
_FORMS_BY_SUFFIX = {
    **dict.fromkeys((".qweight", ".qzeros", ".g_idx"), "AWQ or GPTQ"),
    **dict.fromkeys((".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".SCB"), "bitsandbytes"),
    **dict.fromkeys(("_proj_blocks", "_proj_scales"), "MXFP4"),
    ".weight_scale_2": "NVFP4",
}
"""Ends of the names that tensors of other quantised forms have."""
BLOCK = 128
"""Side length of the square block that shares one scale in FP8 checkpoints."""
GROUP = 32
"""Number of consecutive inputs that share one scale in INT4 checkpoints."""


@dataclass(frozen=True, slots=True)
class Plain:
    """An unquantised tensor, in one of ``FLOATS``.

    Attributes:
        stored: place of its values.
        stack: the stored tensor of which it is a part; ``None``: it is stored under its own name.
    """

    stored: StoredTensor
    stack: StoredTensor | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.stack or self.stored,)


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 codes ``[r, c]`` and scales ``[⌈r/128⌉, ⌈c/128⌉]`` in one of ``FLOATS``: value = float32(code × scale)."""

    codes: StoredTensor
    scales: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class Int4:
    """compressed-tensors ``pack-quantized``: I32 ``[r, c/8]``, eight codes + 8 each, and BF16 scales ``[r, c/32]``."""

    packed: StoredTensor
    scales: StoredTensor
    shape: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.packed, self.scales, self.shape)


Encoding = Plain | Fp8 | Int4


@dataclass(frozen=True, slots=True)
class HfModel:
    """A folder whose headers match its ``config.json``.

    Attributes:
        config: raw ``config.json``.
        stored: every tensor in the files.
        encodings: stored form of each tensor of ``table.tensors``.
        passthrough: names of stored tensors that Megatron does not hold, see `WeightTable.is_passthrough`.
    """

    folder: Readable
    config: dict[str, Any]
    table: WeightTable
    stored: Mapping[str, StoredTensor]
    encodings: Mapping[str, Encoding]
    passthrough: tuple[str, ...]


def open_model(hf_dir: Readable | Path | str, *, prediction: bool = True) -> HfModel:
    """Read config and headers, and check that the folder contains exactly the tensors of its model.

    MTP layers that ``config.json`` announces but that are completely missing from the files are not part of the model.

    Args:
        prediction: ``False``: MTP layers are never part of the model, and pass through.

    Raises:
        UserError: names file, tensor, expected and actual shape (or dtype) of the first mismatch.
    """
    folder = as_folder(hf_dir)
    config = read_config(folder)
    stored = read_headers(folder)
    check_quantization(folder, config, stored)
    return check_stored(folder, config, make_table(config, stored, prediction), stored)


def make_table(config: Mapping[str, Any], names: Iterable[str], prediction: bool = True) -> WeightTable:
    """Build the table of a model whose files have tensors of these names, see `open_model`."""
    table = WeightTable(config)
    if table.model.mtp and not (prediction and table.has_prediction(names)):
        return WeightTable(config, prediction=False)
    return table


def check_stored(
    folder: Readable, config: dict[str, Any], table: WeightTable, stored: Mapping[str, StoredTensor]
) -> HfModel:
    """Same as `open_model`, for headers that were already read."""
    where = folder.url
    encodings = {name: _encoding(where, name, table, stored) for name in table.tensors}
    used = {id(part) for encoding in encodings.values() for part in encoding.parts}
    passthrough = []
    for name, entry in stored.items():
        if id(entry) in used:
            continue
        if name in table.repeated:
            _expect(where, name, entry, table.tensors[table.repeated[name]], FLOATS)
        elif table.is_passthrough(name):
            passthrough.append(name)
        else:
            raise UserError(
                f"{where}/{entry.file}: tensor {name} is not part of the model that config.json describes; use the "
                f"config.json that belongs to the weights."
            )
    return HfModel(folder, config, table, stored, encodings, tuple(passthrough))


def _encoding(where: str, name: str, table: WeightTable, stored: Mapping[str, StoredTensor]) -> Encoding:
    """Stored form of a tensor, determined by the names of its parts, never by a list in ``config.json``."""
    shape, stack = table.tensors[name], table.stacked.get(name)
    if stack is not None and stack.tensor in stored:
        return _unstacked(where, name, shape, stack, stored)
    base = name.removesuffix(".weight")
    if f"{base}.weight_packed" in stored:
        packed, scales, declared = (
            _part(where, name, f"{base}.weight_{part}", stored) for part in ("packed", "scale", "shape")
        )
        if len(shape) != 2 or shape[1] % GROUP:
            raise UserError(
                f"{where}/{packed.file}: {name} has shape {list(shape)}, which INT4 groups of 32 do not divide; use "
                f"another release of the model."
            )
        _expect(where, f"{base}.weight_packed", packed, (shape[0], shape[1] // 8), ("I32",))
        _expect(where, f"{base}.weight_scale", scales, (shape[0], shape[1] // GROUP), ("BF16",))
        _expect(where, f"{base}.weight_shape", declared, (2,), ("I32", "I64"))
        if name in stored:
            raise UserError(
                f"{where}/{stored[name].file}: {name} is stored as a whole and as INT4; remove one of them."
            )
        return Int4(packed, scales, declared)
    found = _part(where, name, name, stored)
    if found.dtype == "F8_E4M3" and len(shape) == 2:
        scales = _part(where, name, f"{base}.weight_scale_inv", stored)
        _expect(where, name, found, shape, ("F8_E4M3",))
        blocks = tuple(math.ceil(n / BLOCK) for n in shape)
        _expect(where, f"{base}.weight_scale_inv", scales, blocks, FLOATS)
        return Fp8(found, scales)
    _expect(where, name, found, shape, FLOATS)
    return Plain(found)


def _unstacked(
    where: str, name: str, shape: tuple[int, ...], stack: StackedRows, stored: Mapping[str, StoredTensor]
) -> Plain:
    """A part of a tensor that stacks all experts."""
    whole = stored[stack.tensor]
    if name in stored:
        raise UserError(
            f"{where}/{stored[name].file}: {name} is stored as a whole and in {stack.tensor}; remove one of them."
        )
    _expect(where, stack.tensor, whole, stack.shape, FLOATS)
    row_bytes = math.prod(stack.shape[2:]) * ITEM_BYTES[whole.dtype]
    return Plain(StoredTensor(whole.file, whole.dtype, shape, whole.offset + stack.rows[0] * row_bytes), whole)


def _part(where: str, name: str, part: str, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    if part not in stored:
        of = "" if part == name else f" of {name}"
        raise UserError(f"{where}: tensor {part}{of} is missing; use the files that belong to config.json.")
    return stored[part]


def _expect(where: str, name: str, found: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if found.shape != shape:
        resized = name.endswith(("embed_tokens.weight", "lm_head.weight")) and found.shape[1:] == shape[1:]
        remedy = f", with vocab_size={found.shape[0]} if the embedding was resized" if resized else ""
        raise UserError(
            f"{where}/{found.file}: tensor {name} has shape {list(found.shape)}; config.json asks for {list(shape)}. "
            f"Use the config.json that belongs to the weights{remedy}."
        )
    if found.dtype not in dtypes:
        raise UserError(f"{where}/{found.file}: tensor {name} is stored as {found.dtype}; use {' or '.join(dtypes)}.")


def check_quantization(folder: Readable, config: dict[str, Any], tensors: Iterable[str]) -> None:
    """Reject quantised forms other than the two supported ones, whether config.json or names of tensors tell of them.

    Raises:
        UserError: naming the form.
    """
    for part in (config, text_config(config, architecture_of(config))):
        for name in QUANTIZATION:
            declared = part.get(name)
            if declared:
                _check_declared(f"{folder.url}/config.json: {name}", declared)
    ends = tuple(_FORMS_BY_SUFFIX)
    for tensor in tensors:
        if tensor.endswith(ends):
            form = next(form for end, form in _FORMS_BY_SUFFIX.items() if tensor.endswith(end))
            raise UserError(f"{folder.url}: tensor {tensor} belongs to weights quantised as {form}; {_OTHER_RELEASE}.")


def _check_declared(where: str, declared: Any) -> None:
    if not isinstance(declared, dict):
        raise UserError(f"{where} is not a JSON object; use the config.json that belongs to the weights.")
    method = declared.get("quant_method")
    kind = _FORMATS.get(str(declared.get("format"))) if method == "compressed-tensors" else _METHODS.get(str(method))
    if kind is not None:
        said = f"format={declared['format']!r}" if method == "compressed-tensors" else f"quant_method={method!r}"
        raise UserError(
            f"{where}.{said} ({kind}) is not supported, only FP8 in blocks of {BLOCK} x {BLOCK} and INT4 in groups of "
            f"{GROUP}; {_OTHER_RELEASE}."
        )
    if method == "fp8":
        if declared.get("weight_block_size") != [BLOCK, BLOCK]:
            raise UserError(
                f"{where}.weight_block_size={declared.get('weight_block_size')} is not supported, only "
                f"{[BLOCK, BLOCK]}; use another release of the model."
            )
    elif method == "compressed-tensors":
        groups = declared.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise UserError(
                f"{where}.config_groups is not a JSON object; use the config.json that belongs to the weights."
            )
        wanted = {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True}
        for name, group in groups.items():
            weights = group.get("weights")
            weights = weights if isinstance(weights, dict) else {}
            wrong = [key for key, value in wanted.items() if weights.get(key) != value]
            if wrong:
                raise UserError(
                    f"{where}.config_groups.{name}.weights.{wrong[0]}={weights.get(wrong[0])!r} is not supported, only "
                    f"{wanted[wrong[0]]!r}; use another release of the model."
                )
    else:
        raise UserError(
            f"{where}.quant_method={method!r} is not supported, only 'fp8' and 'compressed-tensors'; use another "
            f"release of the model."
        )
