"""The part of an engine's half that transports share: whole tensors into vLLM's model, in vLLM's workers only."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_fleet.weights.hf_folder import INDEX, SINGLE
from megatron_fleet.weights.hf_model import open_model

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class ReloadingEngine(WeightTransferEngine[Any, Any]):
    """Loads buckets of tensors through vLLM's layerwise reload.

    Nothing of a bucket is loaded before it is known to be undamaged. Any failure leaves the model unusable, never
    mixed: vLLM then holds parameters without values, until a new update begins.
    """

    _complete = False

    def start_weight_update(self) -> None:
        """Take all values from the model; an update that was broken off is forgotten."""
        self._complete = False
        begin_reload(self)

    def load_buckets(self, buckets: Generator[NamedTensors]) -> None:
        """Load all buckets. Their memory must stay until the update is finished: vLLM copies some layers only then."""
        with closing(buckets), disable_mtp_completeness_check():
            for tensors in buckets:
                self.model.load_weights(tensors)
        self._complete = True

    def finish_weight_update(self) -> None:
        """Complete the layers. Raises RuntimeError when not all buckets of an update were loaded."""
        if not self._complete:
            raise RuntimeError("finish_weight_update without all tensors of an update")
        self._complete = False
        restore_passthrough(self)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_lm_heads(self.model)

    def shutdown(self) -> None:
        """Release what the transport holds."""


def begin_reload(engine: WeightTransferEngine) -> None:
    """Begin vLLM's layerwise reload, from the start also for layers of which an earlier one has loaded a part."""
    for module in engine.model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    if engine.device.type == "cpu":
        _forget_moe_kernels(engine.model)
    initialize_layerwise_reload(engine.model)


def check_names(engine: WeightTransferEngine, names: Collection[str]) -> None:
    """Raise ValueError when an update lacks a tensor of the folder that the engine started from.

    A layer that receives only some of its tensors would keep uninitialised memory without an error.
    """
    folder = Path(engine.model_config.model)
    missing = _checkpoint_names(folder) - set(names)
    if missing:
        raise ValueError(f"the update lacks {len(missing)} tensors of {folder}, first {min(missing)!r}")


def restore_passthrough(engine: WeightTransferEngine) -> None:
    """Load the tensors that the trainer does not hold from the engine's own folder, if sleep may have lost them.

    Sleep of level 2 drops all weights, and an update brings back the trained ones only; so each update of an engine
    that can sleep restores the others. An engine that serves the language model alone has none of them.
    """
    multimodal = engine.model_config.multimodal_config
    if not engine.model_config.enable_sleep_mode or multimodal is None or multimodal.language_model_only:
        return
    with disable_mtp_completeness_check():
        engine.model.load_weights(_passthrough_tensors(Path(engine.model_config.model)))


def _passthrough_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every passthrough tensor of a folder, prediction layers aside: engines do not use those."""
    model = open_model(folder)
    for file in sorted({model.stored[name].file for name in model.passthrough}):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in model.passthrough:
                if model.stored[name].file == file:
                    yield name, tensors.get_tensor(name)


def _forget_moe_kernels(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU skips the expert prepack when a kernel exists already, and leaves plain weights in packed
    storage (``unquantized_fused_moe_method._setup_kernel``). Without a kernel it packs again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_lm_heads(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU packs ``lm_head`` into a copy of its own; a tied head is not loaded, so the copy stays old
    (``vocab_parallel_embedding.process_weights_after_loading``). Packing again reads the new embedding."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _checkpoint_names(folder: Path) -> set[str]:
    """What the folder that the engine started from stores of its language model, prediction layers aside; nothing when
    it holds no safetensors (dummy weights)."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return set()
    model = open_model(folder, prediction=False)
    return {name for name in model.stored if name not in model.passthrough and name not in model.table.repeated}
