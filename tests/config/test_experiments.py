"""Every shipped experiment composes, is valid, and fits the GPUs that it is for."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.load import ROOT, load
from megatron_fleet.config.sections.hosted import HOSTED
from megatron_fleet.envs.embedded_server import MAX_SESSIONS
from megatron_fleet.planning.hardware import gpu_of
from megatron_fleet.planning.hosted_run import make_hosted_plan
from megatron_fleet.planning.plan import make_plan
from megatron_fleet.planning.workload import Workload

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
ON_CPU = ("faults", "quickstart", "smoke")
SHAPES = {"gpu_smoke": "model.path=Qwen3-0.6B"}
"""Experiments whose model is made first, and one of the same shape."""


@cache
def composed(name: str):
    return load([f"experiment={name}", *filter(None, [SHAPES.get(name)])])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_valid_and_fits(name, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://nobody")  # whose prices are not looked up
    config = composed(name)
    validate.check(config)
    if config.policy.trainer == HOSTED:
        hosted = make_hosted_plan(config, Workload.of(config.rollout, config.env))
        assert hosted.step.trained > 0 and hosted.seconds > 0 and hosted.cycles == 1
        return
    plan = make_plan(config, gpu_of(config.cluster), Workload.of(config.rollout, config.env))
    assert plan.problem is None
    assert plan.step is not None and plan.step.total > 0
    assert (config.cluster.gpu is None) == (name in (*ON_CPU, "gpu_smoke"))
    if name not in ON_CPU:
        hosts = max(1, config.cluster.nodes) + config.rollout.engine.elastic
        assert plan.devices == plan.step.devices == 8 * hosts or name == "gpu_smoke"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_where_its_numbers_come_from(name):
    text = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    first, *comment = text.split("defaults:")[0].splitlines()
    assert first == "# @package _global_"
    assert comment and all(not line or line.startswith("#") for line in comment)
    assert composed(name).run.name in {name, "quickstart", "faults"}


def test_ablations_differ_from_their_base_in_what_they_are_named_for():
    base = composed("qwen3_8b_fleet")
    assert base.algorithm.kl.coef > 0 and composed("qwen3_8b_fleet_no_kl").algorithm.kl.coef == 0
    assert composed("qwen3_8b_fleet_sequence_mean").algorithm.model_copy(
        update={"reduction": base.algorithm.reduction}
    ) == (base.algorithm)
    apart = composed("qwen3_8b_fleet_async")
    assert apart.rollout.max_staleness == 2 and apart.rollout.engine.colocated is False
    engine = base.rollout.engine
    for name, changed in (
        ("ngram", {"speculative": engine.speculative.model_copy(update={"method": "ngram"})}),
        ("fp8_kv", {"kv_cache_dtype": "fp8"}),
        ("fp8_engines", {"quantization": "fp8"}),
    ):
        config = composed(f"qwen3_8b_fleet_{name}")
        watched = {key: getattr(config.rollout.engine, key) for key in ("probe_interval", "probe_tolerance")}
        assert config.rollout.engine == engine.model_copy(update=changed | watched)
        assert config.policy.safety.mismatch_kl < base.policy.safety.mismatch_kl
        # Engines in FP8 sample from another policy: weighted, and compared with the trainer's.
        fp8 = name != "ngram"
        assert (config.algorithm.correction.kind == "token_tis") == fp8 == (config.rollout.engine.probe_interval > 0)
    two = composed("qwen3_8b_fleet_2node")
    assert two.rollout.prompts_per_step == base.rollout.prompts_per_step
    assert two.parallel.world_size == 2 * base.parallel.world_size == 8 * two.cluster.nodes


def test_the_benchmark_has_the_batch_that_it_is_compared_with():
    """NeMo RL's grpo_math_8B: 64 prompts of 32 samples, 4,096 tokens, every sample trained on."""
    config = composed("qwen3_8b_bench")
    rollout = config.rollout
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_context) == (64, 32, 4096)
    assert rollout.episodes_in_flight == 64 * 32 <= rollout.engine.replicas * rollout.engine.max_num_seqs
    assert config.algorithm.group_filter == "none" and config.algorithm.masked_outcomes == ()
    assert config.algorithm.kl.coef == 0 and config.env.kind == config.data.tasks == "embedded"
    assert rollout.episodes_in_flight <= MAX_SESSIONS


def test_smoke_is_one_environment_four_tasks_ten_steps():
    from megatron_fleet.data.dataset import run_dataset

    config = composed("smoke")
    tasks = [*run_dataset(config).split.train, *run_dataset(config).split.held_out]
    assert len(tasks) == 4 and len({task.env_key for task in tasks}) == 1 and config.run.steps == 10
