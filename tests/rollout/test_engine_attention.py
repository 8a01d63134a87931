"""Which attention engines run on CPU must not depend on the CPU."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from rollout_config import rollout_config

from megatron_fleet.rollout.engine_arguments import engine_args

MODEL = Path(__file__).parents[2] / "assets" / "tiny"


@pytest.mark.parametrize("amx", [False, True])
def test_latent_attention_takes_float32_on_every_cpu(monkeypatch, amx):
    """Left alone, vLLM 0.32 takes AMX_MLA where there is AMX, and that refuses float32."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.attention import selector

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    arguments = engine_args(rollout_config(MODEL), "shm", cpu=True, can_sleep=False)
    wanted = AsyncEngineArgs(**arguments).attention_config
    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(VllmConfig(attention_config=wanted)):
        latent, plain = (selector.get_attn_backend(64, torch.float32, None, use_mla=mla) for mla in (True, False))
    selector._cached_get_attn_backend.cache_clear()
    assert (latent.get_name(), plain.get_name()) == ("CPU_MLA", "CPU_ATTN")
