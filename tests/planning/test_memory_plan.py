"""Memory of each phase: the shipped experiments fit, what cannot fit is refused in one sentence."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from megatron_fleet import cli
from megatron_fleet.cluster import inventory
from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import ROOT, load
from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.loop.colocation import Phase
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.memory import check as memory_check
from megatron_fleet.planning.memory import engine_memory as engine_memory
from megatron_fleet.planning.memory import phases
from megatron_fleet.planning.memory.check import check_memory, describe_memory, host_bytes
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.memory.phases import H100_BYTES, RESERVE, run_memory, trainer_memory
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.preflight import checks
from megatron_fleet.weights.extend import extended

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from published_configs import published
from sparse_models import write_weights

HOST_GIB = 1000
# Experiment → model, GPUs of a node, memory of each.
EXPERIMENTS = {
    "qwen3_8b_fleet": ("Qwen3-8B", 8, H100_BYTES),
    "qwen3_8b_bench": ("Qwen3-8B", 8, H100_BYTES),
    "qwen3_30b_a3b_fleet": ("Qwen3-30B-A3B", 8, H100_BYTES),
    "moonlight_16b_fleet": ("Moonlight-16B-A3B", 8, H100_BYTES),
    "glm_4_7_flash_fleet": ("GLM-4.7-Flash", 8, H100_BYTES),
    "gpu_smoke": ("Qwen3-0.6B", 1, 24_000 << 20),
}
EXTENDED = {"qwen3_8b_fleet", "qwen3_30b_a3b_fleet"}
EMBEDDED = ("env=embedded", "data=embedded", "data.tasks=embedded", "env.fleet.ttl_s=1800")
"""Overrides for a run without an account."""
FOUR = (
    *("parallel.tensor=4", "parallel.data=2", "policy.recompute=full"),
    *("rollout.engine.replicas=8", "rollout.engine.tensor_parallel=1"),
)
"""Qwen3-8B with less on each GPU than its experiment: the layout for which figures are counted here."""


def hf_config(experiment: str) -> dict:
    hf = published()[EXPERIMENTS[experiment][0]]
    return extended(hf, 2.0, 32768) if experiment in EXTENDED else hf


@cache
def composed(experiment: str, *overrides: str):
    return load(
        [f"experiment={experiment}", "model.path=/model", *(EMBEDDED if "fleet" in experiment else ()), *overrides]
    )


def parts(experiment: str, phase: str, *overrides: str) -> dict[str, int]:
    """Parts of a phase on the first device."""
    config = composed(experiment, *overrides)
    found = run_memory(config, hf_config(experiment), EXPERIMENTS[experiment][2]).devices[0].phases
    return dict(next(each.parts for each in found if each.name == phase))


def test_every_experiment_for_gpus_is_planned():
    names = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert names >= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_fits_its_gpus(name):
    _, gpus, size = EXPERIMENTS[name]
    config = composed(name)
    validate.check(config)
    checks._layout(config, hf_config(name))
    devices = tuple(Device(i, f"GPU-{i}", "H100", size) for i in range(gpus))
    placed = place(
        Inventory((Host("node", "10.0.0.1", devices),)),
        PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines),
    )
    assert placed.colocated and placed.transport == "cuda_ipc"
    assert {d for engine in placed.engines for d in engine.devices} == set(range(gpus))
    memory = run_memory(config, hf_config(name), size)
    for device in memory.devices:
        for phase in device.phases:
            assert phase.total <= size - RESERVE, (phase.name, phase.parts)
    # Episodes of full length run beside each other, and the deadline of a turn is below that of its episode.
    assert memory.sequences > 2
    rollout = config.rollout
    turn = rollout.engine.turn_timeout_s(rollout.sampling.max_tokens_per_turn)
    assert rollout.episode_timeout_s > max(300, turn)
    assert sum(memory.host.values()) < HOST_GIB * GIB
    check_memory(config, hf_config(name), size, HOST_GIB * GIB)


ON_GPUS = ("policy.optimizer.offload_fraction=0",)


@pytest.mark.parametrize(
    ("name", "keys", "figure"),
    [
        ("qwen3_8b_fleet", (), 69),
        ("qwen3_8b_fleet", ("policy.recompute=none",), 214),
        ("qwen3_8b_fleet", ("policy.recompute=full",), 60),
        ("qwen3_8b_fleet", FOUR[:3], 40),
        ("qwen3_30b_a3b_fleet", (), 66),
        ("qwen3_30b_a3b_fleet", ON_GPUS, 111),
        ("qwen3_30b_a3b_fleet", (*ON_GPUS, *FOUR[:3], "policy.optimizer.moments=bfloat16"), 69),
        ("moonlight_16b_fleet", (), 62),
        ("glm_4_7_flash_fleet", (), 66),
        ("gpu_smoke", ("model.path=Qwen3-0.6B",), 19),
        ("qwen3_32b_fleet", (), 65),
        ("qwen3_32b_fleet", ON_GPUS, 113),
        ("qwen3_32b_fleet", ("parallel.tensor=8", "parallel.context=1"), 40),
        ("qwen3_8b_bench", (), 63),
        ("qwen3_8b_fleet_async", (), 70),
        ("qwen3_5_35b_a3b_fleet", (), 118),
        ("kimi_k2_5_fleet", (), 79),
    ],
)
def test_figures_in_the_comments_are_those_that_are_computed(name, keys, figure):
    config = load([f"experiment={name}", *keys])
    train, *_ = run_memory(config, shape_of(config.model.path)[0]).devices[0].phases
    assert round(train.total / GIB) == figure
    comment = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").split("defaults:")[0]
    assert re.search(rf"\b{figure}\b", comment)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_dry_run_shows_the_memory(name, tmp_path, monkeypatch, capsys):
    _, gpus, size = EXPERIMENTS[name]
    model = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "tiny", model)
    (model / "config.json").write_text(json.dumps(hf_config(name)))
    write_weights(model)
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\n" + "".join(f"echo '{i}, GPU-{i}, NVIDIA H100, {size >> 20}, Disabled'\n" for i in range(gpus))
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(inventory, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(checks, "host_bytes", lambda: HOST_GIB * GIB)
    keys = [f"experiment={name}", f"model.path={model}", f"run.out={tmp_path / 'out'}"]
    # vLLM's build for CPUs has no routing replay.
    keys += ["rollout.engine.routing_replay=false", *(EMBEDDED if "fleet" in name else ())]
    assert cli.main(["train", "--dry-run", *keys]) == 0
    text = capsys.readouterr().out
    assert f"rank {gpus - 1}" in text and "# memory" in text
    assert f"together, of {size / GIB:.1f}" in text and "KV cache of an engine" in text
    monkeypatch.setattr(checks, "host_bytes", lambda: GIB)
    assert cli.main(["train", "--dry-run", *keys]) == 2
    assert "GiB of host memory, and the host has 1 GiB; " in capsys.readouterr().err


def test_dry_run_plans_for_gpus_that_are_not_here(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "assets" / "tiny", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config("qwen3_8b_fleet")))
    write_weights(tmp_path / "model")
    keys = ["experiment=qwen3_8b_fleet", f"model.path={tmp_path / 'model'}", f"run.out={tmp_path / 'out'}", *EMBEDDED]
    assert cli.main(["train", "--dry-run", "--gpus", "8", *keys]) == 0
    text = capsys.readouterr().out
    assert "GPU 7  H100 (assumed), 80 GiB  rank 7" in text and "together, of 79.6" in text
    assert cli.main(["train", "--dry-run", "--gpus", "8", *keys, "policy.recompute=none"]) == 2
    assert "are activations: set policy.recompute=full" in capsys.readouterr().err
    assert cli.main(["train", "--dry-run", "--gpus", "4", *keys]) == 2
    assert "= 8 ranks need a GPU each, but there are 4" in capsys.readouterr().err
    for words in (["--gpus", "8"], ["--dry-run", "--gpus", "0"]):
        assert cli.main(["train", *words, *keys]) == 2
        assert "plans for GPUs that you do not have yet" in capsys.readouterr().err


def test_phases_are_those_of_the_run():
    names = [phase.name for phase in run_memory(composed("gpu_smoke"), hf_config("gpu_smoke")).devices[0].phases]
    assert sorted(names) == sorted([*map(str, Phase), "checkpoint"])


def test_memory_is_freed_before_it_is_claimed():
    """As `loop.colocation` orders it: what a phase holds of trainer and engine."""
    trainer, engine = {"parameters", "gradients", "optimizer"}, {"engine weights", "KV cache"}
    held = {phase: set(parts("qwen3_8b_fleet", phase)) & (trainer | engine) for phase in ("train", "sync", "roll")}
    assert held == {"train": trainer, "sync": {"parameters", "engine weights"}, "roll": engine}
    # The trainer's whole state and the engine's KV cache would not fit beside each other.
    both = sum(parts("qwen3_8b_fleet", "train").values()) + parts("qwen3_8b_fleet", "roll")["KV cache"]
    assert both > H100_BYTES


def test_engines_on_devices_of_their_own():
    memory = run_memory(composed("qwen3_8b_fleet", "rollout.engine.colocated=false"), hf_config("qwen3_8b_fleet"))
    ranks, engines = memory.devices
    assert (ranks.holds, engines.holds, engines.devices) == ("ranks", "engines", range(8))
    assert [phase.name for phase in engines.phases] == ["roll"]
    assert all("engine weights" not in phase.parts for phase in ranks.phases)
    assert memory.host["offloaded state"] == 0


def test_stages_of_a_pipeline_hold_different_memory():
    keys = ("parallel.tensor=1", "parallel.pipeline=2", "parallel.data=4", "policy.recompute=none")
    memory = run_memory(composed("qwen3_8b_fleet", *keys), hf_config("qwen3_8b_fleet"))
    first, last = memory.devices
    assert (first.devices, last.devices) == (range(4), range(4, 8))
    kept = [device.phases[0].parts["activations"] for device in (first, last)]
    assert 1.9 < kept[0] / kept[1] < 2.1  # two micro-batches in flight and one


@pytest.mark.parametrize(
    ("keys", "part", "factor"),
    [
        (("precision.gradients=bfloat16",), "gradients", 0.5),
        (("policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9,0.98]"), "optimizer", 8 / 12),
        (("policy.optimizer.offload_fraction=0.5",), "optimizer", 0.5),
        (("parallel.tensor=4", "parallel.data=2"), "parameters", 0.5),
        (("policy.micro_batch_tokens=131072",), "activations", 2),
    ],
)
def test_keys_that_change_a_part(keys, part, factor):
    before, after = (parts("qwen3_8b_fleet", "train", *changed)[part] for changed in ((), keys))
    assert after / before == pytest.approx(factor, rel=1e-3)


def test_offloaded_optimizer_states_are_in_host_memory():
    config, model = composed("qwen3_30b_a3b_fleet"), read_model(hf_config("qwen3_30b_a3b_fleet"))
    memory = trainer_memory(config, model, 0)
    assert memory.optimizer == 0 and memory.host_optimizer == 16 * memory.elements.shards
    whole = run_memory(config, hf_config("qwen3_30b_a3b_fleet")).host["optimizer on CPU"]
    assert whole == pytest.approx(16 * 30_532_122_624, rel=2e-3)  # of each parameter one rank has the states


def test_a_copy_for_asynchronous_checkpoints():
    """Bfloat16 weights, master weights and moments once over all ranks of the node, wherever they are."""
    for keys, per_parameter in (((), 14), (("policy.optimizer.offload_fraction=1",), 14), (BF16_MOMENTS, 10)):
        host = run_memory(composed("qwen3_8b_fleet", *keys), hf_config("qwen3_8b_fleet")).host
        # Each of eight ranks rounds up to a block.
        assert 0 <= host["checkpoint copy"] - per_parameter * 8_190_735_360 < 9 * phases.PINNED_BLOCK
    waiting = run_memory(composed("qwen3_8b_fleet", "checkpoint.asynchronous=false"), hf_config("qwen3_8b_fleet"))
    assert waiting.host["checkpoint copy"] == 0


BF16_MOMENTS = ("policy.optimizer.moments=bfloat16", "policy.optimizer.betas=[0.9,0.98]")


def test_tensors_on_their_way_to_the_engines():
    """A layer of 128 experts whole, and two of eight parts; the embedding of Qwen3-8B whole, and two of four parts."""
    experts = parts("qwen3_30b_a3b_fleet", "sync", "parallel.tensor=4", "parallel.data=2")
    layer = 128 * 3 * 2048 * 768
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    assert experts["gathered"] == pytest.approx(2 * (1.25 * layer + 1.5 * attention), rel=2e-3)
    assert experts["engine layer"] == pytest.approx((layer + attention), rel=1e-3)  # half of it on each device
    assert experts["transfer"] == GIB
    dense = parts("qwen3_8b_fleet", "sync", "parallel.tensor=4", "parallel.data=2", "rollout.engine.tensor_parallel=1")
    embedding = 2 * 151936 * 4096
    assert (dense["gathered"], dense["transfer"], dense["engine layer"]) == (1.5 * embedding, embedding, embedding)


def test_quantised_tensors_on_their_way_to_the_engines():
    """The experts of a layer of Kimi K2: INT4 and a bfloat16 scale for 32 weights, whole and two of 32 parts."""
    hf, layer = published()["Kimi-K2-Thinking"], 384 * 3 * 7168 * 2048
    kimi = phases.sync_buffers(composed("kimi_k2_5_fleet", "parallel.expert=32"), read_model(hf), hf)
    assert kimi["gathered"] == pytest.approx((0.5 + 2 / 32) * (1 + 2 / 32) * layer, rel=0.05)


def test_log_prob_buffers():
    """Qwen3-8B on four ranks: 3 × 2 × h × t, statistics, and the logits of 4,096 positions."""
    memory = trainer_memory(composed("qwen3_8b_fleet", *FOUR), read_model(hf_config("qwen3_8b_fleet")), 0)
    assert memory.head == 65536 * (6 * 4096 + 24) + 2 * 4096 * 151936 // 4
    halved = composed("qwen3_8b_fleet", *FOUR, "precision.gradients=bfloat16")
    more = trainer_memory(halved, read_model(hf_config("qwen3_8b_fleet")), 0)
    assert more.head - memory.head == 6 * 151936 // 4 * 4096


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("Qwen3-8B", (), 36 * 2 * 8 * 128 * 2),
        ("Qwen3-8B", ("rollout.engine.tensor_parallel=2",), 36 * 8 * 128 * 2),
        ("Qwen3-8B", ("rollout.engine.kv_cache_dtype=fp8",), 36 * 2 * 8 * 128),
        ("Qwen3-30B-A3B", ("rollout.engine.tensor_parallel=8",), 48 * 2 * 128 * 2),
        ("DeepSeek-V3", ("rollout.engine.tensor_parallel=8",), 61 * (512 + 64) * 2),
    ],
)
def test_kv_cache_of_a_token(name, keys, expected):
    config = composed("qwen3_8b_fleet", *FOUR, *keys)
    assert engine_memory.engine_memory(config, read_model(published()[name]), published()[name]).token == expected


@pytest.mark.parametrize(
    ("name", "keys", "gigabytes"),
    [
        ("Qwen3-8B", (), 16.38),
        ("Qwen3-8B", ("rollout.engine.tensor_parallel=2",), 8.19),
        ("Qwen3-8B", ("rollout.engine.quantization=fp8",), 9.44),
        ("Qwen3-30B-A3B", ("rollout.engine.tensor_parallel=2",), 30.5),
        ("DeepSeek-V3", (), 673),  # the published files without their multi-token prediction layer, in FP8
        ("Kimi-K2-Thinking", (), 594),  # the published files, experts in INT4
    ],
)
def test_weights_of_an_engine(name, keys, gigabytes):
    config, hf = composed("qwen3_8b_fleet", *FOUR, *keys), published()[name]
    weights = engine_memory.engine_memory(config, read_model(hf), hf).weights
    assert weights / 1e9 == pytest.approx(gigabytes, rel=0.01)
    sent = engine_memory.sent_bytes(config, read_model(hf), hf)
    assert sent / config.rollout.engine.tensor_parallel == pytest.approx(weights, rel=0.01)


def test_communicators_of_a_rank():
    dense, experts = (read_model(published()[name]) for name in ("Qwen3-8B", "Qwen3-30B-A3B"))
    assert phases.communicators(dense, ParallelConfig()) == 0
    # All ranks, data, tensor, and the tensor-parallel group once more as the group of one model replica.
    assert phases.communicators(dense, ParallelConfig(tensor=2, data=4)) == 4
    assert phases.communicators(experts, ParallelConfig(data=8, expert=8)) == 3


def checked(*overrides: str, device=H100_BYTES, host=HOST_GIB * GIB, name="qwen3_8b_fleet") -> None:
    layout = FOUR if name == "qwen3_8b_fleet" else ()
    check_memory(composed(name, *layout, *overrides), hf_config(name), device, host)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"overrides": ("policy.recompute=none",)},
            r"memory: phase train takes at least 1\d\d\.\d GiB on the GPUs of ranks 0–7, which have 79\.6 GiB; "
            r"\d+\.\d GiB are activations: set policy\.recompute=full, lower policy\.micro_batch_tokens=65536, or "
            r"raise parallel\.tensor=4\.",
        ),
        (
            {"overrides": ("policy.recompute=2",)},
            r"GiB are activations: raise policy\.recompute=2, lower policy\.micro_batch_tokens=65536, or raise",
        ),
        (
            {"overrides": ("policy.micro_batch_tokens=1048576",)},
            r"are activations: lower policy\.micro_batch_tokens=1048576, raise parallel\.tensor=4, or raise parallel",
        ),
        (
            {"overrides": ("parallel.tensor=2", "parallel.data=4"), "device": 20 * GIB},
            r"are gradients: raise parallel\.tensor=2, parallel\.pipeline=1 or parallel\.expert=1\.",
        ),
        (
            {"name": "qwen3_30b_a3b_fleet", "overrides": ("policy.optimizer.offload_fraction=0",), "device": 60 * GIB},
            r"are optimizer: raise parallel\.data=4, or set policy\.optimizer\.offload_fraction=1\.",
        ),
        (
            {"overrides": ("rollout.engine.gpu_memory_utilization=0.22",)},
            r"gpu_memory_utilization=0\.22 of 79\.6 GiB leaves room for \d+ tokens of KV cache, less than one sequence "
            r"of rollout\.max_context=65536; raise it or rollout\.engine\.tensor_parallel=1",
        ),
        (
            {"name": "gpu_smoke", "device": 6 * GIB},
            r"takes at least \d+\.\d GiB on the GPUs of rank 0, which have 6\.0",
        ),
        (
            {"name": "qwen3_30b_a3b_fleet", "host": 400 * GIB},
            r"and the host has 400 GiB; lower policy\.optimizer\.offload_fraction=1, or use more hosts\.",
        ),
        (
            {"host": 64 * GIB},
            r"takes 264 GiB of host memory, and the host has 64 GiB; set checkpoint\.asynchronous=false, or use",
        ),
    ],
)
def test_what_cannot_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        checked(*changes.pop("overrides", ()), **changes)


@pytest.mark.parametrize(
    "keys",
    [
        ("precision=fp8_tensorwise",),
        ("parallel.tensor=1", "parallel.pipeline=2", "parallel.data=4", "parallel.virtual=2"),
    ],
)
def test_activations_that_were_not_measured_refuse_nothing(keys, caplog):
    with caplog.at_level(logging.WARNING):
        checked(*keys, "policy.recompute=none")
    assert "phase train takes about" in caplog.messages[0]
    assert "are activations: set policy.recompute=full" in caplog.messages[0]


def test_a_kv_cache_that_estimates_leave_no_room_for(caplog):
    with caplog.at_level(logging.WARNING):
        checked("rollout.engine.gpu_memory_utilization=0.32")
    assert caplog.messages[0].startswith("rollout.engine.gpu_memory_utilization=0.32 of 79.6 GiB leaves room for")


def test_what_is_at_the_edge_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        checked()
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        checked("rollout.engine.gpu_memory_utilization=0.95", host=300 * GIB)
    assert len(caplog.messages) == 2
    assert "phase roll takes about" in caplog.messages[0] and "KV cache: lower rollout.engine.gpu" in caplog.messages[0]
    assert "of host memory are needed, and the host has 300 GiB" in caplog.messages[1]


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_check, "CGROUP_LIMIT", limit)
    installed = host_bytes()
    limit.write_text("max\n")
    assert host_bytes() == installed
    limit.write_text("1073741824\n")
    assert host_bytes() == GIB


def test_the_table_adds_up():
    memory = run_memory(composed("qwen3_8b_fleet"), hf_config("qwen3_8b_fleet"))
    lines = describe_memory(memory, H100_BYTES, 65536)
    rows = [line.rsplit(maxsplit=4) for line in lines[1 : lines.index(next(s for s in lines if "together" in s)) + 1]]
    for column in range(1, 5):
        *values, total = (0.0 if row[column] == "·" else float(row[column]) for row in rows)
        assert sum(values) == pytest.approx(total, abs=0.5)
    assert lines[0].split()[-4:] == ["train", "checkpoint", "sync", "roll"]
