"""The trainer's state to host memory and back, against plain copies, and what the device gets back."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from battery import shapes
from battery.hardware import GIB
from battery.results import Report, Request
from megatron_fleet.algorithms.losses import sft_loss
from megatron_fleet.platform.device import device

if TYPE_CHECKING:
    from megatron_fleet.trainer.megatron.offload import TrainState

LAYERS = 8
CYCLES = {"full": 10, "tiny": 3}
TOKENS = 128


def measure(report: Report, request: Request) -> None:
    """Build and train one step, so that moments are not zero; then cycles of offload and onload."""
    report.doing("building the trainer")
    used_before = shapes.memory_used()
    hf = shapes.model_config(request.size, LAYERS, shapes.SMALL_VOCABULARY)
    policy = shapes.make_policy(shapes.run_config(shapes.write_config(Path(request.scratch), hf), TOKENS))
    policy.forward_backward([shapes.random_data(TOKENS, TOKENS, policy.vocab_size)], sft_loss)
    policy.optim_step(1e-3)
    state = policy.train_state()
    sizes = state.sizes()
    moved = sizes["parameters"] + sizes["optimizer"]  # gradients are dropped
    report.figures(bytes=moved)
    sums = checksums(state)
    cycles(report, state, CYCLES[request.size], used_before)
    report.figures(bit_equal=int(checksums(state) == sums))
    plain(report, min(moved, 8 * GIB))
    policy.close()


def cycles(report: Report, state: TrainState, count: int, used_before: int) -> None:
    """Rows of the table ``cycles``; the first, which makes the host's buffers, does not count in the medians."""
    report.doing("offload and onload")
    moved, held = report.result.figures["bytes"], sum(state.sizes().values())
    away, back, left, freed = [], [], [], []
    for cycle in range(1, count + 1):
        full = shapes.memory_used()
        away.append(shapes.timed(state.offload))
        empty = shapes.memory_used()
        back.append(shapes.timed(state.onload))
        left.append((empty - used_before) / GIB)
        freed.append((full - empty) / held)
        report.row(
            "cycles",
            cycle=cycle,
            offload_ms=shapes.finite(1e3 * away[-1]),
            onload_ms=shapes.finite(1e3 * back[-1]),
            left_gib=round(left[-1], 3),
        )
    report.figures(
        offload_gb_s=shapes.finite(moved / statistics.median(away[1:]) / 1e9),
        onload_gb_s=shapes.finite(moved / statistics.median(back[1:]) / 1e9),
    )
    if shapes.cuda():
        growth = round(left[-1] - left[1], 3)
        report.figures(freed_share=round(statistics.median(freed), 4), left_gib=round(left[-1], 3), growth_gib=growth)
    else:
        report.leave_out("memory that the device gets back", "needs a GPU")


def checksums(state: TrainState) -> list[int]:
    """A sum of the words of each storage of parameters and optimizer."""
    from megatron_fleet.trainer.megatron.offload import as_bytes

    storages = state.storages()
    return [
        int(as_bytes(storage)[: storage.nbytes() // 4 * 4].view(torch.int32).sum(dtype=torch.int64))
        for storage in [*storages["parameters"], *storages["optimizer"]]
    ]


def plain(report: Report, nbytes: int) -> None:
    """One copy each way between buffers that exist."""
    report.doing("plain copies")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=there.is_cuda)
    out = shapes.median_seconds(lambda: here.copy_(there), 3)
    back = shapes.median_seconds(lambda: there.copy_(here), 3)
    report.figures(plain_out_gb_s=shapes.finite(nbytes / out / 1e9), plain_back_gb_s=shapes.finite(nbytes / back / 1e9))
