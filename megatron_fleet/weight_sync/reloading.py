"""Engine code shared by transports: loads whole tensors into vLLM's model. Runs in vLLM's workers only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_fleet.models.hf_config import is_quantized
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weight_sync.engine_model import open_engine_model
from megatron_fleet.weights.hf_folder import INDEX, SINGLE, read_config
from megatron_fleet.weights.hf_model import HfModel, open_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class ReloadingEngine(WeightTransferEngine[Any, Any]):
    """Loads buckets of tensors through vLLM's layerwise reload.

    No bucket is loaded before its integrity is verified. A failure leaves the model unusable, never mixed: vLLM then
    holds parameters without values until a new update begins.
    """

    _complete = False

    def start_weight_update(self) -> None:
        """Drop all values of the model; discards an interrupted update."""
        self._complete = False
        begin_reload(self)

    def load_buckets(self, buckets: Generator[NamedTensors]) -> None:
        """Load all buckets. Keep their memory valid until the update finishes: vLLM copies some layers only then."""
        with closing(buckets), disable_mtp_completeness_check():
            model = WithOwnExperts(self.model)
            for tensors in buckets:
                model.load_weights(tensors)
                if self.device.type == "cuda":
                    # Buckets may be allocated by another thread, on another stream, whose allocator reuses a freed
                    # bucket at once: before that the copies out of it, queued on this thread's stream, must be done.
                    torch.cuda.current_stream(self.device).synchronize()
        self._complete = True

    def finish_weight_update(self) -> None:
        """Finalise the layers. Raises RuntimeError unless all buckets of an update were loaded."""
        if not self._complete:
            raise RuntimeError("finish_weight_update without all tensors of an update")
        self._complete = False
        restore_passthrough(self)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_lm_heads(self.model)

    def shutdown(self) -> None:
        """Release the transport's resources."""


class WithOwnExperts:
    """A model that is given the tensors of all experts, and of which this device holds some experts only.

    vLLM 0.32 would skip the others itself, but only after it has compared the names of all experts with each of them,
    and its layerwise reload keeps what it skips in memory until the layer is complete.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        managers = [getattr(module, "expert_map_manager", None) for module in model.modules()]
        here = [manager for manager in managers if manager is not None]
        self._own: set[int] | None = None
        if here and not any(manager.moe_parallel_config.enable_eplb for manager in here):
            self._own = {expert for manager in here for expert in manager.get_local_expert_ids()}

    def load_weights(self, tensors: NamedTensors) -> None:
        """Load tensors as the model does, without those of experts that only other devices hold."""
        model: Any = self._model
        model.load_weights((name, tensor) for name, tensor in tensors if self._holds(name))

    def _holds(self, name: str) -> bool:
        expert = _EXPERT.search(name)
        return self._own is None or expert is None or int(expert[1]) in self._own


def begin_reload(engine: WeightTransferEngine) -> None:
    """Begin vLLM's layerwise reload from scratch, including layers that an earlier reload has partially loaded."""
    for module in engine.model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    if engine.device.type == "cpu":
        _forget_moe_kernels(engine.model)
    initialize_layerwise_reload(engine.model)


def check_names(engine: WeightTransferEngine, names: Collection[str]) -> None:
    """Raise ValueError if an update lacks a tensor of the folder that the engine started from.

    A layer that receives only some of its tensors would silently keep uninitialised memory.
    """
    folder = Path(engine.model_config.model)
    missing = _sent_names(folder, json.dumps(declared_fp8(engine.model_config))) - set(names)
    if missing:
        raise ValueError(f"the update lacks {len(missing)} tensors of {folder}, first {min(missing)!r}")


def declared_fp8(model_config: ModelConfig) -> dict[str, Any] | None:
    """Return the declaration with which an engine holds an unquantised folder in FP8, see `fp8_declaration`."""
    declared: dict[str, Any] | None = getattr(model_config.hf_config, "quantization_config", None)
    return None if declared is None or is_quantized(read_config(model_config.model)) else declared


def restore_passthrough(engine: WeightTransferEngine) -> None:
    """Reload the passthrough tensors, which the trainer does not hold, from the engine's own folder.

    Level-2 sleep drops all weights, and an update restores only the trained ones, so every update of an engine that can
    sleep restores the others. An engine that serves only the language model has none of them.
    """
    multimodal = engine.model_config.multimodal_config
    if not engine.model_config.enable_sleep_mode or multimodal is None or multimodal.language_model_only:
        return
    with disable_mtp_completeness_check():
        # With its MTP layers, which engines do not use, the model does not have them among these.
        engine.model.load_weights(passthrough_tensors(open_model(engine.model_config.model)))


def passthrough_tensors(model: HfModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every passthrough tensor of a local folder."""
    for file in sorted({model.stored[name].file for name in model.passthrough}):
        with safe_open(Path(model.folder.url) / file, framework="pt") as tensors:
            for name in model.passthrough:
                if model.stored[name].file == file:
                    yield name, tensors.get_tensor(name)


def _forget_moe_kernels(model: torch.nn.Module) -> None:
    """Remove the experts' kernels, so that vLLM packs the expert weights again.

    vLLM 0.32 on CPU skips the expert prepack if a kernel already exists, and leaves plain weights in packed storage
    (``unquantized_fused_moe_method._setup_kernel``).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_lm_heads(model: torch.nn.Module) -> None:
    """Pack the ``lm_head`` weights again, from the new embedding.

    vLLM 0.32 on CPU packs ``lm_head`` into a separate copy; a tied head is not loaded, so the copy would stay stale
    (``vocab_parallel_embedding.process_weights_after_loading``).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@lru_cache(maxsize=1)
def _sent_names(folder: Path, declared: str) -> frozenset[str]:
    """Names under which the tensors of the folder that the engine started from are sent, without MTP layers; empty if
    it holds no safetensors (dummy weights).

    Args:
        declared: `declared_fp8` as JSON.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return frozenset()
    model = open_engine_model(folder, json.loads(declared), prediction=False)
    form = EngineFormat(model)
    return frozenset(part for tensor in model.table.tensors for part in form.names(tensor))
