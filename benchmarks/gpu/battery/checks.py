"""Checks of ``first.py``: does each part of the trainer compute the right thing on this device?

``python -m battery.checks NAME FOLDER`` makes one check in this process and prints its `Finding` as the last
line. ``--reference`` computes what others are compared with, on the CPU. No check measures speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from battery.hardware import GPUS, NO_ENGINE
from battery.results import ROOT, Unavailable, first_line

if TYPE_CHECKING:
    import torch

    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

TOKENS = 256
LONGEST = 96
LR = 1e-4
REFERENCE = "reference.npz"
STACKS_S = 5
"""The log of a check shows its Python stacks each so many seconds: where a slow start, or a hang, spends its time."""
RESULTS = "first.jsonl"
"""File of a device's folder: a line for each check that was made, the newest last."""
FLOAT32 = {"logprobs": 2e-4, "loss": 1e-4, "grad_norm": 1e-3, "logprobs_after": 5e-3}
"""Largest difference from the CPU in float32: of a log-prob in nats, relative of loss and norm, and of a log-prob after
a step, in which Adam turns the rounding of gradients near zero into whole steps."""
BFLOAT16 = {"logprobs": 0.005, "loss": 0.05, "grad_norm": 0.05}
"""The same of bfloat16: of log-probs the mean, beyond twice that of bfloat16 on the CPU, which depends on the model."""
FP8 = {"logprobs": 0.15, "loss": 0.15, "grad_norm": 0.25}


@dataclass(slots=True)
class Finding:
    """Result of a check.

    Attributes:
        wrong: what differs by more than its tolerance.
        figures: differences and facts.
    """

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def compare(self, what: str, difference: float, tolerance: float) -> None:
        """Note a difference, and that it is wrong where it exceeds the tolerance, or is NaN."""
        self.figures[what] = float(f"{difference:.3g}")
        if not difference <= tolerance:
            self.wrong.append(f"{what}: {difference:.3g}, allowed are {tolerance:g}")

    def equal(self, what: str, same: bool) -> None:
        """Note whether two things are equal to the bit."""
        self.figures[what] = same
        if not same:
            self.wrong.append(f"{what}: not equal to the bit")


Check = Callable[["Finding", Path], None]


