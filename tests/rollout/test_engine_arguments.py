"""Each key of an engine reaches vLLM as the argument that it names, and vLLM takes it."""

from __future__ import annotations

import json
import os
import sys
from typing import get_args

import pytest

pytest.importorskip("vllm")

import tiny_models
from block_models import block_config
from rollout_config import rollout_config
from tiny_model import write_tiny_model

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.rollout import engine_actor, sampler
from megatron_fleet.rollout.engine_arguments import engine_args, environment
from megatron_fleet.weight_sync import vllm_plugin
from megatron_fleet.weight_sync.engine_model import FP8_FORMAT, FP8_LOADER
from megatron_fleet.weight_sync.vllm_plugin import LOADER, TRANSPORT

H100_BYTES = 80 << 30
NGRAM = {"method": "ngram", "tokens": 4, "ngram": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("arguments") / "model", 1)


def on_gpu(config: Config) -> dict:
    return engine_args(config, "cuda_ipc", cpu=False, can_sleep=True)


def on_cpu(config: Config) -> dict:
    return engine_args(config, "shm", cpu=True, can_sleep=False)


@pytest.mark.parametrize(
    ("engine", "changed"),
    [
        ({"tensor_parallel": 2}, {"tensor_parallel_size": 2}),
        ({"expert_parallel": True}, {"enable_expert_parallel": True}),
        ({"max_num_seqs": 77}, {"max_num_seqs": 77}),
        ({"max_num_batched_tokens": 9000}, {"max_num_batched_tokens": 9000}),
        ({"enforce_eager": True}, {"enforce_eager": True}),
        ({"max_cuda_graph_size": 256}, {"max_cudagraph_capture_size": 256}),
        ({"prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_bytes": 1 << 34}, {"kv_cache_memory_bytes": 1 << 34}),
        ({"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.9}),
        ({"routing_replay": True}, {"enable_return_routed_experts": True}),
        ({"colocated": True}, {"enable_sleep_mode": True}),
        (
            {"speculative": NGRAM},
            {
                "speculative_config": {
                    "method": "ngram_gpu",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_min": 3,
                    "prompt_lookup_max": 3,
                }
            },
        ),
        (
            {"speculative": {"method": "mtp", "tokens": 1}},
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        ),
        (
            {"speculative": {"method": "mtp", "tokens": 1}, "colocated": True},
            {
                "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
                "enable_sleep_mode": True,
                # No update sends the drafter's weights, which level-2 sleep would drop.
                "sleep_preserve_parameter_names": ["draft.*"],
            },
        ),
    ],
)
def test_a_key_changes_its_argument_and_no_other(model, engine, changed):
    before, after = on_gpu(rollout_config(model, {"max_num_seqs": None})), on_gpu(rollout_config(model, engine))
    if "max_num_seqs" not in engine:
        after["max_num_seqs"] = before["max_num_seqs"]
    if "kv_cache_bytes" not in engine:
        after["kv_cache_memory_bytes"] = before["kv_cache_memory_bytes"]
    assert {name: value for name, value in after.items() if value != before[name]} == changed


@pytest.mark.parametrize(("limit", "schedule"), [(None, None), (8, None), (4, [(1, 4, 1), (5, 8, 0)])])
def test_drafts_end_where_the_batch_is_large(model, limit, schedule):
    drafter = {"method": "mtp", "tokens": 1, "max_sequences": limit}
    made = on_gpu(rollout_config(model, {"speculative": drafter, "max_num_seqs": 8}))["speculative_config"]
    assert made.get("num_speculative_tokens_per_batch_size") == schedule


def test_as_many_sequences_as_episodes_are_played_at_once(model):
    for episodes, sequences in ((32, 32), (5000, 1024), ("auto", 256)):
        config = rollout_config(model, {"max_num_seqs": None}, episodes_in_flight=episodes)
        assert on_gpu(config)["max_num_seqs"] == on_cpu(config)["max_num_seqs"] == sequences


def test_on_cpus_a_step_holds_the_longest_sequence_and_prompts_are_not_cut(model):
    config = rollout_config(model, {"speculative": NGRAM})
    arguments = on_cpu(config)
    assert arguments["max_num_batched_tokens"] == 4096 and arguments["enable_chunked_prefill"] is False
    assert arguments["speculative_config"]["method"] == "ngram" and arguments["enforce_eager"]
    assert on_cpu(rollout_config(model, {"max_num_batched_tokens": 300}))["max_num_batched_tokens"] == 2048
    assert on_cpu(rollout_config(model, {"max_num_batched_tokens": 9000}))["max_num_batched_tokens"] == 9000


def test_a_full_episode_can_be_scored_where_the_model_is_long_enough(model):
    """Scoring generates one token more."""
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    for context, longest in ((256, 257), (limit - 1, limit), (limit, limit)):
        assert on_gpu(rollout_config(model, {}, max_context=context))["max_model_len"] == longest


@pytest.fixture(scope="module")
def block_model(tmp_path_factory):
    """A model whose matrices consist of whole blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "raw_config", block_config)
        return tiny_models.make("qwen3", tmp_path_factory.mktemp("arguments") / "blocks")


def with_recipe(config: Config, recipe: str, **precision) -> Config:
    update = {"recipe": recipe, **precision}
    return config.model_copy(update={"precision": config.precision.model_copy(update=update)})


@pytest.mark.parametrize(
    ("recipe", "quantization", "expected"),
    [
        ("model_dtype", "auto", False),
        ("fp8_blockwise", "auto", True),
        ("fp8_tensorwise", "auto", False),
        ("fp8_blockwise", "none", False),
        ("model_dtype", "fp8", True),
    ],
)
def test_engines_follow_the_trainers_precision(block_model, recipe, quantization, expected):
    arguments = on_gpu(with_recipe(rollout_config(block_model, {"quantization": quantization}), recipe))
    declared = arguments["hf_overrides"].get("quantization_config")
    assert (declared is not None) is expected and arguments["load_format"] == ("fleet_fp8" if expected else "auto")
    if declared is not None:
        assert declared["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
        assert declared["quant_method"] == "fp8" and declared["weight_block_size"] == [128, 128]


def test_layers_in_bf16_are_so_in_engines_too(block_model):
    config = with_recipe(rollout_config(block_model), "fp8_blockwise", bf16_layers_at_start=1)
    plain = on_gpu(config)["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
    first = {name for name in plain if name.startswith("model.layers.")}
    assert len(first) == 7 and all(name.startswith("model.layers.0.") for name in first)


def test_a_folder_that_is_quantised_is_loaded_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}})
    )
    arguments = on_gpu(with_recipe(rollout_config(tmp_path), "fp8_blockwise"))
    assert arguments["hf_overrides"] == {} and arguments["load_format"] == "auto"


def test_a_model_without_whole_blocks_is_refused(model):
    with pytest.raises(UserError, match=r"no layer can be quantised in blocks of 128 x 128.*quantization=none"):
        on_gpu(rollout_config(model, {"quantization": "fp8"}))


def test_vllm_takes_its_defaults_for_throughput(monkeypatch):
    """Those of `EngineActor`'s usage context, on an H100; vLLM's default context would compute 2,048 tokens a step."""
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    class Hopper:
        is_tpu = is_cpu = staticmethod(lambda: False)
        get_device_total_memory = staticmethod(lambda: H100_BYTES)
        get_device_name = staticmethod(lambda: "NVIDIA H100 80GB HBM3")

    monkeypatch.setattr(arg_utils, "current_platform", Hopper)
    tokens, sequences = arg_utils.AsyncEngineArgs.get_batch_defaults(1)
    assert (tokens[UsageContext.LLM_CLASS], sequences[UsageContext.LLM_CLASS]) == (16384, 1024)
    assert UsageContext.ENGINE_CONTEXT not in tokens and SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048


@pytest.mark.slow
def test_vllm_schedules_ahead_with_what_engines_on_gpus_have(model):
    """`planning.rollout` relies on it; vLLM refuses other drafters and executors (``VllmConfig``)."""
    from vllm.config.speculative import EagleModelTypes, NgramGPUTypes
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    assert MultiprocExecutor.supports_async_scheduling() and UniProcExecutor.supports_async_scheduling()
    for drafter in (NGRAM, {"method": "mtp"}):
        arguments = on_gpu(rollout_config(model, {"speculative": drafter}))
        method = arguments["speculative_config"]["method"]
        assert method in {*get_args(EagleModelTypes), *get_args(NgramGPUTypes)}
        assert not {"async_scheduling", "distributed_executor_backend"} & set(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_seqs": 16, "max_num_batched_tokens": 5000, "prefix_caching": False, "kv_cache_dtype": "fp8"},
        {"speculative": NGRAM},
        {"quantization": "fp8"},
    ],
)
def test_vllm_accepts_the_arguments(block_model, monkeypatch, engine):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    for name, value in environment(cuda=False).items():
        monkeypatch.setenv(name, value)
    config = rollout_config(block_model, engine, max_context=255)
    if "quantization" in engine:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    made = AsyncEngineArgs(**on_cpu(config)).create_engine_config(UsageContext.LLM_CLASS)
    arguments = on_cpu(config)
    assert made.scheduler_config.max_num_seqs == arguments["max_num_seqs"]
    assert made.scheduler_config.max_num_batched_tokens == arguments["max_num_batched_tokens"]
    assert made.cache_config.cache_dtype == arguments["kv_cache_dtype"]
    assert made.cache_config.enable_prefix_caching is arguments["enable_prefix_caching"]
    assert made.model_config.quantization == ("fp8" if "quantization" in engine else None)
    if arguments["speculative_config"] is not None:
        assert made.speculative_config.method == "ngram" and made.speculative_config.num_speculative_tokens == 4


def test_the_arguments_of_gpus_are_vllms(model):
    """Names that vLLM does not have are refused; its configuration objects for CUDA cannot be made without it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = on_gpu(rollout_config(model, {"speculative": {"method": "mtp"}, "max_cuda_graph_size": 64}))
    made = AsyncEngineArgs(**arguments)
    assert {name: getattr(made, name) for name in arguments if name != "weight_transfer_config"} == {
        name: value for name, value in arguments.items() if name != "weight_transfer_config"
    }


def test_engine_logs_tell_what_takes_memory_on_gpus():
    assert environment(cuda=True)["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment(cuda=False)["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_engines_on_gpus_keep_float32_scales(monkeypatch):
    """DeepGEMM's default on Hopper would quantise weights anew, with scales rounded up to powers of two."""
    from vllm import envs

    name = "VLLM_USE_DEEP_GEMM_E8M0"
    assert envs.environment_variables[name]() is True
    monkeypatch.setenv(name, environment(cuda=True)[name])
    assert envs.environment_variables[name]() is False


class Started(Exception):
    """Raised where vLLM would be started."""


def test_an_engine_in_fp8_has_the_loader_in_all_its_processes(block_model, monkeypatch, tmp_path):
    """They inherit the variable by which vLLM's plugin registers it."""
    from vllm.config import LoadConfig
    from vllm.model_executor import model_loader
    from vllm.v1.engine.async_llm import AsyncLLM

    def start(*_, **__):
        raise Started

    for name in ("write_output_to", "take_normal_priority"):
        monkeypatch.setattr(sampler, name, lambda *_: None)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    monkeypatch.delitem(sys.modules, FP8_LOADER, raising=False)
    monkeypatch.setenv(TRANSPORT, "shm")
    monkeypatch.setenv(LOADER, "")
    monkeypatch.delenv(LOADER)
    for quantization, loaders in (("none", set()), ("fp8", {FP8_FORMAT})):
        config = rollout_config(block_model, {"quantization": quantization})
        with pytest.raises(Started):
            engine_actor.EngineActor(config, "", tmp_path / "log", "shm")._start()
        vllm_plugin.register()
        assert set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER) == loaders
    loader = model_loader.get_model_loader(LoadConfig(load_format=FP8_FORMAT))
    assert type(loader).__name__ == "Fp8Loader"
