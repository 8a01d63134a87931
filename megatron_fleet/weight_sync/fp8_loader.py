"""vLLM's loader of an unquantised folder into an engine in FP8. Importing this module registers it with vLLM.

The engine then starts with the codes and scales that the trainer would send for the same weights, and that a conversion
would write. vLLM's own online quantisation takes BF16 alone, in every update.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from megatron_fleet.weight_sync.engine_model import FP8_FORMAT

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@register_model_loader(FP8_FORMAT)
class Fp8Loader(DefaultModelLoader):
    """Quantises each weight on the engine's device as it is read."""

    def download_model(self, model_config: ModelConfig) -> None:
        """No-op: the folder is local."""

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield (name, tensor) of every tensor that the engine holds.

        Raises:
            UserError: a weight is NaN or infinite.
        """
        # Quantisation imports numba; vLLM 0.32 on CPU cannot replace its Triton kernels in a process that has it, and
        # does so after this module is imported, before it loads weights.
        from megatron_fleet.weight_sync.engine_format import EngineFormat
        from megatron_fleet.weight_sync.reloading import declared_fp8, passthrough_tensors
        from megatron_fleet.weights.fp8_model import as_fp8, declared_tensors
        from megatron_fleet.weights.hf_model import open_model
        from megatron_fleet.weights.hf_rows import HfReader

        plain, declared = open_model(model_config.model, prediction=False), declared_fp8(model_config)
        assert declared is not None, f"load_format={FP8_FORMAT} goes with a declaration"
        form = EngineFormat(as_fp8(plain, declared_tensors(plain.table, declared)))
        reader, device = HfReader(plain), next(model.parameters()).device
        for name, shape in plain.table.tensors.items():
            values = torch.from_numpy(np.array(reader.read_rows(name, (0, shape[0]))))
            values = values.view(_TORCH[reader.dtype(name)]).view(shape).to(device)
            yield from zip(form.names(name), form.encode(name, values), strict=True)
        yield from passthrough_tensors(open_model(model_config.model))
