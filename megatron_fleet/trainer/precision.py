"""Requirements of FP8 and the optimizer's variants on model, layout and machine. Nothing here imports
torch by itself.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig, PolicyConfig, PrecisionConfig
from megatron_fleet.models.layout import FP8_BLOCK, FP8_SIDE
from megatron_fleet.models.model import Model

_OLDEST_ENGINE = {"fp8_delayed": (1, 7), "fp8_tensorwise": (2, 2), "fp8_blockwise": (2, 3)}
"""Transformer Engine's first release with each recipe, as Megatron-Core's ``fp8_utils`` has it."""
_PRECISION_AWARE_ENGINE = (2, 1)


def check_precision(model: Model, parallel: ParallelConfig, precision: PrecisionConfig) -> None:
    """Refuse an FP8 recipe that does not fit this model's layers when split as in ``parallel``.

    Raises:
        UserError: the first problem found, with advice.
    """
    if not precision.fp8:
        return
    for name, width, whole in _widths(model, parallel):
        # A block that straddles the cut would get other scales than it has in a checkpoint, and vLLM refuses it.
        unit = FP8_BLOCK if precision.recipe == "fp8_blockwise" and not whole else FP8_SIDE
        if width % unit:
            raise UserError(
                f"precision.recipe={precision.recipe} needs matrices whose sides are multiples of {unit} on each rank, "
                f"and {name} is {width}; lower parallel.tensor or parallel.expert_tensor, or choose another recipe."
            )
    out = precision.bf16_layers_at_start + precision.bf16_layers_at_end
    if out >= model.layers:
        raise UserError(
            f"precision.bf16_layers_at_start + bf16_layers_at_end = {out} leave none of the model's {model.layers} "
            f"layers in FP8; lower them or set precision.recipe=model_dtype."
        )
    most = model.layers // parallel.pipeline
    for key in ("bf16_layers_at_start", "bf16_layers_at_end"):
        if getattr(precision, key) > most:
            raise UserError(
                f"precision.{key}={getattr(precision, key)} is more than the {most} layers of a pipeline rank; lower "
                f"it or parallel.pipeline."
            )


def _widths(model: Model, parallel: ParallelConfig) -> list[tuple[str, int, bool]]:
    """Name and size on one rank of each side of the matrices in FP8 layers, and whether it is whole on the rank."""
    tensor, experts = parallel.tensor, parallel.expert_tensor_size
    found = [("hidden_size", model.hidden, True)]
    if model.latent:
        nope, rotated, value = (size or 0 for size in (model.nope, model.rotated, model.value))
        found += [
            ("the compressed query", model.q_lora or 0, True),
            ("the compressed key and value", (model.kv_lora or 0) + rotated, True),
            ("the queries", model.heads * (nope + rotated) // tensor, False),
            ("the keys and values", model.heads * (nope + value) // tensor, False),
            ("the attention's output", model.heads * value // tensor, False),
        ]
    else:
        head = model.head or model.hidden // model.heads
        groups = model.groups or model.heads
        queries = 2 * model.heads if model.output_gate else model.heads
        found += [
            ("queries, keys and values together", (queries + 2 * groups) * head // tensor, False),
            ("the attention's output", model.heads * head // tensor, False),
        ]
    if model.mixer is not None:
        found += [(name, size // tensor, False) for name, size in model.mixer.widths()]
    found += [
        ("intermediate_size", model.ffn // tensor, False),
        ("the shared experts' width", model.shared_ffn // tensor, False),
        ("moe_intermediate_size", model.expert_ffn // experts, False),
    ]
    return found


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine properties that determine the supported recipes.

    Attributes:
        capability: of the CUDA device, (9, 0) for an H100; ``None`` without one.
        cuda: version that torch was built for.
        engine: version of Transformer Engine; ``None`` where it cannot be used.
        engine_fault: why it cannot.
    """

    capability: tuple[int, int] | None = None
    cuda: tuple[int, ...] = ()
    engine: tuple[int, ...] | None = None
    engine_fault: str = "it is not installed"


def machine_problem(policy: PolicyConfig, precision: PrecisionConfig, machine: Machine) -> str | None:
    """Reason why this machine cannot train with these settings, with advice; ``None`` when it can."""
    recipe = precision.recipe
    fault = "policy.kernels=torch leaves it out" if policy.kernels == "torch" else machine.engine_fault
    engine = None if policy.kernels == "torch" else machine.engine
    if "moe_act" in policy.recomputed_parts and engine is None:
        return (
            f"policy.recompute names moe_act, which needs the grouped experts of Transformer Engine, and {fault}; "
            f"remove moe_act or name moe."
        )
    if precision.fp8:
        asked, oldest = f"precision.recipe={recipe}", _OLDEST_ENGINE[recipe]
        if machine.capability is None:
            return f"{asked} needs a CUDA device, which this host lacks; set precision.recipe=model_dtype."
        if machine.capability < (8, 9):
            return (
                f"{asked} needs compute capability 8.9 or above, and this GPU has {_dotted(machine.capability)}; set "
                f"precision.recipe=model_dtype."
            )
        if recipe == "fp8_blockwise" and (machine.capability[0] != 9 or machine.cuda < (12, 9)):
            return (
                f"{asked} needs a Hopper GPU (compute capability 9.0) and CUDA 12.9, but found "
                f"{_dotted(machine.capability)} and {_dotted(machine.cuda)}; choose fp8_tensorwise or update CUDA."
            )
    elif policy.optimizer.moments != "float32" and machine.capability is not None:
        asked, oldest = f"policy.optimizer.moments={policy.optimizer.moments}", _PRECISION_AWARE_ENGINE
    elif machine.capability is None or engine is not None or policy.kernels == "torch":
        return None
    else:
        return (
            f"policy.kernels=auto needs Transformer Engine on a CUDA device, and {fault}; install it (./setup.sh "
            f"--gpu), or set policy.kernels=torch for PyTorch's own kernels, which are slower and without FP8."
        )
    if engine is None or engine < oldest:
        here = fault if engine is None else f"here is {_dotted(engine)}"
        return f"{asked} needs Transformer Engine {_dotted(oldest)} or newer, and {here}; install it or change the key."
    return None


def this_machine() -> Machine:
    """Machine of this process: its device and libraries."""
    import torch

    try:
        engine: tuple[int, ...] | None = _numbers(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        engine = None
    if not torch.cuda.is_available():
        return Machine(engine=engine)
    device = torch.cuda.get_device_capability(), _numbers(torch.version.cuda or "")
    if engine is not None and (fault := _import_fault()):
        return Machine(*device, None, fault)
    return Machine(*device, engine)


def _import_fault() -> str | None:
    """Reason why the installed Transformer Engine does not work, such as a missing part that is compiled for torch."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return f"importing it failed: {first}"
    return None


def check_machine(policy: PolicyConfig, precision: PrecisionConfig) -> None:
    """Refuse settings with which nothing can be trained here.

    Raises:
        UserError: the device, CUDA or Transformer Engine that it needs is missing.
    """
    if problem := machine_problem(policy, precision, this_machine()):
        raise UserError(problem)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
