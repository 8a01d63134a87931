"""Counters of what the trainer asks of a device and of other ranks, for hosts without GPUs.

`DeviceWork` sees every operator and counts kernels, copies and waits of a device whose tensors have no values,
PyTorch's ``meta`` device. Nothing can be read from it, so no wait passes unnoticed. `as_device` makes the trainer take
it for a CUDA device without Transformer Engine: its branches for CUDA are the ones that run. `Collectives` counts
messages between real ranks.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import megatron_fleet.platform.megatron  # noqa: F401  before any of Megatron's modules
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import LossFn
from megatron_fleet.trainer.packing.pack import PackedMicroBatch, micro_batch_width, pack_micro_batch

DEVICE = torch.device("meta")
_ROOT = Path(__file__).parents[1]

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "record_stream", "resize_", "set_"),
}
"""Operators that launch nothing although they are no views: they allocate, or change a shape."""
_KERNELS = {"slice_backward": 2, "select_backward": 2, "index_add": 2, "_varlen_attn_backward": 3}
"""Operator → kernels, where it is not one: a fill or a copy first; flash attention has a step before and one after."""
_READS = {
    *("_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"),
    *("_unique2", "unique_consecutive", "unique_dim"),
}
"""Operators whose result, or its size, depends on values that the host reads."""


class DeviceWork(TorchDispatchMode):
    """Counter of the work that ``DEVICE`` is given.

    Attributes:
        kernels: (``forward`` or ``backward``, operator) → kernels: an estimate, one for each operator that computes.
        copies, copied: number and bytes of copies from the host.
        waits: the operators that would make the host wait for the device, each with its place in the code.
        by_design: the places where the layers of a mixture of experts wait, see `as_device`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.copies = self.copied = 0
        self.waits: list[str] = []
        self.by_design: list[str] = []

    def of_phase(self, phase: str) -> Counter[str]:
        """Kernels of ``forward`` or ``backward`` by operator."""
        return Counter({name: n for (at, name), n in self.kernels.items() if at == phase})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        given = _tensors((args, kwargs))
        if reason := _why_it_waits(name, args, kwargs, given):
            self.waits.append(f"{reason}, {place()}")
            if name == "_local_scalar_dense":
                return args[0].new_zeros((), device="cpu").item()
            if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func.namespace == "c10d":
            return func(*tree_map_only(torch.Tensor, _on_host, args), **kwargs)
        result = func(*args, **kwargs)
        if any(map(_is_here, _tensors(result))):
            if name in ("_to_copy", "copy_") and not all(map(_is_here, given)):
                self.copies += 1
                self.copied += given[-1].nbytes
            elif not func.is_view and name not in _NO_KERNEL:
                self.kernels[phase(), name] += _KERNELS.get(name, 1)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE.type


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Any values in the place of a tensor of ``DEVICE``, for a collective of one rank."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if _is_here(tensor) else tensor


