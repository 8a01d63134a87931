"""Weights in the form engines load: the tensors their HF folder stores, quantised where the folder has them quantised.

Codes and scales match a conversion to the same folder bit for bit: CPU tensors use the same code, other devices its
port (``quant/torch_ops.py``). The folder's headers determine what is quantised, and its scales are the hints; engines
in FP8 that start from an unquantised folder take it as `weights.fp8_model.as_fp8` describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import architecture_of, text_config
from megatron_fleet.weights.fp8_model import is_written
from megatron_fleet.weights.hf_folder import StoredTensor
from megatron_fleet.weights.hf_model import BLOCK, Fp8, HfModel, Int4, Plain
from megatron_fleet.weights.hf_rows import Fp8Weights, Hint, Int4Weights, PerThread, RowReader
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.quant import fp8, int4, torch_ops
from megatron_fleet.weights.source import ParamMeta, Place

SLICE_VALUES = 64 << 20
"""Values quantised at once; temporaries take several bytes per value."""
_TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class WeightSource(Protocol):
    """The trainer's weights as whole HF tensors, such as a `MegatronWeightSource`."""

    @property
    def place(self) -> Place: ...

    def metadata(self) -> list[ParamMeta]:
        """Metadata of the whole model on every rank, in iteration order."""
        ...

    def groups(self) -> list[list[str]]:
        """Names in iteration order, split where the layer changes."""
        ...

    def write_local(self, out: Mapping[str, torch.Tensor]) -> None:
        """Write the elements that this rank owns into whole tensors, cast to their dtype. No communication."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor); collective over ``place.model``, whose ranks iterate in lockstep."""
        ...


