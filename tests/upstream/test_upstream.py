"""Our calls of vLLM, Megatron-Core, Transformer Engine, FLA and Triton fit the releases that we install.

Read from sources, with the types followed: those of the packages installed here, and those recorded of the GPU
environment's, which are other versions or cannot be installed here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import record
from tiny_configs import FAMILIES, raw_config
from upstream_checks import EXEMPT, faults, nowhere
from upstream_engine_calls import misfits
from upstream_sources import Sources
from upstream_symbols import Together
from upstream_uses import Reader

from megatron_fleet.config.schema import Config, OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_fleet.platform.megatron.patches import patch_delayed_scaling

ATTENTION = "megatron.core.transformer.attention"
TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])


@pytest.fixture(scope="module")
def recorded():
    return record.Record.read()


@pytest.fixture(scope="module")
def installed(recorded):
    """What is not installed here is as recorded."""
    return Together(Sources(TORCH.parent), recorded)


@pytest.fixture(scope="module")
def readers(recorded, installed):
    return {"recorded": Reader(recorded), "installed": Reader(installed)}


@pytest.mark.parametrize("packages", ["installed", "recorded"])
def test_names_exist_and_calls_and_overrides_fit(packages, readers):
    reasons = [reason for key, reason in faults(readers[packages]).items() if key not in EXEMPT]
    assert not reasons, "\n".join([*reasons, "", "If the releases are right, the record may be old.", record.how()])


@pytest.mark.parametrize("packages", ["installed", "recorded"])
def test_the_reader_understands_the_code(packages, readers):
    """Were types lost, there would be nothing to compare."""
    targets = {(use.kind, use.target) for use in readers[packages].uses}
    assert {
        ("name", "megatron.core.extensions.transformer_engine:te_checkpoint"),
        ("call", "vllm.v1.engine.async_llm:AsyncLLM().sleep"),
        ("call", "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator"),
        ("call", f"{ATTENTION}:SelfAttentionSubmodules"),
        ("call", "transformer_engine.common.recipe:DelayedScaling"),
        ("call", "fla.ops.gated_delta_rule:chunk_gated_delta_rule"),
        ("call", "triton.language:load"),
        ("call", "transformer_engine.pytorch.optimizers.fused_adam:FusedAdam().initialize_state"),
        ("override", "vllm.distributed.weight_transfer.base:VLLMWeightSyncClient().update_weights"),
        ("override", f"{ATTENTION}:CoreAttentionBuilder().__call__"),
        ("override", "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias"),
    } - targets == set()
    assert readers[packages].unused == set()


def test_attributes_that_may_be_missing_exist_in_some_release(readers):
    found = nowhere(*readers.values())
    assert [reason for key, reason in found.items() if key not in EXEMPT] == []
    assert any(use.kind == "optional" for use in readers["recorded"].uses)


def test_exemptions_are_needed(readers):
    needed = set(nowhere(*readers.values())).union(*map(faults, readers.values()))
    assert set(EXEMPT) - needed == set()


def test_megatrons_own_calls_of_transformer_engine_fit(recorded):
    """They have their own releases, and no check of versions says that two of them fit."""
    assert len(recorded.engine_calls) > 100
    assert misfits(recorded.engine_calls, recorded) == {
        DELAYED: ["override_linear_precision"],  # mended by `patches.patch_delayed_scaling`
        GLOBAL_STATE: ["fp8_weights"],  # CUDA graphs of old releases, behind a check of the version
    }


DELAYED = "transformer_engine.common.recipe:DelayedScaling"
GLOBAL_STATE = "transformer_engine.pytorch.fp8:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer"


@pytest.mark.parametrize("more", ["", ", override_linear_precision=..."])
def test_fp8_with_delayed_scaling_can_be_made(more, recorded):
    """With the locked Transformer Engine, and with one that still takes what Megatron passes."""
    scope = {}
    parameters = recorded.lookup(DELAYED).parameters + more
    exec(f"class Recipe:\n    def __init__(self, {parameters}): self.given = dict(locals())", scope)
    (keywords,) = (k for where, k in recorded.engine_calls.items() if where.endswith(DELAYED) and "margin" in k)

    class TEDelayedScaling(scope["Recipe"]):
        def __init__(self, override):
            super().__init__(**dict.fromkeys(keywords, 1) | {"override_linear_precision": override})

    patch_delayed_scaling(SimpleNamespace(TEDelayedScaling=TEDelayedScaling))
    assert TEDelayedScaling((False, False, False)).given["amax_history_len"] == 1
    if more:
        assert TEDelayedScaling((False, False, True)).given["override_linear_precision"] == (False, False, True)
    else:
        with pytest.raises(ValueError, match="all products of a layer in FP8 or none"):
            TEDelayedScaling((False, False, True))


def test_the_record_is_of_the_locked_versions(recorded):
    assert recorded.versions == record.locked(), record.how()


def test_attributes_of_objects_of_unknown_type_exist_upstream(recorded, readers):
    """``getattr(module, "gone", None)`` is not an error, only useless."""
    from torch.distributed import BroadcastOptions, ProcessGroupGloo

    torch_has = {*dir(ProcessGroupGloo._Options()), *dir(BroadcastOptions())}
    found = readers["recorded"].loose
    gone = {name: where for name, where in found.items() if not recorded.attributes.get(name) and name not in torch_has}
    assert gone == {}, record.how()


def test_environment_variables_are_known_upstream(recorded):
    """`ELSEWHERE` has those that only torch's or NVIDIA's libraries read."""
    named = {name for names in recorded.environment.values() for name in names}
    documented = {name for name, file in ELSEWHERE.items() if name in (TORCH / file).read_text(encoding="utf-8")}
    assert record.variables() - named - NCCL == documented


ELSEWHERE = {
    "GLOO_SOCKET_IFNAME": "nn/parallel/distributed.py",
    "NCCL_SOCKET_IFNAME": "nn/parallel/distributed.py",
}
"""Variable → file of torch that explains it."""
NCCL = {"NCCL_IB_DISABLE", "NCCL_IB_TIMEOUT"}
"""Read by NCCL alone, see "Environment Variables" of its documentation."""


def test_torch_is_the_release_of_the_gpu_environment():
    """The type checker and all other tests then hold for its torch as well."""
    text = (record.ROOT / "requirements" / "engine-gpu.lock").read_text(encoding="utf-8")
    here = importlib.metadata.version("torch").partition("+")[0]
    assert f"\ntorch=={here} " in text


# Arguments that are not in the source as they are passed


@pytest.fixture(params=["installed", "recorded"])
def parameters(request, installed, recorded):
    symbols = {"installed": installed, "recorded": recorded}[request.param]
    return lambda target: set(symbols.lookup(target).signature.parameters)


CONFIG = "megatron.core.transformer.transformer_config"


def test_megatron_has_the_arguments_of_every_family(parameters, monkeypatch):
    from megatron_fleet.models.hf_config import read_model
    from megatron_fleet.models.megatron_config import megatron_arguments
    from megatron_fleet.trainer.megatron import build

    given = {"TransformerConfig": set(), "MLATransformerConfig": set(), "GPTModel": set()}

    def configuration(name, **arguments):
        given[name].update(arguments)
        return SimpleNamespace(**arguments)

    for name in ("TransformerConfig", "MLATransformerConfig"):
        monkeypatch.setattr(build, name, functools.partial(configuration, name))
    for family in FAMILIES:
        model = read_model(raw_config(family, "v4"))
        for recompute in ("full", ("core_attn",)):
            build.transformer_config(model, ParallelConfig(), None, recompute)
        given["GPTModel"] |= set(megatron_arguments(model).gpt)
    assert all(given.values())
    assert given["GPTModel"] - parameters("megatron.core.models.gpt:GPTModel") == set()
    assert given["TransformerConfig"] - parameters(f"{CONFIG}:TransformerConfig") == set()
    assert given["MLATransformerConfig"] - parameters(f"{CONFIG}:MLATransformerConfig") == set()


@pytest.mark.parametrize("recipe", ["model_dtype", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed"])
@pytest.mark.parametrize("offloaded", [0.0, 0.5])
def test_megatron_has_the_arguments_of_every_precision(recipe, offloaded, parameters):
    from megatron_fleet.trainer.megatron.precision import precision_arguments

    precision = PrecisionConfig(recipe=recipe, fp8_param_gather=recipe != "model_dtype", gradients="bfloat16")
    moments = OptimizerConfig(lr=1e-3, offload_fraction=offloaded, moments="bfloat16")
    transformer, gradients, optimizer = precision_arguments(precision, moments, experts=True)
    assert set(transformer) - parameters(f"{CONFIG}:TransformerConfig") == set()
    assert set(gradients) - parameters("megatron.core.distributed:DistributedDataParallelConfig") == set()
    assert set(optimizer) - parameters("megatron.core.optimizer:OptimizerConfig") == set()


def test_vllm_has_the_arguments_of_engines(parameters, tmp_path):
    from megatron_fleet.rollout.engine_arguments import engine_args

    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen3", "v4")), encoding="utf-8")
    config = Config.model_validate(
        {
            "run": {"name": "test", "out": "unused", "steps": 1},
            "model": {"path": str(tmp_path)},
            "policy": {"micro_batch_tokens": 4096, "optimizer": {"lr": 1e-3}},
            "data": {"tasks": "embedded"},
            "env": {"start_timeout_s": 300},
            "rollout": {
                "prompts_per_step": 1,
                "samples_per_prompt": 2,
                "max_context": 2047,
                "episodes_in_flight": 32,
                "sampling": {"max_tokens_per_turn": 32, "max_turns": 3},
            },
        }
    )
    given = set(engine_args(config, "cuda_ipc", cpu=False, can_sleep=True))
    assert given - parameters("vllm.engine.arg_utils:AsyncEngineArgs") == set()
