"""Models in block FP8: which tensors are quantised, how ``config.json`` declares it, and a folder as if it were so.

The form is that of DeepSeek's and Qwen's releases, which vLLM loads: E4M3 codes ``weight`` and one float32 scale per
128×128 block, ``weight_scale_inv``. Conversion and weight sync both take it from here. numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_fleet.weights.hf_folder import StoredTensor
from megatron_fleet.weights.hf_model import BLOCK, Encoding, Fp8, HfModel
from megatron_fleet.weights.mapping import Matrix, WeightTable

LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight(\.|$)")
"""Megatron's names of the layers that Transformer Engine computes in FP8. Embedding, head, router, the experts' gate,
norms, convolutions and the projection of a prediction layer are not among them."""
LAST_OF_FUSED = "linear_kv_down_proj.weight"
"""The matrix whose rows need not fill whole blocks: no rank has a part of it, and where vLLM joins it with another, it
comes last (576 rows in DeepSeek-V3, quantised in its release)."""
_GEMM = 16
_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")


def fp8_tensors(table: WeightTable, bf16_first: int = 0, bf16_last: int = 0) -> tuple[str, ...]:
    """Return the HF tensors of a model that block FP8 quantises, in checkpoint order.

    A tensor whose sides are not multiples of 128 stays as it is, and so do those that engines join with it: queries,
    keys and values, or gate and up.

    Args:
        bf16_first, bf16_last: number of first and last layers that stay in BF16.
    """
    found: dict[str, bool] = {}
    for matrix in table.matrices():
        if not LINEAR.search(matrix.rule.key) or len(matrix.shape) != 2:
            continue
        number = _NUMBER.match(matrix.key)
        inside = number is None or bf16_first <= int(number[1]) < table.model.layers - bf16_last
        fits = inside and _fits(matrix, table)
        for piece in matrix.pieces:
            if piece.tensor is not None:
                found[piece.tensor] = found.get(piece.tensor, True) and fits
    return tuple(name for name in table.tensors if found.get(name))


def _fits(matrix: Matrix, table: WeightTable) -> bool:
    unit = _GEMM if matrix.rule.key.endswith(LAST_OF_FUSED) else BLOCK
    rows = [matrix.shape[0], *(table.tensors[piece.tensor][0] for piece in matrix.pieces if piece.tensor is not None)]
    return matrix.shape[1] % BLOCK == 0 and all(n % unit == 0 for n in rows)


def declare_fp8(model: HfModel, tensors: Collection[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a folder of which ``tensors`` are quantised, as in the releases."""
    shapes = {name: stored.shape for name, stored in model.stored.items()} | model.table.tensors
    shapes |= {name: model.table.tensors[original] for name, original in model.table.repeated.items()}
    plain = {name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1} - set(tensors)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in plain),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def declared_tensors(table: WeightTable, declared: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tensors that are quantised under a declaration of `declare_fp8`."""
    plain = set(declared["modules_to_not_convert"])
    return tuple(name for name in fp8_tensors(table) if name.removesuffix(".weight") not in plain)


def as_fp8(model: HfModel, tensors: Collection[str]) -> HfModel:
    """Return an unquantised folder's model as if ``tensors`` were stored in FP8, without files (``file`` is empty)."""
    stored, encodings = dict(model.stored), dict(model.encodings)
    for name, parts in _parts(model.table, tensors):
        stored.pop(name, None)
        encodings[name] = Fp8(*parts.values())
        stored |= parts
    return replace(model, stored=stored, encodings=encodings)


def _parts(table: WeightTable, tensors: Collection[str]) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    for name in tensors:
        rows, cols = table.tensors[name]
        blocks = -(-rows // BLOCK), -(-cols // BLOCK)
        scales = name.removesuffix(".weight") + ".weight_scale_inv"
        yield (
            name,
            {name: StoredTensor("", "F8_E4M3", (rows, cols), 0), scales: StoredTensor("", "F32", blocks, 0)},
        )


def is_written(encoding: Encoding) -> bool:
    """Whether an encoding's parts are in files, and not only declared by `as_fp8`."""
    return all(part.file for part in encoding.parts)
