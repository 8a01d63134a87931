"""The Triton kernels: equal to PyTorch's operations, under Triton's interpreter and on a GPU, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("triton")

import torch
from logprob_kernel_runs import CASES, run_case

from megatron_fleet.trainer.megatron import logprob, logprob_torch


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results of the kernels on a CPU. The interpreter must be chosen before Triton is imported."""
    out = tmp_path_factory.mktemp("kernels") / "results.pt"
    program = [sys.executable, Path(__file__).parent / "logprob_kernel_runs.py", out]
    done = subprocess.run(program, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return torch.load(out)


def assert_equal(case, got, expected):
    """Up to float32 rounding; bfloat16 up to one of its steps, of the largest value for sums: the interpreter cuts
    digits off where a GPU rounds."""
    for name, value in expected.items():
        rtol, atol = 1e-5, 1e-5
        if value.dtype == torch.bfloat16:
            rtol, atol = 2**-7, 1e-6 if name == "gradient" else 2**-7 * value.abs().max().item()
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda text, of=name: f"{of}: {text}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_torch(interpreted, case):
    assert_equal(case, interpreted[str(case)], run_case(case, logprob_torch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_equals_cpu(case):
    where = torch.empty(0, device="cuda")
    kernels = logprob._kernels(where)
    assert kernels.__name__.endswith("logprob_triton")
    assert_equal(case, run_case(case, kernels, "cuda"), run_case(case, logprob_torch))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_kernels_compile_for_gpus(capability, entropy_gradient, tmp_path, monkeypatch):
    """To machine code, by the assembler that Triton brings along; no GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fleet.trainer.megatron import logprob_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"width": "i32", "stride": "i32", "scale": "fp32", "BLOCK": "constexpr"}
    pointers = dict.fromkeys(("log_norm", "entropy", "of_logprob"), "*fp32")
    sums = {"logits": "*bf16", "column": "*i64", "sums": "*fp32", "count": "i32", **sizes}
    gradient = {
        "logits": "*bf16",
        "column": "*i64",
        **pointers,
        "of_entropy": "*fp32" if entropy_gradient else "constexpr",
        **sizes,
    }
    fixed = {"BLOCK": logprob_triton.MAX_BLOCK} | ({} if entropy_gradient else {"of_entropy": None})
    for kernel, signature in ((logprob_triton._row_sums, sums), (logprob_triton._to_gradient, gradient)):
        names = list(signature)
        constants = {(names.index(name),): value for name, value in fixed.items() if name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=dict(logprob_triton.OPTIONS))
        assert compiled.asm["cubin"]