class EngineFormat:
    """Stored forms of one folder's tensors."""

    def __init__(self, model: HfModel | None = None) -> None:
        """Args: ``model``: the folder that engines start from, as they hold it; ``None``: nothing is quantised."""
        self._encodings: dict[str, Fp8 | Int4] = {}
        self._power_of_two = False
        if model is not None:
            self._folder = model.folder
            self._names = {id(stored): name for name, stored in model.stored.items()}
            self._encodings = {n: e for n, e in model.encodings.items() if not isinstance(e, Plain)}
            self._power_of_two = _power_of_two(model.config)

    def is_quantised(self, tensor: str) -> bool:
        return tensor in self._encodings

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

    def encode(self, tensor: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Encode a tensor as its ``parts``, on its device.

        Args:
            values: the whole tensor, of any float dtype.

        Raises:
            UserError: the tensor is stored quantised and contains NaN or infinity.
        """
        encoding = self._encodings.get(tensor)
        if encoding is None:
            return [values]
        values = values.to(torch.bfloat16)
        step = max(1, SLICE_VALUES // values.shape[1] // BLOCK) * BLOCK
        slices = [(row, min(row + step, len(values))) for row in range(0, len(values), step)]
        if isinstance(encoding, Fp8):
            encode = self._fp8 if values.device.type == "cpu" else self._fp8_torch
            coded = [encode(tensor, encoding, values, rows) for rows in slices]
        else:
            encode_int4 = self._int4 if values.device.type == "cpu" else self._int4_torch
            coded = [encode_int4(tensor, encoding, values, rows) for rows in slices]
        parts = [torch.cat(part) for part in zip(*coded, strict=True)]
        if isinstance(encoding, Int4):
            parts.append(torch.tensor(values.shape, dtype=_TORCH[encoding.shape.dtype], device=values.device))
        return parts

    def _hint(self, scales: StoredTensor) -> Hint:
        return Hint(self._folder, scales.file, scales.offset, scales.shape)

    def _fp8_hint(self, encoding: Fp8) -> Hint | None:
        return self._hint(encoding.scales) if is_written(encoding) else None

    def _fp8(self, tensor: str, encoding: Fp8, values: torch.Tensor, rows: Interval) -> tuple[torch.Tensor, ...]:
        readers: PerThread[RowReader] = PerThread(lambda: _Values(values))
        hint = self._fp8_hint(encoding)
        weights = Fp8Weights(readers, tensor, tuple(values.shape), hint, self._power_of_two)
        bits, scales = weights.quantise(_blocks(rows))
        codes = np.empty(bits.shape, np.uint8)
        fp8.quantize(bits, scales, codes)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)

    def _fp8_torch(self, tensor: str, encoding: Fp8, values: torch.Tensor, rows: Interval) -> tuple[torch.Tensor, ...]:
        part, hint = values[slice(*rows)], self._fp8_hint(encoding)
        if hint is None:
            scales = torch_ops.fp8_block_scales(part, power_of_two=self._power_of_two)
        else:
            kept = torch.from_numpy(hint.rows(_blocks(rows), np.float32)).to(values.device)
            scales, _ = torch_ops.fp8_choose_scales(part, kept, power_of_two=self._power_of_two)
        _check_finite(tensor, scales)
        return torch_ops.fp8_quantize(part, scales), scales

    def _int4(self, tensor: str, encoding: Int4, values: torch.Tensor, rows: Interval) -> tuple[torch.Tensor, ...]:
        readers: PerThread[RowReader] = PerThread(lambda: _Values(values))
        weights = Int4Weights(readers, tensor, tuple(values.shape), self._hint(encoding.scales))
        bits, scales = weights.quantise(rows)
        packed = np.empty((rows[1] - rows[0], values.shape[1] // int4.CODES_PER_WORD), np.int32)
        int4.quantize(bits, scales, packed)
        return torch.from_numpy(packed), torch.from_numpy(scales.view(np.int16)).view(torch.bfloat16)

    def _int4_torch(
        self, tensor: str, encoding: Int4, values: torch.Tensor, rows: Interval
    ) -> tuple[torch.Tensor, ...]:
        bits = self._hint(encoding.scales).rows(rows, np.int16)
        hint = torch.from_numpy(bits).view(torch.bfloat16).to(values.device)
        part = values[slice(*rows)]
        scales, exact = torch_ops.int4_choose_scales(part, hint)
        _check_finite(tensor, scales[~exact])
        return torch_ops.int4_quantize(part, scales), scales


class FormattedSource:
    """A source's tensors in the engine's stored form, with the two methods that vLLM's trainer engines call."""

    def __init__(self, source: WeightSource, form: EngineFormat) -> None:
        self._source, self._form = source, form
        self._parts = {meta.name: form.parts(meta) for meta in source.metadata()}

    def metadata(self) -> list[ParamMeta]:
        """Metadata of the parts of all tensors, in iteration order."""
        return [part for parts in self._parts.values() for part in parts]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every part; collective like the source's iteration."""
        for name, tensor in self._source:
            parts = self._form.encode(name, tensor)
            yield from zip((part.name for part in self._parts[name]), parts, strict=True)


class _Values:
    """`RowReader` over a BF16 tensor ``[rows, cols]`` in host memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self._bits = values.contiguous().view(torch.int16).numpy().view(np.uint16)

    def dtype(self, tensor: str) -> str:
        return "BF16"

    def read_rows(self, tensor: str, rows: Interval) -> npt.NDArray[Any]:
        return self._bits[slice(*rows)]


def _blocks(rows: Interval) -> Interval:
    return rows[0] // BLOCK, -(-rows[1] // BLOCK)


def _check_finite(tensor: str, scales: torch.Tensor) -> None:
    if not scales.isfinite().all():
        raise UserError(f"{tensor}: holds NaN or infinity, which no quantised form has; was the training run healthy?")


def _power_of_two(config: Mapping[str, Any]) -> bool:
    """Whether the folder's FP8 scales are powers of two."""
    text = text_config(config, architecture_of(config))
    declared = config.get("quantization_config") or text.get("quantization_config") or {}
    return declared.get("scale_fmt") == "ue8m0"