def machine(finding: Finding, folder: Path) -> None:
    """Device, versions, and how fast the disk takes a file."""
    import shutil

    import torch

    from battery import hardware

    finding.figures |= asdict(hardware.here())
    finding.figures["disk_free_gib"] = round(shutil.disk_usage(folder).free / hardware.GIB)
    size = 1 << (31 if torch.cuda.is_available() else 20)
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with (folder / "disk").open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    finding.figures["disk_gb_s"] = round(size / (time.perf_counter() - began) / 1e9, 2)
    (folder / "disk").unlink()
    if torch.cuda.is_available():
        asked = "--query-gpu=driver_version,memory.used,clocks.max.sm,power.limit"
        command = ["nvidia-smi", asked, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        finding.figures["nvidia_smi"] = done.stdout.strip()


def attention(finding: Finding, folder: Path) -> None:
    """The kernel for packed sequences, with grouped heads, against attention written out in float32."""
    import torch

    from megatron_fleet.platform.device import device
    from megatron_fleet.platform.megatron.attention import (
        MicroBatchParams,
        _takes_all_at_once,
        attend_in_one_call,
        attend_one_by_one,
        attention_parts,
    )

    heads, groups, width, where = 32, 8, 128, device()
    parts = attention_parts(MicroBatchParams(lengths=(100, 517, 64)), 1, 0, where)
    tokens = sum(parts.queries)
    for value_width, scale in ((width, None), (width, 0.05), (64, None)):
        torch.manual_seed(0)
        sizes = (heads, width), (groups, width), (groups, value_width)
        given = [torch.randn(tokens, h, w, device=where, dtype=torch.bfloat16, requires_grad=True) for h, w in sizes]
        weight = torch.randn(tokens, heads, value_width, device=where)
        exact = _with_gradients(attend_one_by_one, [x.detach().float() for x in given], parts, scale, weight)
        plain = _with_gradients(attend_one_by_one, given, parts, scale, weight)
        name = f"value width {value_width}, scale {scale}"
        finding.figures[f"{name}: in one call"] = _takes_all_at_once(given[0], given[2])
        kernel = attend_in_one_call if where.type == "cuda" else attend_one_by_one  # a CPU has no such kernel
        found = _with_gradients(kernel, given, parts, scale, weight)
        for what, ours, theirs, right in zip(("out", "dq", "dk", "dv"), found, plain, exact, strict=True):
            # Twice the error of PyTorch's own attention in BF16, which rounds the same values.
            finding.compare(f"{name}: {what}", _distance(ours, right), 2 * _distance(theirs, right) + 1e-3)


def _with_gradients(
    kernel: Callable[..., Any], given: list[Any], parts: Any, scale: float | None, weight: Any
) -> list[Any]:
    import torch

    inputs = [x.detach().requires_grad_() for x in given]
    out = kernel(*inputs, parts, scale)
    return [out.detach(), *torch.autograd.grad((out.float() * weight).sum(), inputs)]


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm, in float64."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def addmm(finding: Finding, folder: Path) -> None:
    """A product of BF16 matrices added to float32 in place, as the gradient of the output layer is."""
    import torch

    from megatron_fleet.platform.device import device
    from megatron_fleet.trainer.megatron.logprob import _add_product

    torch.manual_seed(0)
    where = device()
    for rows, cols in ((1003, 64), (8201, 256)):
        d, hidden = (torch.randn(512, n, device=where, dtype=torch.bfloat16) for n in (rows, cols))
        total = torch.randn(rows, cols, device=where)
        right = total.double() + d.double().t() @ hidden.double()
        _add_product(total, d, hidden)
        tolerance = 1e-5 if where.type == "cuda" else 5e-3  # a CPU rounds the product to BF16 first
        finding.compare(f"{rows} × {cols}", _distance(total, right), tolerance)


def logprob_kernels(finding: Finding, folder: Path) -> None:
    """The Triton kernels of log-probs and their gradients against the same in PyTorch, at two vocabularies."""
    import torch

    from megatron_fleet.platform.device import device
    from megatron_fleet.trainer.megatron import logprob, logprob_torch

    where = device()
    kernels: Any = logprob._kernels(torch.empty(0, device=where))
    finding.figures["module"] = kernels.__name__
    for columns in (8201, 151936):
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(columns)
            logits = (3 * torch.randn(96, columns, device=where)).to(dtype)
            column = torch.randint(-5, columns + 5, (96,), device=where)
            plain: Any = logprob_torch
            sums, right = (module.row_sums(logits.clone(), column, 1.25) for module in (kernels, plain))
            name = f"{columns} columns, {str(dtype).removeprefix('torch.')}"
            finding.compare(f"{name}: sums", _distance(sums, right), 1e-5)
            log_norm, entropy = right[0] + right[1].log(), right[1].log() - right[2] / right[1]
            of_logprob, of_entropy = torch.randn(96, device=where), torch.randn(96, device=where)
            both = [logits.clone(), logits.clone()]
            for module, target in zip((kernels, plain), both, strict=True):
                module.to_gradient_(target, column, 1.25, log_norm, entropy, of_logprob, of_entropy)
            finding.compare(f"{name}: gradient", _distance(*both), 1e-5 if dtype == torch.float32 else 5e-3)


def norms(finding: Finding, folder: Path) -> None:
    """RMSNorm and the activation of the feed-forward layers, with gradients, against float64."""
    import torch
    import torch.nn.functional as F

    from megatron_fleet.platform.device import device
    from megatron_fleet.platform.megatron.layers import RMSNorm, SwiGLU

    where, eps = device(), 1e-6
    settings: Any = type("Config", (), {"layernorm_zero_centered_gamma": False, "params_dtype": torch.bfloat16,
                                        "sequence_parallel": False, "bias_activation_fusion": True})  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(300, 4096, device=where, dtype=torch.bfloat16)
    norm = RMSNorm(settings, 4096, eps).to(where, torch.bfloat16)
    with torch.no_grad():
        norm.weight.normal_(1, 0.1)
    weight = norm.weight.detach().double()
    cases: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "RMSNorm": (norm, lambda v: v * (v.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight),
        "SwiGLU": (SwiGLU(settings), lambda v: F.silu(v.chunk(2, -1)[0]) * v.chunk(2, -1)[1]),
    }
    for name, (ours, exact) in cases.items():
        found, right = (_value_and_gradient(function, v) for function, v in ((ours, x), (exact, x.double())))
        for what, a, b in zip(("out", "gradient"), found, right, strict=True):
            finding.compare(f"{name}: {what}", _distance(a, b), 1e-2)


def _value_and_gradient(function: Callable[..., Any], x: torch.Tensor) -> tuple[Any, Any]:
    import torch

    x = x.detach().requires_grad_()
    out = function(x)
    factor = torch.linspace(-1, 1, out.numel(), device=x.device, dtype=torch.float64).view_as(out)
    (gradient,) = torch.autograd.grad((out.double() * factor).sum(), x)
    return out.detach(), gradient


# Whole policies


def policy(finding: Finding, folder: Path, family: str = "qwen3", kernels: str = "torch") -> None:
    """A tiny model: a step in float32 and in BF16 against the CPU; offload, onload, save, load."""
    needs_engine(kernels)
    reference = reference_of(folder, family)
    rounded = {**BFLOAT16, "logprobs": BFLOAT16["logprobs"] + 2 * float(reference["rounding"])}
    for dtype, tolerances in (("float32", FLOAT32), ("bfloat16", rounded)):
        trained = make(folder, dtype, kernels)
        against(finding, dtype, one_step(trained), reference, tolerances, worst=dtype == "float32")
        there_and_back(finding, dtype, trained, folder / f"state-{dtype}")
        trained.close()


def fp8(finding: Finding, folder: Path, recipe: str) -> None:
    """One step with an FP8 recipe, against the CPU in float32."""
    needs_engine("auto")
    reference = reference_of(folder, "wide")
    trained = make(folder, "bfloat16", "auto", recipe)
    against(finding, recipe, one_step(trained), reference, FP8, worst=False)
    there_and_back(finding, recipe, trained, folder / "state")
    trained.close()


def needs_engine(kernels: str) -> None:
    """Raise Unavailable where layers of Transformer Engine are asked for and cannot be used."""
    if kernels == "auto" and (problem := os.environ[NO_ENGINE]):
        raise Unavailable(problem)


def raw_config(family: str) -> dict[str, Any]:
    """``config.json`` of a tiny model of the family, or of a Qwen3 that is ``wide`` enough for FP8."""
    from battery import shapes

    sys.path.insert(0, str(ROOT / "tests" / "weights"))
    import tiny_configs

    if family == "wide":  # sides are multiples of 128
        hf = shapes.TINY | {"num_key_value_heads": 2, "head_dim": 64}
    else:
        hf = tiny_configs.raw_config(family, "v4")
    hf.get("text_config", hf)["initializer_range"] = 0.05  # so that log-probs are far from uniform
    return hf


def reference_of(folder: Path, family: str) -> Mapping[str, Any]:
    """Make the model's folder, and take its step on the CPU in another process."""
    import numpy as np

    command = [sys.executable, "-m", "battery.checks", "--reference", str(folder), family]
    done = subprocess.run(command, env={**os.environ, GPUS: ""}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the step on the CPU failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return dict(np.load(folder / REFERENCE))


def reference(folder: Path, family: str) -> None:
    """Write the model's folder, what a step gives on the CPU, and how far its log-probs are from those in bfloat16."""
    import numpy as np

    from battery import shapes

    shapes.write_model(folder / "model", raw_config(family))
    exact = make(folder, "float32", "torch")
    found = one_step(exact)
    exact.close()
    rounded = logprobs(make(folder, "bfloat16", "torch"))
    np.savez(folder / REFERENCE, **found, rounding=abs(rounded - found["logprobs"]).mean())


def make(folder: Path, dtype: str, kernels: str, recipe: str = "model_dtype") -> MegatronPolicy:
    """The policy of ``folder/model``."""
    from battery import shapes
    from megatron_fleet.config.schema import Config
    from megatron_fleet.trainer.process import prepare_process

    sections: dict[str, Any] = {
        "policy": {"kernels": kernels, "optimizer": {"lr": LR}},
        "precision": {"recipe": recipe},
    }
    plain = shapes.run_config(folder / "model", TOKENS, engine={"colocated": True}, **sections).model_dump(mode="json")
    plain["model"]["dtype"] = dtype
    config = Config.model_validate(plain)
    prepare_process(config.policy, config.parallel)
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    return MegatronPolicy(config, init="hf")


def data(trained: MegatronPolicy) -> Any:
    """The same micro-batch on every device, with advantages of both signs."""
    import numpy as np

    from battery import shapes

    found = shapes.random_data(TOKENS, LONGEST, trained.vocab_size)
    rng = np.random.default_rng(0)
    for datum in found:
        datum.scaled_advantages = (datum.loss_mask * rng.normal() / TOKENS).astype(np.float32)
    return found


def logprobs(trained: MegatronPolicy) -> Any:
    """Log-probs at trained positions, float32 ``[N]``."""
    import numpy as np

    batch = data(trained)
    (values,) = trained.forward([batch])
    return np.concatenate([found[datum.loss_mask] for datum, found in zip(batch, values, strict=True)])


def one_step(trained: MegatronPolicy) -> dict[str, Any]:
    """Log-probs before and after an update, its loss and its gradient norm."""
    from megatron_fleet.algorithms.losses import make_loss
    from megatron_fleet.config.schema import AlgorithmConfig

    before = logprobs(trained)
    report = trained.forward_backward([data(trained)], make_loss(AlgorithmConfig()))
    step = trained.optim_step(LR)
    if step.skipped:
        raise RuntimeError("the update was not finite, and was skipped")
    found = {"logprobs": before, "loss": report.loss, "grad_norm": step.grad_norm}
    return {**found, "logprobs_after": logprobs(trained)}


def against(
    finding: Finding,
    name: str,
    found: Mapping[str, Any],
    right: Mapping[str, Any],
    allowed: Mapping[str, float],
    *,
    worst: bool,
) -> None:
    """Compare a step with the CPU's: log-probs by their largest difference, or by the mean."""
    for key, tolerance in allowed.items():
        difference = abs(found[key] - right[key])
        if key.startswith("logprobs"):
            value = difference.max() if worst else difference.mean()
        else:
            value = difference / max(abs(float(right[key])), 1e-6)
        finding.compare(f"{name}: {key}", float(value), tolerance)


def there_and_back(finding: Finding, name: str, trained: MegatronPolicy, folder: Path) -> None:
    """Offload and onload; save, change, load: parameters and optimizer come back equal to the bit."""
    from battery.parts.offloading import checksums
    from megatron_fleet.algorithms.losses import make_loss
    from megatron_fleet.config.schema import AlgorithmConfig

    state = trained.train_state()
    before = checksums(state)
    state.offload()
    state.onload()
    finding.equal(f"{name}: offload and onload", checksums(state) == before)
    trained.save_state(folder)
    trained.forward_backward([data(trained)], make_loss(AlgorithmConfig()))
    trained.optim_step(LR)
    changed = checksums(state)
    trained.load_state(folder)
    finding.equal(f"{name}: save and load", checksums(state) == before != changed)


@dataclass(frozen=True, slots=True)
class Step:
    """A check and its limit."""

    name: str
    check: Check
    about: str
    limit_s: float = 90


STEPS = (
    Step("machine", machine, "device, driver, versions, memory, disk"),
    Step("attention", attention, "packed attention, grouped heads, forward and backward"),
    Step("policy", policy, "tiny Qwen3 without TE: step, offload, onload, save, load"),
    Step("policy_te", partial(policy, kernels="auto"), "the same with layers of Transformer Engine"),
    Step("addmm", addmm, "addmm(out_dtype=float32) into itself"),
    Step("logprob_kernels", logprob_kernels, "Triton kernels of log-probs at 8,201 and 151,936 columns"),
    Step("norms", norms, "RMSNorm and the compiled activation"),
    Step("fp8_tensorwise", partial(fp8, recipe="fp8_tensorwise"), "a step in FP8, a scale for each tensor"),
    Step("fp8_blockwise", partial(fp8, recipe="fp8_blockwise"), "a step in FP8, a scale for each block"),
    Step("fp8_delayed", partial(fp8, recipe="fp8_delayed"), "a step in FP8, scales of earlier steps"),
    Step("qwen3_5", partial(policy, family="qwen3_5"), "tiny Qwen3.5: our own gated delta rule"),
    Step("qwen3_moe", partial(policy, family="qwen3_moe"), "tiny Qwen3-MoE: router and experts"),
    Step("deepseek_v3", partial(policy, family="deepseek_v3"), "tiny DeepSeek-V3: latent attention, groups of experts"),
    Step("qwen3_moe_te", partial(policy, family="qwen3_moe", kernels="auto"), "tiny Qwen3-MoE with Transformer Engine"),
)
"""In order of information."""
BY_NAME = {step.name: step for step in STEPS}


def main(name: str, folder: Path) -> int:
    """Make a check and print what was found; returns the exit status."""
    warnings.filterwarnings("ignore")
    finding, status, says, check = Finding(), "ok", "", BY_NAME[name].check
    try:
        check(finding, folder)
    except Unavailable as error:
        status, says = "skipped", str(error)
    except Exception as error:
        traceback.print_exc()
        status, says = "failed", first_line(error)
    if finding.wrong and status == "ok":
        status, says = "wrong", "; ".join(finding.wrong)
    print(json.dumps({"step": name, "status": status, "says": says, "figures": finding.figures}), flush=True)
    return 0 if status in ("ok", "skipped") else 1


def log_stacks() -> None:
    """Log the Python stacks of this process every `STACKS_S` seconds, for ever.

    ``faulthandler.dump_traceback_later`` would read them without the interpreter's lock, which now and then ends the
    process with a segmentation fault.
    """
    while True:
        time.sleep(STACKS_S)
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                stack = "".join(traceback.format_stack(frame))
                print(f"{time.strftime('%X')}, thread {thread}:\n{stack}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    threading.Thread(target=log_stacks, daemon=True).start()
    if sys.argv[1] == "--reference":
        reference(Path(sys.argv[2]), sys.argv[3])
        sys.exit()
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
