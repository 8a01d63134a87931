"""Loading, gathering, publishing and exporting with real GPTModel stages over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.policy.megatron")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

WORLD = 4


@pytest.mark.slow
def test_real_models_in_every_layout(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(WORLD):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        script = Path(__file__).with_name("megatron_ranks.py")
        with (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen([sys.executable, script, tmp_path], env=env, stdout=log, stderr=log))
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(WORLD)]
    assert codes == [0] * WORLD, "\n".join(log[-3000:] for log in logs)
    assert logs[0].count("passed") == 5

    for tag in ("t2p2d1-True", "t2p2d1-False"):
        before, after = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
            for name in (tag, f"{tag}-out")
        )
        tokens = torch.arange(60).view(2, 30)
        assert torch.equal(before(tokens).logits, after(tokens).logits)
