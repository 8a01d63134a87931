"""Weights in the form engines load: the tensors their HF folder stores, quantised where the folder has them quantised.

Codes and scales match a conversion to the same folder bit for bit: CPU tensors use the same code, other devices its
port (``quant/torch_ops.py``). The folder's headers determine what is quantised, and its scales are the hints; engines
in FP8 that start from an unquantised folder take it as `weights.fp8_model.as_fp8` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_fleet.models.hf_config import architecture_of, text_config
from megatron_fleet.weights.exchange import Box, ParamMeta
from megatron_fleet.weights.floats import cast, numpy_type
from megatron_fleet.weights.fp8_model import is_written
from megatron_fleet.weights.hf_model import BLOCK, GROUP, Fp8, HfModel, Int4, Plain
from megatron_fleet.weights.hf_rows import Hint, fp8_scales, int4_scales, not_finite
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.quant import fp8, int4, torch_ops

SLICE_VALUES = 64 << 20
"""Values quantised at once; temporaries take several bytes per value."""
_TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales."""
_Quantise = Callable[[str, torch.Tensor, npt.NDArray[Any] | None], _Coded]
"""Quantises BF16 values of some rows of the tensor of that name, with the folder's scales."""


class EngineFormat:
    """Stored forms of one folder's tensors, as `weights.exchange.Form`.

    The folder's scales of what this rank encodes are read once and stay in host memory: 2 bytes for 32 values of INT4,
    4 bytes for 16,384 of FP8, so 0.25 GB on each of 256 ranks for Kimi K2.
    """

    def __init__(self, model: HfModel | None = None) -> None:
        """Args: ``model``: the folder that engines start from, as they hold it; ``None``: nothing is quantised."""
        self._encodings: dict[str, Fp8 | Int4] = {}
        self._hints: dict[tuple[str, Box], npt.NDArray[Any]] = {}
        self._power_of_two = False
        if model is not None:
            self._folder = model.folder
            self._names = {id(stored): name for name, stored in model.stored.items()}
            self._encodings = {n: e for n, e in model.encodings.items() if not isinstance(e, Plain)}
            self._power_of_two = _power_of_two(model.config)

    def names(self, tensor: str) -> list[str]:
        """Names of a tensor's ``parts``."""
        encoding = self._encodings.get(tensor)
        return [tensor] if encoding is None else [self._names[id(part)] for part in encoding.parts]

    def parts(self, meta: ParamMeta) -> list[ParamMeta]:
        """The tensors that a tensor is sent as: codes and scales if it is stored so, otherwise the tensor itself.

        Experts that the folder stacks are sent one by one, which engines take too.
        """
        encoding = self._encodings.get(meta.name)
        if encoding is None:
            return [meta]
        parts = zip(self.names(meta.name), encoding.parts, strict=True)
        return [ParamMeta(name, _TORCH[part.dtype], part.shape) for name, part in parts]

    def boxes(self, tensor: str, box: Box) -> list[Box] | None:
        """See `Form.boxes`. The shape that INT4 stores belongs to every box."""
        encoding = self._encodings.get(tensor)
        if encoding is None:
            return [box]
        shape = _shape(encoding)
        rows, cols = box[0], box[1] or (0, shape[1])
        if isinstance(encoding, Fp8):
            row_blocks, col_blocks = _units(rows, shape[0], BLOCK), _units(cols, shape[1], BLOCK)
            return None if row_blocks is None or col_blocks is None else [box, (row_blocks, col_blocks)]
        groups, words = _units(cols, shape[1], GROUP), GROUP // int4.CODES_PER_WORD
        if groups is None:
            return None
        return [(rows, (groups[0] * words, groups[1] * words)), (rows, groups), ((0, len(shape)), None)]

    def encode(self, tensor: str, values: torch.Tensor, box: Box | None = None) -> list[torch.Tensor]:
        """Encode a tensor, or a box of it that has ``boxes``, as its ``parts``, on its device.

        Args:
            values: the values of the box, of any float dtype.
            box: ``None``: the whole tensor.

        Raises:
            UserError: the tensor is stored quantised and the values contain NaN or infinity.
        """
        encoding = self._encodings.get(tensor)
        if encoding is None:
            return [values]
        values = values.to(torch.bfloat16)
        hint = self._hint(tensor, encoding, box or ((0, len(values)), None))
        quantise, per_scale = self._quantiser(encoding, values.device)
        step = max(1, SLICE_VALUES // values.shape[1] // BLOCK) * BLOCK
        coded = []
        for row in range(0, len(values), step):
            part, first = values[row : row + step], row // per_scale
            near = None if hint is None else hint[first : first + -(-len(part) // per_scale)]
            coded.append(quantise(tensor, part, near))
        parts = [torch.cat(part) for part in zip(*coded, strict=True)]
        if isinstance(encoding, Int4):
            parts.append(torch.tensor(_shape(encoding), dtype=_TORCH[encoding.shape.dtype], device=values.device))
        return parts

    def _quantiser(self, encoding: Fp8 | Int4, device: torch.device) -> tuple[_Quantise, int]:
        """The function for some rows on a device, and the number of rows that share a scale."""
        if isinstance(encoding, Fp8):
            return (self._fp8 if device.type == "cpu" else self._fp8_torch), BLOCK
        return (self._int4 if device.type == "cpu" else self._int4_torch), 1

    def _hint(self, tensor: str, encoding: Fp8 | Int4, box: Box) -> npt.NDArray[Any] | None:
        """The folder's scales of a box; ``None``: it does not store the tensor quantised."""
        if not is_written(encoding):
            return None
        if (tensor, box) not in self._hints:
            boxes, scales = self.boxes(tensor, box), encoding.scales
            assert boxes is not None, f"{tensor}: {box} ends inside a block"
            rows, cols = boxes[1]
            hint = Hint(self._folder, scales.file, scales.offset, scales.shape).rows(rows, numpy_type(scales.dtype))
            self._hints[tensor, box] = hint if cols is None else np.ascontiguousarray(hint[:, slice(*cols)])
        return self._hints[tensor, box]

    def _fp8(self, tensor: str, values: torch.Tensor, hint: npt.NDArray[Any] | None) -> _Coded:
        weights, stored = _bits(values), self._encodings[tensor].scales.dtype
        scales = fp8_scales(tensor, weights, hint, self._power_of_two, stored)
        codes = np.empty(weights.shape, np.uint8)
        fp8.quantize(weights, scales, codes)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales).to(_TORCH[stored])

    def _fp8_torch(self, tensor: str, values: torch.Tensor, hint: npt.NDArray[Any] | None) -> _Coded:
        stored = self._encodings[tensor].scales.dtype
        if hint is None:
            scales = torch_ops.fp8_block_scales(values, power_of_two=self._power_of_two)
        else:
            kept = torch.from_numpy(cast(hint, stored, "F32")).to(values.device)
            scales, _ = torch_ops.fp8_choose_scales(values, kept, power_of_two=self._power_of_two)
        kept_scales = torch_ops.cast_up(scales, _TORCH[stored])
        scales = kept_scales.float()
        _check_finite(tensor, scales)
        return torch_ops.fp8_quantize(values, scales), kept_scales

    def _int4(self, tensor: str, values: torch.Tensor, hint: npt.NDArray[np.uint16] | None) -> _Coded:
        weights = _bits(values)
        scales = int4_scales(tensor, weights, hint)
        packed = np.empty((len(weights), weights.shape[1] // int4.CODES_PER_WORD), np.int32)
        int4.quantize(weights, scales, packed)
        return torch.from_numpy(packed), torch.from_numpy(scales.view(np.int16)).view(torch.bfloat16)

    def _int4_torch(self, tensor: str, values: torch.Tensor, hint: npt.NDArray[np.uint16] | None) -> _Coded:
        kept = None
        if hint is not None:
            kept = torch.from_numpy(hint.view(np.int16)).view(torch.bfloat16).to(values.device)
        scales, exact = torch_ops.int4_choose_scales(values, kept)
        _check_finite(tensor, scales[~exact])
        return torch_ops.int4_quantize(values, scales), scales


def _shape(encoding: Fp8 | Int4) -> tuple[int, int]:
    """Shape of the tensor."""
    rows, cols = encoding.parts[0].shape
    return rows, cols * (int4.CODES_PER_WORD if isinstance(encoding, Int4) else 1)


def _units(interval: Interval, size: int, unit: int) -> Interval | None:
    """The units, of which the last may be shorter, that an interval consists of; ``None``: it has a part of one."""
    first, last = interval
    if first % unit or (last % unit and last != size):
        return None
    return first // unit, -(-last // unit)


def _bits(values: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Bits of BF16 values in host memory."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def _check_finite(tensor: str, scales: torch.Tensor) -> None:
    if not scales.isfinite().all():
        raise not_finite(tensor)


def _power_of_two(config: Mapping[str, Any]) -> bool:
    """Whether the folder's FP8 scales are powers of two."""
    text = text_config(config, architecture_of(config))
    declared = config.get("quantization_config") or text.get("quantization_config") or {}
    return declared.get("scale_fmt") == "ue8m0"