def _why_it_waits(name: str, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> str:
    """Name the reason for which the host waits in an operator on CUDA; empty where it does not."""
    here = [_is_here(tensor) for tensor in given]
    if name in ("_to_copy", "copy_"):
        source = given[-1]
        target = torch.device(kwargs.get("device") or source.device) if name == "_to_copy" else args[0].device
        crosses = (target.type == DEVICE.type) != _is_here(source)
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        to_host = crosses and _is_here(source)
        if crosses and (to_host or blocks):
            return "copies to the host" if to_host else "copies from the host without non_blocking"
        return ""
    if not any(here):
        return ""
    if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return f"{name} reads values"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return f"{name} by a mask reads values"
        if any(not _is_here(index) for index in indices):
            return f"{name} copies its index from the host"
    return ""


def phase() -> str:
    """``backward`` inside autograd's engine, ``forward`` outside."""
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def place() -> str:
    """File and line of the innermost caller outside PyTorch and this module."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if "torch" not in file.parts and frame.filename != __file__:
            return f"{file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else file}:{frame.lineno}"
    return "unknown"


class _Stub(torch.autograd.Function):
    """Stand-in for a kernel that exists on CUDA only: ``forward`` kernels give a tensor like the first, ``backward``
    kernels the gradients of all.
    """

    @staticmethod
    def forward(ctx: Any, work: DeviceWork, name: str, forward: int, backward: int, *given: torch.Tensor) -> Any:
        ctx.how = work, name, backward
        ctx.save_for_backward(*given)
        work.kernels[phase(), name] += forward
        return torch.empty_like(given[0])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        work, name, kernels = ctx.how
        work.kernels[phase(), f"{name}_backward"] += kernels
        return None, None, None, None, *map(torch.empty_like, ctx.saved_tensors)


def _fla(work: DeviceWork) -> dict[str, Any]:
    """Stand-ins for the modules of flash-linear-attention that Gated DeltaNet takes on CUDA.

    Its kernels are estimates: the rule has eight steps, each with about one kernel forward and two backward.
    """

    def convolve(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return _Stub.apply(work, "causal_conv1d", 1, 2, x, weight), None

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
        return _Stub.apply(work, "chunk_gated_delta_rule", 8, 16, v, q, k, g, beta), None

    return {
        "fla": mock.Mock(),
        "fla.modules": mock.Mock(),
        "fla.modules.causal_conv1d": mock.Mock(causal_conv1d=convolve),
        "fla.ops": mock.Mock(),
        "fla.ops.gated_delta_rule": mock.Mock(chunk_gated_delta_rule=rule),
    }


class _Softmax:
    """Stand-in for the kernels of `trainer.megatron.logprob_triton`."""

    def __init__(self, work: DeviceWork) -> None:
        self._work = work

    def row_sums(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        self._work.kernels[phase(), "softmax"] += 1
        return logits.new_empty(4, len(logits), dtype=torch.float32)

    def to_gradient_(self, *_: Any) -> None:
        self._work.kernels[phase(), "softmax_backward"] += 1


@contextmanager
def as_device(work: DeviceWork) -> Iterator[DeviceWork]:
    """Count inside; models that are built inside are on ``DEVICE``, and micro-batches are copied to it.

    The dispatcher of a mixture of experts copies the sizes of its messages to the host and waits for them: once per
    layer and forward pass, by Megatron's design. Inside, such a wait is recorded in ``work.by_design``, and the sizes
    are those of experts with equal numbers of tokens.
    """
    with DEVICE:
        torch.empty(0)  # PyTorch keeps the list of functions that heed a device: not one with a stand-in among them
    with ExitStack() as stack:
        for target, name, value in (*_of_torch(work), *_of_megatron(work), *_of_experts(work)):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_modules(_fla(work)))
        stack.enter_context(work)
        yield work


@contextmanager
def _modules(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Let these be imported inside. `mock.patch.dict` would also forget all modules that are imported inside for the
    first time: a second import then makes a second copy of them.
    """
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


Substitutes = list[tuple[Any, str, Any]]
"""Objects, names of their attributes, and values for these."""


def _of_torch(work: DeviceWork) -> Substitutes:
    given_type = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = given_type(tensor, *args, **kwargs)
        return result.replace("torch.meta.", "torch.") if isinstance(result, str) else result

    def rms_norm(x: torch.Tensor, _: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _Stub.apply(work, "rms_norm", 1, 2, x, weight)

    return [
        (torch.Tensor, "is_cuda", property(_is_here)),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (torch.Tensor, "type", type_of),
        (torch.Tensor, "new_tensor", _given_values(work, torch.Tensor.new_tensor)),
        (torch, "tensor", _given_values(work, torch.tensor)),
        (F, "rms_norm", rms_norm),  # elsewhere than on CUDA it consists of several operators
    ]


def _given_values(work: DeviceWork, function: Any) -> Any:
    """A function that makes tensors of Python numbers; on a device it waits until they are copied."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if _is_here(result):
            work.waits.append(f"values from the host without non_blocking, {place()}")
        return result

    return call


def _of_megatron(work: DeviceWork) -> Substitutes:
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_fleet.models.qwen3_5.modules import delta_rule, megatron
    from megatron_fleet.trainer.megatron import logprob, step

    def synchronize(*_: Any) -> None:
        work.waits.append(f"torch.cuda.synchronize, {place()}")

    its_torch = param_and_grad_buffer.torch  # the one that all of its modules see on a host without CUDA
    with_fla = delta_rule.Kernels(delta_rule._fla_convolve, delta_rule._fla_rule)
    return [
        (its_torch, "tensor", _given_values(work, its_torch.tensor)),
        (its_torch.cuda, "current_device", lambda: DEVICE),
        (its_torch.cuda, "synchronize", synchronize),
        (step, "device", lambda: DEVICE),
        (logprob, "_kernels", lambda _: _Softmax(work)),
        (megatron, "kernels", lambda: with_fla),
    ]


def _of_experts(work: DeviceWork) -> Substitutes:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    original, routed = dispatcher.preprocess, 0

    def preprocess(self: Any, routing_map: torch.Tensor) -> Any:
        nonlocal routed
        routed = len(routing_map) * self.config.moe_router_topk
        return original(self, routing_map)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not (isinstance(tensor, torch.Tensor) and _is_here(tensor)):
            return tensor
        sizes = torch.full(tensor.shape, routed // tensor.numel())
        return sizes.numpy() if as_numpy else sizes

    event = mock.Mock(synchronize=lambda: work.by_design.append(place()))
    return [
        (dispatcher, "preprocess", preprocess),
        (dispatcher, "cuda_dtoh_stream", mock.Mock(record_event=lambda *_: event)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        # A tensor of the process, on the device of the first model with experts.
        (moe_utils.MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
    ]


def chunk_on_device(hf: Mapping[str, Any], tokens: int, **more: Any) -> Any:
    """The model of a ``config.json`` in bfloat16 on ``DEVICE``, wrapped for data parallelism; use inside `as_device`.

    Args:
        tokens: capacity of a micro-batch.
        more: further arguments of Megatron's configuration.
    """
    from megatron_fleet.config.schema import ParallelConfig
    from megatron_fleet.trainer.megatron import build, optimizer, routing

    with DEVICE:
        (chunk,) = build.build_chunks(hf, ParallelConfig(), torch.bfloat16, tokens, **more)
    routing.attach(chunk)
    return optimizer.wrap(chunk)


def run_micro_batches(chunk: Any, micro_batches: Sequence[Sequence[Datum]], loss: LossFn) -> list[Any]:
    """One pass forward and backward over micro-batches; returns the metrics of each. Use inside `as_device`."""
    from megatron_fleet.trainer.megatron import step

    return step.run_loss([chunk], _packed(micro_batches), step.Settings(1.0, 4096), loss)


def run_logprobs(chunk: Any, micro_batches: Sequence[Sequence[Datum]], _: LossFn) -> list[torch.Tensor]:
    """One pass without gradients; use inside `as_device`."""
    from megatron_fleet.trainer.megatron import step

    return step.run_logprobs([chunk], _packed(micro_batches), step.Settings(1.0, 4096))


def _packed(micro_batches: Sequence[Sequence[Datum]]) -> list[PackedMicroBatch]:
    return [pack_micro_batch(data, micro_batch_width([*map(len, data)], 1, 8)) for data in micro_batches]


def take_step(chunk: Any, micro_batches: Sequence[Sequence[Datum]], loss: LossFn) -> None:
    """A pass, its report and an optimizer step; use inside `as_device`."""
    from megatron_fleet.config.schema import OptimizerConfig
    from megatron_fleet.trainer.base import AdamParams
    from megatron_fleet.trainer.megatron import optimizer, step

    settings = OptimizerConfig(lr=1e-3)
    adam = optimizer.build([chunk], settings, torch.bfloat16)
    step.reduce_sums(run_micro_batches(chunk, micro_batches, loss), {"tokens": 1})
    reduced = optimizer.reduce_gradients([chunk], adam)
    optimizer.step([chunk], adam, reduced, AdamParams.of(settings, 1e-3))


class Collectives(TorchDispatchMode):
    """Counter of messages between ranks.

    Attributes:
        calls, nbytes: (`phase`, kind, group) → number, and bytes of the whole tensor: of an all-gather what it gives,
            of any other what it is given. Groups of one rank are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str, str]] = Counter()
        self._groups = group_names()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.partition(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
        group = torch.distributed.ProcessGroup.unbox(boxed)
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)
        if group.size() == 1 or not kind:
            return
        # Megatron sends every second message between two stages in the group of all ranks.
        role = "pipeline" if kind == "send" else self._groups.get(group.group_name, group.group_name)
        key = phase(), kind, role
        self.calls[key] += 1
        two_sided = kind in ("all_gather", "all_to_all", "reduce_scatter")  # output and input
        self.nbytes[key] += sum(x.nbytes for x in _tensors(args[1 if two_sided and kind != "all_gather" else 0]))


_KINDS = {
    "allreduce": "all_reduce",
    "_allgather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "",  # the other end of a send
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
"""Start of an operator's name → kind of message."""


def group_names() -> dict[str, str]:
    """PyTorch's name of a process group → the dimension of the layout that it spans."""
    from megatron.core import parallel_state

    found: dict[str, str] = {}
    for role, names in _ROLES.items():
        for name in names:
            group = getattr(parallel_state, f"_{name}")
            if group is not None:
                found.setdefault(group.group_name, role)
    found.setdefault(torch.distributed.group.WORLD.group_name, "all")
    return found


_ROLES = {
    "tensor": ["TENSOR_MODEL_PARALLEL_GROUP"],
    "pipeline": ["PIPELINE_MODEL_PARALLEL_GROUP"],
    "context": ["CONTEXT_PARALLEL_GROUP"],
    "data": ["DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"],
    "expert": ["EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"],
    "model": ["MODEL_PARALLEL_GROUP"],
    "all": ["INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"],
}
