"""The model as engines hold it: their folder's, or an unquantised folder's in block FP8. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EngineConfig, ModelConfig, PrecisionConfig
from megatron_fleet.models.hf_config import is_quantized
from megatron_fleet.weights.fp8_model import as_fp8, declare_fp8, declared_tensors, fp8_tensors
from megatron_fleet.weights.hf_folder import read_config
from megatron_fleet.weights.hf_model import BLOCK, Fp8, HfModel, open_model
from megatron_fleet.weights.mapping import Matrix

FP8_FORMAT = "fleet_fp8"
"""vLLM's ``load_format`` for an unquantised folder and an engine in FP8."""
FP8_LOADER = "megatron_fleet.weight_sync.fp8_loader"
"""Module of the loader with that name."""

_WHOLE = re.compile(r"\.linear_(q|kv)_down_proj\.")
"""Matrices of which each device of an engine holds the whole, by Megatron's names."""
_BY_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.")
"""Matrices whose columns the devices of an engine share; of the others they share the rows."""


def fp8_declaration(model: ModelConfig, precision: PrecisionConfig, engine: EngineConfig) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of engines that hold an unquantised ``model.path`` in FP8.

    Layers that the trainer keeps in BF16 (`precision.bf16_layers_at_start`, …) stay so in the engines.

    Returns:
        ``None``: engines hold the weights as the folder stores them.

    Raises:
        UserError: the folder is not a model, or none of its layers can be quantised.
    """
    if not engine.fp8(precision.recipe) or is_quantized(read_config(model.folder)):
        return None
    opened = open_model(model.folder)
    tensors = fp8_tensors(opened.table, precision.bf16_layers_at_start, precision.bf16_layers_at_end)
    if not tensors:
        raise UserError(
            f"model.path={model.path}: no layer can be quantised in blocks of 128 x 128, since their sides are "
            f"not multiples of 128 or all layers stay in BF16; set rollout.engine.quantization=none."
        )
    return declare_fp8(opened, tensors)


def check_engine_fp8(model: ModelConfig, precision: PrecisionConfig, engine: EngineConfig) -> None:
    """Refuse engines in FP8 that vLLM could not build: each device's part of a quantised matrix has whole blocks.

    Raises:
        UserError: the first problem, with advice.
    """
    path, declared = model.folder, fp8_declaration(model, precision, engine)
    if declared is not None and engine.speculative.method == "mtp":
        raise UserError(
            f"rollout.engine.speculative.method=mtp with engines in FP8: model.path={path} has its prediction layers "
            f"in another type; name a folder in FP8 (mfleet convert to-hf --dtype fp8), or set "
            f"rollout.engine.quantization=none."
        )
    if engine.tensor_parallel == 1 or (declared is None and not is_quantized(read_config(path))):
        return
    opened = open_engine_model(path, declared)
    for matrix in opened.table.matrices():
        names = [piece.tensor for piece in matrix.pieces if piece.tensor is not None]
        if matrix.expert in (None, 0) and any(isinstance(opened.encodings[name], Fp8) for name in names):
            _check_split(engine, matrix, opened)


def _check_split(engine: EngineConfig, matrix: Matrix, model: HfModel) -> None:
    key = matrix.rule.key
    devices = 1 if engine.expert_parallel and matrix.expert is not None else engine.tensor_parallel
    if _WHOLE.search(key):
        return
    for name in dict.fromkeys(piece.tensor for piece in matrix.pieces if piece.tensor is not None):
        by_columns = _BY_COLUMNS.search(key) is not None
        part = model.table.tensors[name][1 if by_columns else 0] // devices
        if name.endswith((".k_proj.weight", ".v_proj.weight")):  # a device has one head at least
            part = max(part, model.table.model.head or 0)
        if part % BLOCK:
            raise UserError(
                f"rollout.engine.tensor_parallel={devices} with engines in FP8: a device would hold {part} "
                f"{'columns' if by_columns else 'rows'} of {name}, which blocks of {BLOCK} do not divide; lower "
                f"rollout.engine.tensor_parallel, or set rollout.engine.quantization=none."
            )


def open_engine_model(path: Path | str, declared: Mapping[str, Any] | None, *, prediction: bool = True) -> HfModel:
    """Open a folder as engines hold it.

    Args:
        declared: result of `fp8_declaration`.
        prediction: see `open_model`.

    Raises:
        UserError: the folder is not a model.
    """
    model = open_model(path, prediction=prediction)
    return model if declared is None else as_fp8(model, declared_tensors(model.table, declared))
