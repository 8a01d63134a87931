"""Warning before a run whose Gated DeltaNet layers would use slow operators."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hydra")

from tiny_configs import raw_config  # noqa: E402

from megatron_fleet.models.qwen3_5.modules import delta_rule  # noqa: E402
from megatron_fleet.preflight import checks  # noqa: E402


@pytest.mark.parametrize(
    ("family", "gpu", "fla", "warned"),
    [
        ("qwen3_5_moe", True, False, True),
        ("qwen3_5_moe", True, True, False),
        ("qwen3_5_moe", False, False, False),
        ("qwen3", True, False, False),
    ],
)
def test_pytorchs_operators_on_a_gpu_are_warned_of(monkeypatch, caplog, family, gpu, fla, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(delta_rule, "fla_fault", lambda: None if fla else "install flash-linear-attention")
    checks._mixer(raw_config(family, "v5"))
    assert ("install flash-linear-attention" in caplog.text) == warned
