"""Patches for Megatron's CPU-offloaded optimizer (``HybridDeviceOptimizer``), on all hosts and without CUDA.

Based on Megatron-Core 0.16.1 and 0.19.2, where the file is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SHARED = {"lr", "betas", "eps", "weight_decay", "bias_correction"}
"""Parameter-group settings that every Adam has; the others in this optimizer's groups describe its own execution."""


def patch_hybrid_optimizer(module: Any) -> None:
    """Make its checkpoints interchangeable with other optimizers', and keep counting steps after one is loaded.

    Its parameter groups hold classes and offload settings, which another optimizer's lack. And a group's ``step``,
    which comes from a loaded checkpoint, would be passed unchanged to the device part before each step.
    """
    cls = module.HybridDeviceOptimizer
    state_dict, load_state_dict, step = cls.state_dict, cls.load_state_dict, cls.step

    def without_own_settings(self: Any) -> dict[str, Any]:
        found = state_dict(self)
        own = self.defaults.keys() - _SHARED
        groups = [{k: v for k, v in group.items() if k not in own} for group in found["param_groups"]]
        return {**found, "param_groups": groups}

    def with_own_settings(self: Any, loaded: dict[str, Any]) -> None:
        own = {k: v for k, v in self.defaults.items() if k not in _SHARED}
        load_state_dict(self, {**loaded, "param_groups": [{**group, **own} for group in loaded["param_groups"]]})

    def counted(self: Any, closure: Any = None) -> None:
        step(self, closure)
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1

    cls.state_dict, cls.load_state_dict, cls.step = without_own_settings, with_own_settings, counted


class _Host(TorchFunctionMode):
    """Mode in which tensors report a CUDA device, except copies made with ``.cpu()`` and tensors derived from them."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return id(args[0]) not in self._copies
        copied = func is torch.Tensor.cpu
        if copied:
            result = args[0].clone()
        elif func is torch.Tensor.pin_memory or (func is torch.Tensor.to and args[1:] == ("cuda",)):
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (copied or any(id(a) in self._copies for a in args)):
            self._copies[id(result)] = result
        return result


def _told_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Host():
            return function(*args, **kwargs)

    return call


def patch_hybrid_optimizer_for_cpu(module: Any) -> None:
    """Apply `patch_hybrid_optimizer`, and report tensors as CUDA's where it splits them between device and host."""
    patch_hybrid_optimizer(module)
    cls = module.HybridDeviceOptimizer
    for name in ("_get_sub_optimizer_param_groups", "_move_new_state_to_right_device"):
        setattr(cls, name, _told_apart(getattr(cls, name)))
