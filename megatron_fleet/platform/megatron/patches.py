"""Patches for latent attention, mixtures of experts and offloaded optimizers in Megatron-Core, and fixes of its bugs.

Each function takes the freshly imported module it is named after.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def patch_mappings(module: Any) -> None:
    """Support unequal parts in all-gather and reduce-scatter, for experts split over tensor-parallel ranks: gloo
    supports equal ones only.
    """
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, None, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    module._gather_along_first_dim = gather_along_first_dim
    module._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


class _KnownCount(TorchFunctionMode):
    """Mode in which ``masked_select`` finds a number of entries that the host knows, so that it does not wait for the
    device to learn it.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._found: tuple[Any, Any] = (None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.masked_select:
            return func(*args, **(kwargs or {}))
        values, mask = args
        if self._found[0] is not mask:
            self._found = mask, torch.nonzero_static(mask.reshape(-1), size=self._count)[:, 0]
        return values.reshape(-1).index_select(0, self._found[1])


def patch_moe_utils(module: Any) -> None:
    """Define the name that the router's matrix product uses, which is undefined without Transformer Engine, and sort
    tokens by expert without waiting for the device: each has as many copies as it has experts.
    """
    module.__dict__.setdefault("te_general_gemm", None)
    original: Callable[..., Any] = module.permute

    @functools.wraps(original)
    def permute(*args: Any, **kwargs: Any) -> Any:
        count = kwargs.get("num_out_tokens")
        if not isinstance(count, int) or kwargs.get("fused") or kwargs.get("drop_and_pad"):
            return original(*args, **kwargs)
        with _KnownCount(count):
            return original(*args, **kwargs)

    module.permute = permute


def patch_moe_utils_for_cpu(module: Any) -> None:
    """Apply `patch_moe_utils`, and convert split sizes to arrays even when they are on the CPU already."""
    patch_moe_utils(module)

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def patch_utils(module: Any) -> None:
    """Compute the norm of all gradients on the device; Megatron's own way for hosts without fused kernels reads the
    norm of each parameter's gradient back.
    """

    def local_multi_tensor_l2_norm(_: int, __: Any, tensor_lists: Sequence[Sequence[torch.Tensor]], *___: Any) -> Any:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        return torch.nn.utils.get_total_norm(tensors).reshape(1), None

    module.local_multi_tensor_l2_norm = local_multi_tensor_l2_norm


def patch_distributed_optimizer(module: Any) -> None:
    """Number the parameters of a group in the order in which the optimizer holds them.

    0.16 to 0.19 put a group's float32 parameters first, but number them as if they had not: with some layers in float32
    and the rest in bfloat16, one parameter's state would be saved as another's.
    """
    optimizer = module.DistributedOptimizer
    group_ranges: Callable[..., Any] = optimizer._build_optimizer_group_ranges.__func__

    def build_optimizer_group_ranges(cls: Any, *args: Any, **kwargs: Any) -> Any:
        places, ranges = group_ranges(cls, *args, **kwargs)
        for index, group in enumerate(ranges):
            group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            places |= {parameter: (index, order) for order, parameter in enumerate(group["params"])}
        return places, ranges

    optimizer._build_optimizer_group_ranges = classmethod(build_optimizer_group_ranges)


def patch_checkpoint(module: Any) -> None:
    """Disable the FP8 path of recomputing a norm or latent projection, which asks Transformer Engine for its state even
    without FP8.
    """
    original: Callable[..., None] = module.CheckpointWithoutOutput.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    module.CheckpointWithoutOutput.__init__ = init


def patch_router(module: Any) -> None:
    """Apply a padding mask ``[T]`` to the rows of the routing map ``[T, E]``; 0.16 and 0.19 would broadcast it over
    experts.
    """
    original: Callable[..., None] = module.TopKRouter._apply_expert_bias

    def apply_expert_bias(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        original(self, routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

    module.TopKRouter._apply_expert_bias = apply_expert_bias


def patch_transformer_block(module: Any) -> None:
    """Pass the padding mask to all layers where only some are recomputed: 0.16 leaves it out for the others, whose
    routers then count padding as load of their experts.
    """
    original: Callable[..., torch.Tensor] | None = getattr(module.TransformerBlock, "_checkpointed_forward", None)
    if original is None:  # from 0.19 on it is a function of another module, which passes the mask
        return

    def checkpointed_forward(self: Any, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        def give(_: Any, args: Any, given: dict[str, Any]) -> Any:
            return args, given | {"padding_mask": padding_mask}

        hooks = [layer.register_forward_pre_hook(give, with_kwargs=True) for layer in self.layers]
        try:
            return original(self, *args, padding_mask=padding_mask, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    module.TransformerBlock._checkpointed_forward = checkpointed_forward


def patch_latent_attention(module: Any) -> None:
    """Report Transformer Engine as missing (0.16 mistakes its stand-ins for it), and accept our down-projection."""
    from megatron_fleet.platform.megatron.layers import DuplicatedLinear

    module.HAVE_TE = False
    module.Linear = DuplicatedLinear


def patch_hybrid_optimizer(module: Any) -> None:
    """Keep counting steps after a checkpoint is loaded into Megatron's CPU-offloaded optimizer. The module is the same
    in 0.16.1 and 0.19.2.

    A group's ``step``, which comes from a loaded checkpoint, would be passed unchanged to the device part before each
    step.
    """
    step = module.HybridDeviceOptimizer.step

    def counted(self: Any, closure: Any = None) -> None:
        step(self, closure)
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1

    module.HybridDeviceOptimizer.step = counted


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


def patch_delayed_scaling(module: Any) -> None:
    """Let Megatron-Core's FP8 recipe with delayed scaling be made with Transformer Engine 2.20 and newer, which has no
    ``override_linear_precision``: Megatron passes it always, with the meaning "all products in FP8" by default.
    """
    theirs: Any = module.TEDelayedScaling.__base__
    if "override_linear_precision" in inspect.signature(theirs).parameters:
        return

    class DelayedScaling(theirs):  # type: ignore[misc]
        def __init__(self, *, override_linear_precision: Sequence[bool] = (), **given: Any) -> None:
            if any(override_linear_precision):
                raise ValueError(
                    "this release of Transformer Engine computes either all products of a layer in FP8 or none"
                )
            super().__init__(**given)

    module.TEDelayedScaling.__bases__ = (DelayedScaling,)
