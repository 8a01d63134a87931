"""The device's own speed, beside which the other parts' figures stand."""

from __future__ import annotations

import torch

from battery import shapes
from battery.results import Report, Request


def measure(report: Report, request: Request) -> None:
    """Matrix products in BF16 and FP8, and a copy within the device's memory."""
    size = request.size
    report.doing("matrix product")
    report.figures(matrix_tflops=shapes.matrix_tflops(size))
    report.doing("copy")
    report.figures(copy_tb_s=shapes.copy_tb_s(size))
    if shapes.cuda() and torch.cuda.get_device_capability() < (8, 9):
        report.leave_out("FP8 matrix product", "needs compute capability 8.9 or above")
        return
    report.doing("FP8 matrix product")
    report.figures(matrix_fp8_tflops=shapes.matrix_fp8_tflops(size))
