"""A checkpoint of one rank: time, and peak memory of host and device beyond what was there."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from battery import shapes
from battery.hardware import GIB
from battery.results import Report, Request
from megatron_fleet.trainer.base import AdamParams

if TYPE_CHECKING:
    from megatron_fleet.trainer.verbs import RankVerbs

LAYERS = 4
TOKENS = {"full": 4096, "tiny": 128}
LR = 1e-3
SAMPLE_S = 0.01


class HostPeak:
    """Peak of this process's resident memory inside the block, sampled.

    Attributes:
        growth: bytes beyond what was resident before.
    """

    def __enter__(self) -> HostPeak:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before, self.growth = self._process.memory_info().rss, 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(SAMPLE_S)
            self.growth = max(self.growth, self._process.memory_info().rss - self._before)


def measure(report: Report, request: Request) -> None:
    """Save, change the weights by a step, load, and compare log-probs."""
    report.doing("building the trainer")
    hf = shapes.model_config(request.size, LAYERS, shapes.SMALL_VOCABULARY)
    tokens, folder = TOKENS[request.size], Path(request.scratch) / "checkpoint"
    model = shapes.write_config(Path(request.scratch) / "model", hf)
    config = shapes.run_config(model, tokens, engine={"colocated": True})  # its tensors are counted
    verbs = shapes.make_verbs(config, "random")
    sizes = verbs.ready()["part_bytes"]
    share = sizes["parameters"] + sizes["optimizer"]
    report.figures(share_bytes=share)
    data = shapes.random_data(tokens, tokens, hf["vocab_size"])
    settings, adam = config.algorithm.model_dump(mode="json"), asdict(AdamParams.of(config.policy.optimizer, LR))

    def step() -> None:
        verbs.forward_backward([data], settings, per_sequence=False)
        verbs.optim_step(adam, math.inf)

    step()
    before = shapes.logprobs(verbs, data)
    seconds, host, device = watched(report, "save", lambda: verbs.save_state(str(folder)))
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    report.figures(
        bytes=nbytes,
        save_s=shapes.finite(seconds),
        save_gb_s=shapes.finite(nbytes / seconds / 1e9),
        host_over_share_gib=round((host - share) / GIB, 3),
    )
    if device is not None:
        report.figures(device_extra_gib=round(device / GIB, 3))
    else:
        report.leave_out("device memory of a save", "needs a GPU")
    step()
    changed = shapes.logprobs(verbs, data)
    seconds, _, _ = watched(report, "load", lambda: verbs.load_state(str(folder)))
    report.figures(load_s=shapes.finite(seconds), load_gb_s=shapes.finite(nbytes / seconds / 1e9))
    shutil.rmtree(folder)
    after = shapes.logprobs(verbs, data)
    report.figures(bit_equal=int(np.array_equal(after, before) and not np.array_equal(changed, before)))
    copied(report, verbs, folder.with_name("copied"), share)
    verbs.close()


def copied(report: Report, verbs: RankVerbs, folder: Path, share: int) -> None:
    """Time for which training waits while its state is copied for a background write. The first copy allocates."""
    took = []
    for number in ("first", "second"):
        folder.mkdir()
        seconds, host, _ = watched(report, f"{number} copy", lambda: verbs.copy_state(str(folder)))
        written, _, _ = watched(report, f"writing the {number}", lambda: verbs.written_state().result())
        shutil.rmtree(folder)
        took.append((seconds, host, written))
    (_, host, _), (seconds, _, written) = took
    report.figures(
        copy_s=shapes.finite(seconds),
        copy_gb_s=shapes.finite(share / seconds / 1e9),
        copy_host_gib=round(host / GIB, 3),
        written_s=shapes.finite(written),
    )


def watched(report: Report, verb: str, action: Callable[[], object]) -> tuple[float, int, int | None]:
    """Seconds, and bytes of host and device beyond what was there before; a row of the table ``memory``."""
    report.doing(verb)
    seconds: list[float] = []
    with HostPeak() as host:
        device = shapes.peak_bytes(lambda: seconds.append(shapes.timed(action)))
    report.row(
        "memory",
        verb=verb,
        seconds=shapes.finite(seconds[0]),
        host_gib=round(host.growth / GIB, 3),
        device_gib=None if device is None else round(device / GIB, 3),
    )
    return seconds[0], host.growth, device
