"""Requirements of FP8 and of the optimizer's variants of model, layout and machine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import ParallelConfig, PrecisionConfig
from megatron_fleet.models.layout import token_alignment
from megatron_fleet.models.model import Model, Rope
from megatron_fleet.trainer import precision as rules
from megatron_fleet.trainer.precision import Machine, check_precision, machine_problem

BF16 = ("model.dtype=bfloat16",)
H100 = Machine((9, 0), (12, 9), (2, 8))
QWEN3_8B = Model(
    layers=36, hidden=4096, vocab=151936, ffn=12288, context=40960, heads=32, groups=8, head=128, norm_eps=1e-6,
    rope=Rope(1e6), qk_norm=True,
)  # fmt: skip
KIMI = Model(
    layers=61, hidden=7168, vocab=163840, ffn=18432, context=262144, heads=64, norm_eps=1e-5, rope=Rope(5e4),
    kv_lora=512, q_lora=1536, nope=128, rotated=64, value=128, experts=384, experts_per_token=8, expert_ffn=2048,
    shared_ffn=2048, moe_layers=(False,) + (True,) * 60,
)  # fmt: skip


def configured(*overrides):
    return load(["experiment=quickstart", *overrides])


def problem_of(config, machine):
    return machine_problem(config.policy, config.precision, machine)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["precision.bf16_layers_at_end=1"], ["precision.bf16_layers_at_end=1", "no effect"]),
        (["precision.fp8_param_gather=true"], ["precision.fp8_param_gather=True", "no effect"]),
        (["precision=fp8_tensorwise"], ["precision.recipe=fp8_tensorwise", "model.dtype=bfloat16"]),
        (
            ["precision=fp8_tensorwise", "policy.kernels=torch", *BF16],
            ["precision.recipe=fp8_tensorwise", "policy.kernels=torch", "policy.kernels=auto"],
        ),
        (
            ["policy.recompute=[moe_act]", "policy.kernels=torch"],
            ["policy.recompute=[moe_act]", "policy.kernels=torch"],
        ),
        (["precision=fp8_delayed", "precision.bf16_layers_at_start=1", *BF16], ["bf16_layers_at_start=0"]),
        (["precision=fp8_blockwise", "precision.fp8_param_gather=true", *BF16], ["fp8_param_gather", "fp8_tensorwise"]),
        (
            [
                "precision=fp8_tensorwise",
                "precision.fp8_param_gather=true",
                "policy.optimizer.offload_fraction=0.5",
                *BF16,
            ],
            ["fp8_param_gather", "offload_fraction=0.5", "fp8_delayed"],
        ),
        (["precision.gradients=bfloat16"], ["precision.gradients=bfloat16", "model.dtype=bfloat16"]),
        (["policy.optimizer.offload_fraction=1"], ["policy.optimizer.offload_fraction=1", "model.dtype=bfloat16"]),
        (
            ["policy.optimizer.moments=bfloat16", *BF16],
            ["policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9, 0.999]", "0.99"],
        ),
        (
            ["policy.optimizer.moments=bfloat16", "policy.optimizer.offload_fraction=1", *BF16],
            ["policy.optimizer.moments", "policy.optimizer.offload_fraction=1"],
        ),
    ],
)
def test_what_cannot_be_together_is_explained(overrides, told):
    with pytest.raises(UserError) as caught:
        validate.check(configured(*overrides))
    assert all(text in str(caught.value) for text in told), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=fp8_blockwise", "precision.bf16_layers_at_start=1", "precision.bf16_layers_at_end=2"],
        ["precision=fp8_tensorwise", "precision.fp8_param_gather=true", "precision.gradients=bfloat16"],
        ["precision=fp8_delayed", "precision.fp8_param_gather=true", "policy.optimizer.offload_fraction=0.5"],
        ["policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9,0.99]"],
        ["precision=model_dtype"],
    ],
)
def test_what_can_be_together_is_accepted(overrides):
    validate.check(configured(*overrides, *BF16))


@pytest.mark.parametrize(
    ("recipe", "alignment"),
    [("model_dtype", 1), ("fp8_tensorwise", 16), ("fp8_delayed", 16), ("fp8_blockwise", 128)],
)
def test_micro_batches_are_aligned_to_the_recipe(recipe, alignment):
    assert token_alignment(PrecisionConfig(recipe=recipe)) == alignment


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_blockwise", "fp8_delayed"])
def test_the_models_at_hand_fit(recipe):
    for tensor in (1, 2, 4, 8):
        check_precision(QWEN3_8B, ParallelConfig(tensor=tensor), PrecisionConfig(recipe=recipe))
        # Its compressed key and value, 576 wide, is not cut.
        check_precision(KIMI, ParallelConfig(tensor=tensor, expert=8, expert_tensor=1), PrecisionConfig(recipe=recipe))


@pytest.mark.parametrize(
    ("model", "parallel", "precision", "told"),
    [
        (
            QWEN3_8B,
            ParallelConfig(tensor=64),
            PrecisionConfig(recipe="fp8_blockwise"),
            ["multiples of 128", "together is 96"],
        ),
        (
            KIMI,
            ParallelConfig(tensor=1, expert=8, expert_tensor=32),
            PrecisionConfig(recipe="fp8_blockwise"),
            ["moe_inter", "64"],
        ),
        (
            KIMI,
            ParallelConfig(expert=8, expert_tensor=256),
            PrecisionConfig(recipe="fp8_tensorwise"),
            ["multiples of 16", "is 8"],
        ),
        (
            QWEN3_8B,
            ParallelConfig(),
            PrecisionConfig(recipe="fp8_tensorwise", bf16_layers_at_end=36),
            ["= 36", "36 layers"],
        ),
        (
            QWEN3_8B,
            ParallelConfig(pipeline=4),
            PrecisionConfig(recipe="fp8_tensorwise", bf16_layers_at_start=10),
            ["bf16_layers_at_start=10", "9 layers"],
        ),
    ],
)
def test_what_does_not_fit_is_explained(model, parallel, precision, told):
    with pytest.raises(UserError) as caught:
        check_precision(model, parallel, precision)
    assert all(text in str(caught.value) for text in told), str(caught.value)
    check_precision(model, parallel, PrecisionConfig())


@pytest.mark.parametrize(
    ("recipe", "machine", "told"),
    [
        ("fp8_tensorwise", Machine(), "needs a CUDA device"),
        ("fp8_tensorwise", Machine((8, 0), (12, 9), (2, 8)), "8.9 or above, and this GPU has 8.0"),
        ("fp8_tensorwise", Machine((9, 0), (12, 4), None), "Transformer Engine 2.2 or newer, and it is not installed"),
        ("fp8_tensorwise", Machine((9, 0), (12, 4), (2, 1)), "Transformer Engine 2.2 or newer, and here is 2.1"),
        ("fp8_blockwise", Machine((9, 0), (12, 4), (2, 8)), "CUDA 12.9, but found 9.0 and 12.4"),
        ("fp8_blockwise", Machine((10, 0), (13, 0), (2, 8)), "Hopper"),
        ("fp8_blockwise", Machine((9, 0), (12, 9), (2, 2)), "Transformer Engine 2.3"),
        ("fp8_delayed", Machine((9, 0), (12, 1), (1, 6)), "Transformer Engine 1.7"),
        ("fp8_tensorwise", Machine((8, 9), (12, 4), (2, 2)), None),
        ("fp8_blockwise", H100, None),
        ("fp8_blockwise", Machine((9, 0), (13, 0), (2, 10)), None),
        ("fp8_delayed", Machine((9, 0), (12, 1), (1, 13)), None),
        ("model_dtype", Machine(), None),
    ],
)
def test_the_machine_decides_which_recipes_run(recipe, machine, told):
    problem = problem_of(configured(f"precision={recipe}", *BF16), machine)
    assert problem is None if told is None else problem and told in problem, problem


def test_narrow_moments_need_transformer_engine_only_on_cuda():
    config = configured("policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9,0.95]", *BF16)
    assert problem_of(config, Machine()) is None
    assert problem_of(config, H100) is None
    problem = problem_of(config, Machine((9, 0), (12, 9), None))
    assert problem and "policy.optimizer.moments=bfloat16 needs Transformer Engine 2.1" in problem


def test_recompute_of_expert_activations_needs_transformer_engine():
    config = configured("policy.recompute=[moe_act]")
    assert problem_of(config, H100) is None
    problem = problem_of(config, Machine((9, 0), (12, 9), None))
    assert problem and "policy.recompute names moe_act" in problem
    assert problem_of(configured("policy.recompute=[moe]"), Machine()) is None


@pytest.mark.parametrize(
    ("overrides", "machine", "told"),
    [
        ([], Machine(), None),
        ([], H100, None),
        (
            [],
            Machine((9, 0), (13, 0), None),
            "policy.kernels=auto needs Transformer Engine on a CUDA device, and it is",
        ),
        ([], Machine((9, 0), (13, 0), None, "importing it failed: no x"), "and importing it failed: no x; install it"),
        (["policy.kernels=torch"], Machine((9, 0), (13, 0), None), None),
        (["policy.kernels=torch"], H100, None),
        (
            ["policy.kernels=torch", "policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9,0.95]"],
            H100,
            "policy.optimizer.moments=bfloat16 needs Transformer Engine 2.1 or newer, and policy.kernels=torch leaves",
        ),
    ],
)
def test_on_cuda_transformer_engine_is_needed_unless_it_is_left_out(overrides, machine, told):
    problem = problem_of(configured(*overrides, *BF16), machine)
    assert problem is None if told is None else problem and told in problem, problem


def test_the_machine_of_this_process_is_checked(monkeypatch):
    def check_machine(*overrides):
        config = configured(*overrides)
        rules.check_machine(config.policy, config.precision)

    monkeypatch.setattr(rules, "this_machine", lambda: Machine((9, 0), (13, 0), None))
    with pytest.raises(UserError, match=r"policy\.kernels=torch"):
        check_machine()
    check_machine("policy.kernels=torch")


@pytest.fixture
def cuda(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(rules.metadata, "version", lambda name: {"transformer-engine": "2.10.0+abc"}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def test_versions_are_read_as_numbers(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    assert rules.this_machine() == Machine((9, 0), (12, 9), (2, 10))


def test_an_installation_that_cannot_be_imported_is_none(cuda, monkeypatch):
    """Its compiled part for torch is a package of its own, and may be missing or made for another torch."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    machine = rules.this_machine()
    assert machine.engine is None and machine.engine_fault.startswith("importing it failed: ")
    problem = problem_of(configured(), machine)
    assert problem and machine.engine_fault in problem
