"""`mfleet train --dry-run` draws who runs where."""

import pytest

from megatron_fleet.cluster import inventory
from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.loop import dry_run
from megatron_fleet.loop.dry_run import describe, draw
from megatron_fleet.preflight import checks

GPUS = tuple(Device(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", 85520809984) for i in range(2))


THIRD = Device(2, "u", "H", 1 << 30)


def drawn(wanted: PlacementRequest, *hosts: Host) -> str:
    there = Inventory(hosts)
    return "\n".join(draw(there, place(there, wanted)))


def test_colocated_on_two_hosts():
    assert drawn(PlacementRequest(4, 2, 2), Host("node1", "10.0.0.1", GPUS), Host("node-two", "10.0.0.12", GPUS)) == (
        "┌ node1 (10.0.0.1) ──────────────────────────────────────┐\n"
        "│ GPU 0  NVIDIA H100 80GB HBM3, 80 GiB  rank 0  engine 0 │\n"
        "│ GPU 1  NVIDIA H100 80GB HBM3, 80 GiB  rank 1  engine 0 │\n"
        "└────────────────────────────────────────────────────────┘\n"
        "┌ node-two (10.0.0.12) ──────────────────────────────────┐\n"
        "│ GPU 0  NVIDIA H100 80GB HBM3, 80 GiB  rank 2  engine 1 │\n"
        "│ GPU 1  NVIDIA H100 80GB HBM3, 80 GiB  rank 3  engine 1 │\n"
        "└────────────────────────────────────────────────────────┘\n"
        "colocated: engines sleep while ranks train; weights by cuda_ipc"
    )


def test_a_host_without_devices_that_has_a_long_name():
    name = "a-very-long-name-of-a-host.in.some.cluster"
    assert drawn(PlacementRequest(3, 2), Host(name)) == (
        "┌ a-very-long-name-of-a-host.in.some.cluster (127.0.0.1) ┐\n"
        "│ CPU    ranks 0–2  engines 0–1                          │\n"
        "└────────────────────────────────────────────────────────┘\n"
        "engines and ranks work side by side; weights by shm"
    )


def test_evaluation_engines_are_drawn_as_such():
    text = drawn(PlacementRequest(1, 1, eval_engines=2), Host("head"))
    assert "│ CPU    rank 0  engine 0, evaluation engines 0–1 │" in text
    alone = drawn(PlacementRequest(1, 1, colocated=False, eval_engines=1), Host("node1", devices=(*GPUS, THIRD)))
    assert [line.strip("│ ").split("  ")[-1].strip() for line in alone.splitlines()[1:4]] == [
        "rank 0", "engine 0", "evaluation engine 0"
    ]  # fmt: skip


def test_a_device_that_nobody_uses_and_a_host_without_any():
    text = drawn(
        PlacementRequest(1, 1, colocated=False),
        Host("head"),
        Host("node1", devices=(*GPUS, THIRD)),
    )
    rows = [line.strip("│ ").split("  ") for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["CPU"],
        ["GPU 0", "NVIDIA H100 80GB HBM3, 80 GiB", "rank 0"],
        ["GPU 1", "NVIDIA H100 80GB HBM3, 80 GiB", "engine 0"],
        ["GPU 2", "H, 1 GiB"],
    ]
    assert len({len(line) for line in text.splitlines()[:-1]}) == 1


def test_describe_draws_this_machine():
    config = load(["experiment=quickstart", "parallel.data=2", "rollout.engine.replicas=2"])
    text = describe(config)
    assert text.startswith(dry_run.as_yaml(config).rstrip())
    assert "#   │ CPU    ranks 0–1  engines 0–1 " in text
    assert "# processes" in text and "# outputs" in text
    assert "environment server: the embedded fleet" in text
    own = describe(load(["experiment=quickstart", "env.kind=my_math:Math"]))
    assert "environment server: none, env.kind=my_math:Math" in own
    external = describe(load(["experiment=quickstart", "cluster.ranks=external"]))
    assert "not known yet: by the hosts that the ranks connect from" in external and "┌" not in external
    several = describe(load(["experiment=quickstart", "cluster.nodes=2"]))
    assert "not known yet: by the devices of the 2 hosts that join" in several and "┌" not in several


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    script = "\n".join(f"echo '{d.index}, {d.uuid}, {d.kind}, 81559, Disabled'" for d in GPUS)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(inventory, "cuda_is_installed", lambda: True)


def checked(*overrides: str) -> None:
    checks.check_training(load(["experiment=quickstart", "rollout.engine.colocated=true", *overrides]))


def test_preflight_compares_with_the_devices_that_are_there(two_gpus):
    checked("parallel.data=2", "rollout.engine.replicas=2")
    with pytest.raises(UserError, match=r"= 4 ranks need a GPU each, but there are 2"):
        checked("parallel.data=4")
    with pytest.raises(UserError, match=r"replicas × tensor_parallel = 2 × 1 GPUs do not fit into the 1 "):
        checked("rollout.engine.replicas=2")
    with pytest.raises(UserError, match=r"replicas × tensor_parallel = 1 × 1 GPUs do not fit into the 0 "):
        checked("parallel.data=2", "rollout.engine.colocated=false")
    # Ranks are elsewhere too.
    checked("parallel.data=4", "cluster.ranks=external")
    checked("parallel.data=4", "cluster.nodes=2")


def test_preflight_of_an_evaluation_looks_at_engines_alone(two_gpus):
    keys = ["experiment=quickstart", "parallel.data=4", "rollout.engine.colocated=true"]
    checks.check_evaluation(load([*keys, "rollout.engine.replicas=2"]))
    with pytest.raises(UserError, match=r"= 3 × 1 GPUs do not fit into the 2 that there are"):
        checks.check_evaluation(load([*keys, "rollout.engine.replicas=3"]))


def test_the_controller_is_no_rank(monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"started as rank 1 of 2 \(torchrun\).*mfleet rank"):
        checked()
