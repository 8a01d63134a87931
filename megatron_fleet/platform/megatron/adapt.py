"""Adaptation of Megatron-Core to hosts without CUDA or Transformer Engine, with the process-wide ``torch`` unchanged.

Megatron-Core names CUDA directly (``torch.cuda.current_device()``, ``device="cuda"``, ``param.type()``). An import hook
gives every ``megatron.core`` module its own ``torch``: a copy whose ``cuda`` answers for the CPU and whose factories
put CUDA tensors on the CPU. Other libraries of the process keep the real ``torch``. Where Megatron calls a *method* of
a tensor (``.cuda()``, ``.type()``) the surrounding function runs under `cuda_calls_answered`. Where CUDA exists but
Transformer Engine does not, only the optimizer, latent attention and experts are adapted. Some bugs of Megatron-Core
are fixed everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_fleet.platform.megatron import patches, rotary

_PACKAGE = "megatron.core"
_FACTORIES = (
    *("arange", "as_tensor", "eye", "linspace", "randint", "randperm", "tensor"),
    *("empty", "full", "ones", "rand", "randn", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)


class _Stream:
    """Stream or event of a device that computes in order: waiting is a no-op."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _ignore(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _ignore

    def record_event(self, *_: Any) -> _Stream:
        return self


def _on_cpu(device: Any) -> Any:
    """Replace a CUDA device (an integer is a CUDA ordinal) by the CPU; return anything else unchanged."""
    if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
        return torch.device("cpu")
    return device


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _cuda_for_cpu() -> types.ModuleType:
    """Stand-in for ``torch.cuda``."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update({k: v for k, v in torch.cuda.__dict__.items() if not k.startswith("__")})
    cuda.__dict__.update(
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda *_: _Stream(),
        Stream=_Stream,
        Event=_Stream,
        stream=lambda *_: contextlib.nullcontext(),
        synchronize=nothing,
        empty_cache=nothing,
        set_device=nothing,
        nvtx=types.SimpleNamespace(range_push=nothing, range_pop=nothing),
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        is_current_stream_capturing=lambda: False,
    )
    return cuda


def _torch_for_megatron() -> types.ModuleType:
    """The ``torch`` that ``megatron.core`` modules see."""

    class Torch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    proxy = Torch("torch")
    proxy.__dict__.update({k: v for k, v in torch.__dict__.items() if not k.startswith("__")})
    proxy.__dict__.update({name: _factory(getattr(torch, name)) for name in _FACTORIES})
    proxy.__dict__["cuda"] = _cuda_for_cpu()
    return proxy


class _CudaCalls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cuda_calls_answered() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``tensor.cuda()`` returns the tensor itself and ``tensor.type()`` names a CUDA type. No-op with CUDA."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaCalls()


def _answered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with cuda_calls_answered():
            return function(*args, **kwargs)

    return call


def _patch_jit(module: Any) -> None:
    # Megatron's fused element-wise helpers would be compiled one by one on first use: seconds, for no gain on CPU.
    module.jit_fuser = lambda function: function


def _patch_random(module: Any) -> None:
    patches.patch_checkpoint(module)
    # Megatron binds it at import time from torch.cuda's internals.
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_optimizer_package(module: Any) -> None:
    from megatron_fleet.platform.megatron.adam import FusedAdam

    # Distributed-optimizer checkpoints need the fused optimizer's state layout (step in the group, two moments).
    module.Adam, module.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    module.is_te_min_version = _no_engine


def _no_engine(*_: Any, **__: Any) -> bool:
    """Return False for Megatron's checks of Transformer Engine's version: there is none to compare with."""
    return False


def _patch_optimizer_config(module: Any) -> None:
    module.is_te_min_version = _no_engine
    check = module.OptimizerConfig.__post_init__

    def post_init(self: Any) -> None:
        # The last check is for Transformer Engine's optimizer; ours has the attributes that it looks for.
        with contextlib.suppress(RuntimeError):
            check(self)

    module.OptimizerConfig.__post_init__ = post_init


def _patch_distributed_optimizer(module: Any) -> None:
    patches.patch_distributed_optimizer(module)
    from megatron_fleet.platform.megatron.adam import FusedAdam

    module.Adam, module.HAVE_APEX_OR_TE, module.USING_TE_OPTIMIZER = FusedAdam, True, True
    optimizer = module.DistributedOptimizer
    optimizer.__init__ = _answered(optimizer.__init__)


def _patch_optimizer(module: Any) -> None:
    mixed = module.Float16OptimizerWithFloat16Params
    mixed.__init__ = _answered(mixed.__init__)


def _patch_clip(module: Any) -> None:
    module.clip_grad_by_total_norm_fp32 = _answered(module.clip_grad_by_total_norm_fp32)


def _patch_language_module(module: Any) -> None:
    cls = module.LanguageModule
    cls.setup_embeddings_and_output_layer = _answered(cls.setup_embeddings_and_output_layer)


def _patch_rotary(module: Any) -> None:
    rotary.patch_packed_rotary(module)
    module.get_pos_emb_on_this_cp_rank = _answered(module.get_pos_emb_on_this_cp_rank)


_EVERYWHERE: dict[str, Callable[[Any], None]] = {
    "megatron.core.models.common.embeddings.rope_utils": rotary.patch_packed_rotary,
    "megatron.core.optimizer.distrib_optimizer": patches.patch_distributed_optimizer,
    "megatron.core.transformer.moe.router": patches.patch_router,
    "megatron.core.transformer.transformer_block": patches.patch_transformer_block,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": patches.patch_hybrid_optimizer,
}
_WITH_TRANSFORMER_ENGINE: dict[str, Callable[[Any], None]] = {
    **_EVERYWHERE,
    "megatron.core.extensions.transformer_engine": patches.patch_delayed_scaling,
}
_OPTIMIZER: dict[str, Callable[[Any], None]] = {
    "megatron.core.optimizer": _patch_optimizer_package,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
    "megatron.core.optimizer.optimizer_config": _patch_optimizer_config,
}
_WITHOUT_TRANSFORMER_ENGINE: dict[str, Callable[[Any], None]] = {
    **_EVERYWHERE,
    "megatron.core.tensor_parallel.random": patches.patch_checkpoint,
    "megatron.core.transformer.moe.moe_utils": patches.patch_moe_utils,
    "megatron.core.transformer.multi_latent_attention": patches.patch_latent_attention,
    "megatron.core.utils": patches.patch_utils,
}
_WITHOUT_CUDA: dict[str, Callable[[Any], None]] = {
    **_WITHOUT_TRANSFORMER_ENGINE,
    **_OPTIMIZER,
    "megatron.core.jit": _patch_jit,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.models.common.embeddings.rope_utils": _patch_rotary,
    "megatron.core.tensor_parallel.mappings": patches.patch_mappings,
    "megatron.core.transformer.moe.moe_utils": patches.patch_moe_utils_for_cpu,
    "megatron.core.optimizer.optimizer": _patch_optimizer,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": patches.patch_hybrid_optimizer_for_cpu,
    "megatron.core.optimizer.clip_grads": _patch_clip,
    "megatron.core.models.common.language_module.language_module": _patch_language_module,
}


def needed_patches() -> dict[str, Callable[[Any], None]]:
    """Module → its patch: all without CUDA, the replacements for Transformer Engine without that, else only bug fixes.

    Apex brings a fused optimizer too.
    """
    if not torch.cuda.is_available():
        return _WITHOUT_CUDA
    if importlib.util.find_spec("transformer_engine"):
        return _WITH_TRANSFORMER_ENGINE
    return _WITHOUT_TRANSFORMER_ENGINE | ({} if importlib.util.find_spec("apex") else _OPTIMIZER)


class _Loader(importlib.abc.Loader):
    """Loader that runs the module, then gives it the CPU's ``torch`` and its patch."""

    def __init__(self, inner: Any, proxy: types.ModuleType | None, patch: Callable[[Any], None]) -> None:
        self._inner, self._proxy, self._patch = inner, proxy, patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._inner.exec_module(module)
        if self._proxy is not None and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = self._proxy
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._proxy = None if torch.cuda.is_available() else _torch_for_megatron()
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._proxy, self._patches.get(fullname, lambda _: None))
        return spec


def install() -> None:
    """Make ``megatron.core`` importable and usable here; call before its first import. Idempotent.

    Raises:
        RuntimeError: ``megatron.core`` was imported before.
    """
    if any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError("megatron.core was imported before megatron_fleet.platform.megatron; import that first")
    sys.meta_path.insert(0, _Finder(needed_patches()))
