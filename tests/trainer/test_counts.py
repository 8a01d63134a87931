"""The counts of `benchmarks/counts.py` are not above those of the committed result, which performance.md shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from waiting import HANG_S

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("megatron_fleet.trainer.megatron")

import counts

from megatron_fleet.trainer.megatron import optimizer

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads(counts.RESULT.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="plays a device on a host that has none")
@pytest.mark.parametrize("kind", [kind for kind in counts.LAYER_KINDS if kind != "experts"])
def test_a_layer_gives_no_more_kernels_than_before(kind):
    with counts.alone():
        row = counts.row_of_kernels(kind)
    (before,) = [each for each in COMMITTED["kernels"] if each["layer"] == kind]
    assert (row["waits"], row["waits_by_design"]) == (0, 0)
    for name in ("forward", "backward", "forward_rest", "backward_rest", "copies"):
        assert 0 < row[name] <= before[name], name


@pytest.mark.skipif(torch.cuda.is_available(), reason="plays a device on a host that has none")
def test_no_more_bytes_are_sent_than_before():
    with counts.alone():
        sync = counts.sync_bytes()
    assert sync == COMMITTED["bytes"]["weight_sync"]
    assert counts.data_bytes() == COMMITTED["bytes"]["data"]


@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_are_gathered_once_after_all_optimizers(parts):
    done = []

    class Chunk:
        ddp_config = SimpleNamespace(overlap_param_gather=False)

        def start_param_sync(self):
            done.append("gathered")

    chunk, chain = Chunk(), SimpleNamespace(chained_optimizers=list(range(parts)))
    with optimizer._gathered_once([chunk], chain):
        for part in chain.chained_optimizers:
            done.append(f"updated {part}")
            chunk.start_param_sync()
    assert done == [*(f"updated {part}" for part in range(parts)), "gathered"]
    assert vars(chunk) == {}


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
def test_ranks_exchange_no_more_than_before():
    script = [sys.executable, str(ROOT / "benchmarks" / "counts.py"), "--only", "collectives"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert without_bytes(json.loads(done.stdout)) == without_bytes(COMMITTED)


def without_bytes(report):
    """Rows of collectives without what depends on the number of metrics."""
    return [{name: value for name, value in row.items() if name != "bytes"} for row in report["collectives"]]
