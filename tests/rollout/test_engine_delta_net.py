"""Engines on CPU whose model has Gated DeltaNet layers: their arguments, and the core of these layers in float32."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import torch.nn.functional as F
from rollout_config import rollout_config
from tiny_configs import raw_config
from vllm.engine.arg_utils import AsyncEngineArgs

from megatron_fleet.models.qwen3_5.modules import vllm as vllm_delta_net
from megatron_fleet.models.qwen3_5.modules.delta_rule import convolve, packed_rule, unit_length
from megatron_fleet.rollout.engine_arguments import engine_args

KEYS, VALUES, KEY, VALUE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * KEYS * KEY + VALUES * VALUE
LENGTHS = (5, 70)


@pytest.mark.parametrize(("family", "cached"), [("qwen3_5_moe", False), ("qwen3_5_text", False), ("qwen3", True)])
def test_prefixes_are_cached_for_attention_alone(tmp_path, family, cached):
    (tmp_path / "config.json").write_text(json.dumps(raw_config(family, "v4")))
    arguments = AsyncEngineArgs(**engine_args(rollout_config(tmp_path), "shm", cpu=True, can_sleep=False))
    assert (arguments.enable_prefix_caching, arguments.enable_chunked_prefill) == (cached, False)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def layer() -> SimpleNamespace:
    """Parts of vLLM's layer that the core reads; its caches hold what an earlier request left."""
    return SimpleNamespace(
        prefix="layer",
        kv_cache=(torch.full((4, WIDTH - 1, CHANNELS), 7.0), torch.full((4, VALUES, VALUE, KEY), 7.0)),
        head_k_dim=KEY,
        head_v_dim=VALUE,
        num_k_heads=KEYS,
        num_v_heads=VALUES,
        key_dim=KEYS * KEY,
        value_dim=VALUES * VALUE,
        tp_size=1,
        A_log=normal(VALUES),
        dt_bias=normal(VALUES + 1)[1:],
        conv1d=SimpleNamespace(weight=normal(CHANNELS, 1, WIDTH)),
    )


def whole(layer, mixed, b, a) -> torch.Tensor:
    """As the trainer computes both sequences."""
    q, k, v = convolve(mixed, layer.conv1d.weight, LENGTHS).split([KEYS * KEY, KEYS * KEY, VALUES * VALUE], -1)
    q, k = (unit_length(x.unflatten(-1, (-1, KEY))).repeat_interleave(VALUES // KEYS, 1) for x in (q, k))
    decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    return packed_rule(q, k, v.unflatten(-1, (-1, VALUE)), decay, b.sigmoid(), LENGTHS)


def test_prompts_and_single_tokens_are_what_the_trainer_computes(layer, monkeypatch):
    """One sequence is sampling when the other's prompt comes, in two parts; their slots hold what others left."""
    mixed, b, a = (normal(sum(LENGTHS), n) for n in (CHANNELS, VALUES, VALUES + 1))
    a = a[:, 1:]
    expected, found = whole(layer, mixed, b, a), torch.zeros(sum(LENGTHS), VALUES, VALUE)
    first, second = (0, 3), (1, LENGTHS[0])  # slot, first token

    def step(decodes: int, *parts: tuple[int, int, int, bool]) -> None:
        """Args: ``parts``: slot, first and last token, whether the sequence goes on."""
        rows = torch.cat([torch.arange(start, end) for _, start, end, _ in parts])
        batch = SimpleNamespace(
            num_decodes=decodes,
            num_prefills=len(parts) - decodes,
            non_spec_query_start_loc=torch.tensor([0, *(end - start for _, start, end, _ in parts)]).cumsum(0),
            non_spec_state_indices_tensor=torch.tensor([slot for slot, *_ in parts]),
            has_initial_state=torch.tensor([on for *_, on in parts]),
        )
        context = SimpleNamespace(no_compile_layers={"layer": layer}, attn_metadata={"layer": batch})
        monkeypatch.setattr(vllm_delta_net, "get_forward_context", lambda: context)
        out = torch.zeros(len(rows), VALUES, VALUE)
        vllm_delta_net._core(mixed[rows], b[rows], a[rows], out, "layer")
        found[rows] = out

    step(0, (first[0], 0, first[1], False))
    step(1, (first[0], 3, 4, True), (second[0], second[1], 40, False))
    step(1, (first[0], 4, 5, True), (second[0], 40, 74, True))
    step(1, (second[0], 74, 75, True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all((cache[2:] == 7.0).all() for cache in layer.kv_cache)


def test_other_dtypes_are_left_to_vllm(layer, monkeypatch):
    given = []
    monkeypatch.setattr(vllm_delta_net, "_bfloat16_core", lambda *arguments: given.append(arguments))
    arguments = (torch.zeros(1, CHANNELS, dtype=torch.bfloat16), *(torch.zeros(1, VALUES) for _ in range(3)), "layer")
    vllm_delta_net._core(*arguments)
    assert given == [arguments]
