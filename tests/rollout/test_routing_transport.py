"""The experts of tokens travel from an engine to its client as they are, and only when asked for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from waiting import HANG_S

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.data.task import Task
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.engine_actor import _routing, _vllm_params
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.engine_server import EngineServer
from megatron_fleet.rollout.requests import CollectRequest

TOKEN = "secret"


@contextlib.asynccontextmanager
async def serving(routing: np.ndarray | None):
    starts = []

    async def generate(prompt: list[int], params: SamplingParams, session: str, images) -> Generation:
        starts.append(params.routing_start)
        return Generation(np.array([4], np.int32), np.zeros(1, np.float32), "stop", ((0, 0, 1),), routing)

    server = EngineServer(generate, TOKEN)
    endpoint = await server.listen("127.0.0.1")
    server.open()
    yield connect([endpoint], TOKEN, HANG_S), starts
    server.close()


@pytest.mark.parametrize(
    "routing",
    [
        np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) + 230,
        np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2) + 370,
        np.zeros((0, 3, 2), np.uint8),
        np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)[::2],
        None,
    ],
)
async def test_experts_arrive_as_sent(routing):
    async with serving(routing) as (engine, starts):
        got = await engine.generate([5, 6], SamplingParams(1.0, 4, (), routing_start=1), "s")
        await engine.generate([5, 6], SamplingParams(1.0, 4, ()), "s")
    assert starts == [1, None]
    if routing is None:
        assert got.routing is None
    else:
        assert got.routing.dtype == routing.dtype
        np.testing.assert_array_equal(got.routing, routing)


async def test_a_long_turn_of_a_large_model_fits_into_a_frame():
    routing = np.ones((65_536, 61, 8), np.int16)  # Kimi K2.5: 61 layers, 8 of 384 experts
    async with serving(routing) as (engine, _):
        got = await engine.generate([5], SamplingParams(1.0, 1, (), routing_start=0), "s")
    assert got.routing.shape == routing.shape and int(got.routing[-1, -1, -1]) == 1


def test_ids_of_many_experts_become_signed():
    """PyTorch knows few operations on uint16."""
    wide = np.array([[[383, 0]]], np.uint16)
    assert _routing(wide).dtype == np.int16 and _routing(wide).tolist() == [[[383, 0]]]
    narrow = np.array([[[255, 0]]], np.uint8)
    assert _routing(narrow) is narrow and _routing(None) is None


@pytest.mark.parametrize(("purpose", "trained"), [("train", True), ("eval", False)])
def test_only_what_is_trained_on_keeps_them(purpose, trained):
    task = Task(key="t", prompt="p", env_key="desk", verifier_code="")
    collection = Collection(CollectRequest(0, [task], 1, 1.0, purpose, 3), max_retries=0)
    assert [spec.trained for spec in collection.take(1)] == [trained]


def test_vllm_is_told_what_is_wanted(tmp_path):
    pytest.importorskip("vllm")
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert "enable_return_routed_experts" in {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    wanted, unwanted = SamplingParams(1.0, 4, (), routing_start=7), SamplingParams(1.0, 4, ())
    assert _vllm_params(wanted, 9).routed_experts_prompt_start == 7
    assert _vllm_params(unwanted, 9).routed_experts_prompt_start == 9  # the whole prompt is left out
