"""Plans: time follows from layout, length and GPUs; what does not fit is said; layouts are searched."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

pytest.importorskip("hydra")

from waiting import HANG_S

from megatron_fleet import cli
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import ClusterConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import validate
from megatron_fleet.planning import training
from megatron_fleet.planning.hardware import GPUS, other_kind
from megatron_fleet.planning.plan import make_plan, with_engines
from megatron_fleet.planning.plan_command import KINDS
from megatron_fleet.planning.rollout import CONTEXT_SHARE, SEQUENCE_S, STEP_S, Engine, assumptions
from megatron_fleet.planning.scaling import scaled
from megatron_fleet.planning.search import layouts, search
from megatron_fleet.planning.shapes import KNOWN, shape_of
from megatron_fleet.planning.show import as_text
from megatron_fleet.planning.step import active_parameters, parameters, step_time
from megatron_fleet.planning.workload import Workload
from megatron_fleet.rollout.concurrency import SOFT

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from published_configs import published

H100 = GPUS["H100"]
FULL = "policy.recompute=full"


@cache
def composed(*overrides: str, experiment: str = "qwen3_8b_fleet"):
    return load([f"experiment={experiment}", *overrides])


def times(*overrides: str, gpu=H100, mean: float | None = None, experiment: str = "qwen3_8b_fleet"):
    config = composed(*overrides, experiment=experiment)
    shape, _ = shape_of(config.model.path)
    return step_time(config, shape, read_model(shape), gpu, Workload.of(config.rollout, config.env, mean))


@pytest.mark.parametrize("name", sorted(set(KNOWN) & set(published())))
def test_known_shapes_are_those_of_the_published_files(name):
    ours, theirs = read_model(KNOWN[name]), read_model(published()[name])
    no_size = {"norm_eps", "rope"}
    for field in dataclasses.fields(ours):
        assert field.name in no_size or getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.rope.kind == theirs.rope.kind or name.startswith("Llama")
    assert bool(KNOWN[name].get("quantization_config")) == bool(published()[name].get("quantization_config")) or (
        name.startswith("Kimi")
    )


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [("Qwen3-8B", 8.19, 8.19), ("Qwen3-30B-A3B", 30.5, 3.3), ("DeepSeek-V3", 671, 37.5), ("Kimi-K2.5", 1026, 32.9)],
)
def test_parameters(name, whole, active):
    model = read_model(KNOWN[name])
    assert parameters(model) / 1e9 == pytest.approx(whole, rel=0.01)
    assert active_parameters(model) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_shape_is_found_by_the_name_of_the_folder_or_repository(tmp_path):
    assert shape_of("Qwen/Qwen3-8B")[0] == shape_of("/models/Qwen3-8B-64k")[0] == KNOWN["Qwen3-8B"]
    with pytest.raises(UserError, match=r"model\.path=/models/Qwen3-80B: config\.json is missing"):
        shape_of("/models/Qwen3-80B")
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen3-4B"]))
    assert shape_of(str(tmp_path))[0] == KNOWN["Qwen3-4B"]


def test_lengths_have_the_mean_and_the_cut_that_are_asked_for():
    load = Workload(episodes=64, mean=10_000, longest=32_768)
    lengths = load.lengths(500)
    assert lengths.mean() == pytest.approx(10_000, rel=1e-3) and lengths.max() <= 32_768
    assert (lengths[1:] >= lengths[:-1]).all() and lengths[-1] > 3 * 10_000


def test_training_is_not_faster_than_the_gpus_and_scales_with_them():
    eight, sixteen = times(FULL), times(FULL, "parallel.data=8", "rollout.engine.replicas=8")
    assert 0.2 < eight.mfu < 0.5
    assert eight.seconds("training") / sixteen.seconds("training") == pytest.approx(2, rel=0.03)
    longer = times(FULL, mean=2 * 0.3 * 65536)
    assert longer.seconds("training") > 2 * eight.seconds("training")  # attention grows faster than its tokens
    without = times("policy.recompute=none").seconds("training")
    assert 0.7 < without / eight.seconds("training") < 0.8
    halves = [times("policy.recompute=18"), times("policy.recompute=9", "parallel.pipeline=2", "parallel.data=2")]
    pipelined = times("parallel.pipeline=2", "parallel.data=2", "policy.recompute=none").seconds("training")
    full = times(FULL, "parallel.pipeline=2", "parallel.data=2").seconds("training")
    assert [half.seconds("training") for half in halves] == pytest.approx(
        [(without + eight.seconds("training")) / 2, (pipelined + full) / 2]
    )


def test_an_optimizer_in_host_memory_takes_the_threads_that_it_is_given():
    """By default all cores of the host."""

    def seconds(*keys: str) -> float:
        return times("policy.optimizer.offload_fraction=1", *keys).phases["training"]["optimizer"]

    assert seconds("policy.threads=1") > 2 * seconds("policy.threads=1024") == 2 * seconds()


def test_experts_of_one_host_need_no_network():
    slow = dataclasses.replace(H100, network=H100.network / 1000)

    def seconds(experts: int, gpu) -> float:
        keys = (f"parallel.expert={experts}", "parallel.data=8")
        return times(*keys, gpu=gpu, experiment="qwen3_30b_a3b_fleet").phases["training"]["expert parallel"]

    assert seconds(8, slow) == seconds(8, H100) > 0
    assert seconds(16, slow) > 10 * seconds(16, H100)


def test_a_pipeline_has_a_bubble_of_its_stages():
    keys = ("parallel.tensor=1", "parallel.pipeline=4", "parallel.data=2")
    parts = times(*keys).phases["training"]
    config = composed(*keys)
    count = training.micro_batches(config, Workload.of(config.rollout, config.env), 1)
    stages = ("matrix products", "attention", "head")
    work = sum(parts.get(name, 0.0) for name in stages)
    # Middle stages have no head; the slowest stage sets the pace.
    assert parts["pipeline bubble"] / work == pytest.approx(3 / count, rel=0.05)


def engine_of(*overrides: str, overlapped: bool = True, accepted: float | None = None) -> Engine:
    config = composed(*overrides)
    shape, _ = shape_of(config.model.path)
    return Engine.of(
        config, shape, read_model(shape), H100, Workload.of(config.rollout, config.env, accepted=accepted), overlapped
    )


def test_an_engine_is_faster_with_more_sequences_and_slower_for_each():
    engine = engine_of("rollout.engine.replicas=8", "rollout.engine.tensor_parallel=1")
    steps = [engine.step_s(n) for n in (1, 8, 32, 128)]
    assert steps == sorted(steps) and 128 / steps[3] > 32 / steps[2] > 8 / steps[1]
    assert engine.bound == "KV cache" and engine.slots * 0.5 * 0.3 * 65536 < engine.kv_tokens
    assert engine.ends(engine.load.lengths(32)).max() > 32 * 0.3 * 65536 / engine.tokens_per_s()


def test_what_auto_is_taken_for_is_assumed_and_a_number_is_not():
    small, large = (engine_of(f"rollout.engine.kv_cache_bytes={size << 30}") for size in (10, 1000))
    for engine, slots in ((small, int(small.kv_tokens * SOFT / (CONTEXT_SHARE * small.load.mean))), (large, 64)):
        assert engine.slots == slots
        assert assumptions(engine.config, engine) == [
            f"rollout.episodes_in_flight=auto: {4 * slots} episodes at once, at most 256, and no more than fill the KV "
            f"caches to 75%"
        ]
    number = engine_of("rollout.engine.kv_cache_bytes=10737418240", "rollout.episodes_in_flight=256")
    assert number.slots > small.slots and number.kv_tokens == small.kv_tokens and not assumptions(number.config, number)
    assert assumptions(large.config, None) == ["rollout.episodes_in_flight=auto: 256 episodes at once"]
    double = scaled(large.config, 2).rollout
    assert (double.episodes_in_flight, double.most_in_flight()) == ("auto", 512)


def test_the_host_works_while_the_device_does():
    """Whichever takes longer is the time of a step; without graphs, or with an older vLLM, both together are."""
    together, in_turns = engine_of(), engine_of(overlapped=False)
    host = STEP_S + 64 * SEQUENCE_S
    assert in_turns.step_s(64) - together.step_s(64) == pytest.approx(host)
    assert together.step_s(1) >= STEP_S + SEQUENCE_S > in_turns.step_s(1) - together.step_s(1)
    eager = engine_of("rollout.engine.enforce_eager=true")
    assert eager.step_s(1) > in_turns.step_s(1) and eager.step_s(64) == pytest.approx(in_turns.step_s(64))


def test_a_drafter_is_worth_what_is_accepted():
    ngram = ("rollout.engine.speculative.method=ngram", "rollout.engine.speculative.tokens=3")
    none, all_wrong, all_right = engine_of(), engine_of(*ngram, accepted=0), engine_of(*ngram, accepted=1)
    assert none.step_s(1) <= all_wrong.step_s(1)
    assert all_wrong.step_s(1) / all_right.step_s(1) == pytest.approx(4, rel=0.05)
    # With so many sequences that products take longer than the weights, drafts that are wrong cost time.
    assert all_wrong.step_s(512) > 1.1 * none.step_s(512) and 0 < engine_of(*ngram).load.accepted < 1
    at_the_end = engine_of(*ngram, "rollout.engine.speculative.max_sequences=8", accepted=1)
    assert (at_the_end.step_s(8), at_the_end.step_s(9)) == (all_right.step_s(8), none.step_s(9))


def test_engines_apart_work_while_the_trainer_does():
    apart = times(experiment="qwen3_8b_fleet_async")
    assert apart.concurrent and apart.devices == 8
    assert apart.total == max(apart.seconds("rollout"), apart.trainer)
    together = times()
    assert not together.concurrent and together.total == together.seconds("rollout") + together.trainer
    assert together.binds == ("rollout", "full engines")


def test_a_plan_on_the_terminal(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", "experiment=qwen3_8b_fleet", "--price", "2", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for shown in (
        "8.19B parameters",
        "together, of 79.6",
        "bottleneck: rollout",
        "GPU-hours a step",
        "at 2 a GPU-hour",
    ):
        assert shown in text
    assert len(ElementTree.parse(picture).findall(".//{*}svg")) == 3


def test_a_plan_as_json(capsys):
    assert cli.main(["plan", "experiment=qwen3_8b_fleet", "--json", "--tokens", "8000", "--price", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["gpus"] == 8
    assert found["gpu_hours"] == pytest.approx(8 * found["step_seconds"] / 3600)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    assert sum(sum(parts.values()) for parts in found["seconds"].values()) == pytest.approx(found["step_seconds"])


def test_what_does_not_fit_is_said_with_what_does(capsys):
    assert cli.main(["plan", "experiment=kimi_k2_5_fleet", "--gpu", "H100"]) == 2
    printed = capsys.readouterr()
    assert "together, of 79.6" in printed.out
    assert "does not fit into 256 H100" in printed.err and "(--gpu H200)" in printed.err
    assert cli.main(["plan", "experiment=qwen3_8b_fleet", "policy.recompute=none"]) == 2
    assert "160.3 GiB are activations: set policy.recompute=full" in capsys.readouterr().err
    config = composed("rollout.engine.tensor_parallel=16", experiment="kimi_k2_5_fleet")
    assert "cannot extend over several hosts" in str(
        make_plan(config, H100, Workload.of(config.rollout, config.env)).problem
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "V100"], "--gpu V100 is not a known GPU; choose one of H100"),
        (["--tokens", "1e9"], "--tokens 1e+09 is out of its range"),
        (["--sampled", "0"], "--sampled 0 is out of its range"),
        (["--accepted", "0.3"], "--accepted 0.3 needs a drafter, but rollout.engine.speculative.method=none"),
        (["rollout.engine.speculative.method=mtp", "--accepted", "2"], "--accepted 2 is out of its range"),
        (["--search", "0"], "--search 0 searches layouts"),
        (["--search", "8", "--simulate"], "give one of them"),
        (["--simulate", "8", "--failures", "1"], "--failures from 0 to below 1"),
        (["--price", "-1"], "--price must be 0 or more, not -1."),
        (["--gpu-memory", "0"], "--gpu-memory 0 is not a GPU's memory"),
        (["--gpu", "P100"], "--gpu P100 is not a known GPU; choose one of H100, "),
    ],
)
def test_arguments_that_mean_nothing(words, message, capsys):
    assert cli.main(["plan", "experiment=qwen3_8b_fleet", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_experiment_is_planned_for_the_gpu_that_it_names(capsys):
    accepted = get_args(get_args(ClusterConfig.model_fields["gpu"].annotation)[0])
    assert set(accepted) < set(GPUS) == set(KINDS)
    for words, gpus in (
        (["experiment=kimi_k2_5_fleet"], "256 H200 on 32 hosts"),
        (["experiment=kimi_k2_5_fleet", "--gpu", "b300"], "256 B300 on 32 hosts"),
        (["experiment=gpu_smoke"], "1 H100 on 1 host"),
        (["experiment=gpu_smoke", "model.path=Qwen3-0.6B", "--gpu", "l4"], "1 L4 on 1 host"),
        (["experiment=gpu_smoke", "model.path=Qwen3-0.6B", "--gpu-memory", "32"], "1 H100 with 32 GiB on 1 host"),
    ):
        assert cli.main(["plan", *words]) == 0
        assert f"GPUs: {gpus}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "products", "other"),
    [
        ("H100", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"], None),
        ("H100", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"], "NVIDIA H200"),
        ("H20", ["NVIDIA H200"], "NVIDIA H200"),
        ("A100", ["NVIDIA A100-SXM4-80GB"], None),
        ("null", ["NVIDIA L40S"], None),
        ("H200", [], None),
    ],
)
def test_another_gpu_than_was_named(wanted, products, other):
    said = other_kind(composed(f"cluster.gpu={wanted}").cluster, products)
    assert said is None if other is None else said.startswith(f"cluster.gpu={wanted}, but the GPU here is {other}: ")


def test_planning_imports_no_torch():
    program = "import sys\nfrom megatron_fleet import cli\n"
    program += "cli.main(['plan', 'experiment=kimi_k2_5_fleet'])\n"
    program += "print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_layouts_use_all_ranks_and_are_valid():
    model, shape = read_model(KNOWN["Qwen3-30B-A3B"]), KNOWN["Qwen3-30B-A3B"]
    found = list(layouts(model, 16, 8))
    assert len(found) == len(set(found)) > 50
    accepted = 0
    for parallel in found:
        assert parallel.world_size == 16
        try:
            validate(shape, parallel, "full")
        except UserError:
            continue
        accepted += 1
    assert accepted > 30


def test_a_search_ranks_what_fits():
    config = composed()
    found = search(config, H100, Workload.of(config.rollout, config.env), 8, top=4)
    seconds = [one.step.total for one in found]
    assert seconds == sorted(seconds) and seconds[0] < times().total
    again = load(["experiment=qwen3_8b_fleet", *found[0].overrides])
    assert again.parallel == found[0].config.parallel and again.policy == found[0].config.policy
    assert any(isinstance(one.config.policy.recompute, int) for one in found)
    plan = make_plan(again, H100, Workload.of(again.rollout, again.env))
    assert plan.problem is None and plan.devices == 8 and plan.step.total == pytest.approx(seconds[0])


def test_a_search_that_finds_nothing_says_why():
    config = composed(experiment="qwen3_32b_fleet")
    with pytest.raises(UserError, match="No layout of 1 H100 fits; use more GPUs, or larger ones"):
        search(config, H100, Workload.of(config.rollout, config.env), 1)


@pytest.mark.parametrize("experiment", ["qwen3_8b_fleet", "qwen3_8b_fleet_spot"])
def test_engines_that_the_hosts_decide_about_are_planned_with_as_many_gpus_as_the_ranks_have(experiment):
    config = with_engines(load([f"experiment={experiment}", "rollout.engine.replicas=auto"]))
    assert config.rollout.engine.count * config.rollout.engine.tensor_parallel == config.parallel.world_size == 8
    assert with_engines(config) is config


def test_evaluation_engines_have_gpus_of_their_own_in_a_plan():
    apart = ("rollout.engine.colocated=false", "eval.interval=5")
    plans = []
    for more in ((), ("eval.engines=2",)):
        config = composed(*apart, *more)
        plans.append(make_plan(config, H100, Workload.of(config.rollout, config.env)))
    without, with_them = plans
    size = without.config.rollout.engine.tensor_parallel
    assert with_them.devices == with_them.step.devices == without.devices + 2 * size
    assert with_them.step.total == without.step.total and with_them.problem == without.problem
    assert sum(len(device.devices) for device in with_them.memory.devices) == with_them.devices
    assert f"evaluation engines: 2 of {size} GPUs; an evaluation adds nothing to a step, unless" in as_text(
        with_them, None
    )
    assert "evaluation engines" not in as_text(without, None)
    shared = composed("rollout.engine.colocated=null", "eval.interval=5", "eval.engines=1")
    problem = make_plan(shared, H100, Workload.of(shared.rollout, shared.env)).problem
    assert problem is not None and problem.startswith("eval.engines=1 needs rollout.engine.colocated=false")


def test_a_search_leaves_gpus_to_evaluation_engines():
    config = composed("rollout.engine.colocated=false", "eval.interval=5", "eval.engines=1")
    for one in search(config, H100, Workload.of(config.rollout, config.env), 16, top=3):
        engine = one.config.rollout.engine
        assert one.step.devices == one.config.parallel.world_size + (engine.replicas + 1) * engine.tensor_parallel <= 16
