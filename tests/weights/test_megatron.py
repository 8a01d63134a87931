"""Loading, gathering, publishing and exporting with real GPTModel stages over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

WORLD = 4


@pytest.mark.slow
def test_real_models_in_every_layout(tmp_path):
    logs = run_ranks(Path(__file__).with_name("megatron_ranks.py"), WORLD, tmp_path)
    assert logs[0].count("passed") == 5

    for tag in ("t2p2d1-True", "t2p2d1-False"):
        before, after = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
            for name in (tag, f"{tag}-out")
        )
        tokens = torch.arange(60).view(2, 30)
        assert torch.equal(before(tokens).logits, after(tokens).logits)
