"""This host's devices, as nvidia-smi and CUDA_VISIBLE_DEVICES name them, and its address."""

import socket
import subprocess
import sys

import pytest
from namespace_hosts import ROOT, why_not
from waiting import HANG_S

from megatron_fleet.cluster import inventory
from megatron_fleet.cluster.inventory import (
    Device,
    Host,
    StartedRank,
    host_address,
    local_inventory,
    nvidia_devices,
    with_nodes,
    with_started_ranks,
)
from megatron_fleet.config.errors import UserError

LINE = "{}, GPU-{}-aaaa, NVIDIA H100 80GB HBM3, 81559, {}"
EIGHTY = 81559 << 20
LISTED = "index,uuid,name,memory.total,mig.mode.current"


@pytest.fixture
def machine(tmp_path):
    """Installs an nvidia-smi that gives this answer and status; the environment that finds it."""

    def make(answer: str, status: int = 0, query: str = LISTED, **environ: str) -> dict[str, str]:
        program = tmp_path / "nvidia-smi"
        script = f"import sys\nsys.stdout.write({answer!r})\n"
        # It is asked as the real one must be asked.
        script += f"assert sys.argv[1:] == ['--query-gpu={query}',"
        script += f" '--format=csv,noheader,nounits']\nsys.exit({status})\n"
        program.write_text(f"#!{sys.executable}\n{script}")
        program.chmod(0o755)
        return {"PATH": str(tmp_path)} | environ

    return make


def four(mig: str = "Disabled") -> str:
    return "".join(LINE.format(i, "ab" + str(i) * 2, mig) + "\n" for i in range(4))


def device(i: int) -> Device:
    return Device(i, f"GPU-ab{i}{i}-aaaa", "NVIDIA H100 80GB HBM3", EIGHTY)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-ab33-aaaa,GPU-ab1", [3, 1]),
        ("1,-1,2", [1]),
        ("NoDevFiles", []),
        ("", []),
        (" ", []),
    ],
)
def test_visible_devices(machine, visible, expected):
    environ = machine(four()) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert nvidia_devices(environ) == tuple(device(i) for i in expected)


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("4", ["CUDA_VISIBLE_DEVICES=4", "'4', which is not a GPU here", "0 (GPU-ab00-aaaa)"]),
        ("GPU-ab", ["'GPU-ab', which is not a GPU here"]),
        ("GPU-x", ["'GPU-x'"]),
        ("0,", ["''"]),
        ("1,GPU-ab11", ["names one GPU twice"]),
        ("MIG-1234", ["MIG", "whole GPUs"]),
    ],
)
def test_visible_devices_that_are_not_there(machine, visible, words):
    with pytest.raises(UserError) as caught:
        nvidia_devices(machine(four(), CUDA_VISIBLE_DEVICES=visible))
    for word in words:
        assert word in str(caught.value)


def test_split_devices_are_refused_where_they_are_visible(machine):
    answer = four() + LINE.format(4, "ab44", "Enabled") + "\n"
    with pytest.raises(UserError, match=r"GPU 4 \(NVIDIA H100 80GB HBM3\) is in MIG mode"):
        nvidia_devices(machine(answer))
    assert nvidia_devices(machine(answer, CUDA_VISIBLE_DEVICES="0")) == (device(0),)
    # Products that cannot be split say so in their own way.
    assert len(nvidia_devices(machine(four("[N/A]")))) == 4


def test_no_devices(machine, tmp_path):
    assert nvidia_devices({"PATH": str(tmp_path / "empty")}) == ()
    assert nvidia_devices(machine("No devices were found\n", 6)) == ()
    assert nvidia_devices(machine("")) == ()


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9, "couldn't communicate"),
        ("", 3, "status 3"),
        ("0, GPU-x, NVIDIA GB10, [N/A], Disabled\n", 0, "[N/A]"),
        ("what\n", 0, "'what'"),
    ],
)
def test_a_broken_driver_is_no_machine_without_gpus(machine, answer, status, words):
    with pytest.raises(UserError) as caught:
        nvidia_devices(machine(answer, status))
    assert words in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "expected"), [("9.0\n9.0\n", (9, 0)), ("12.1\n", (12, 1)), ("No devices were found\n", None)]
)
def test_the_compute_capability_is_the_first_gpus(machine, answer, expected):
    assert inventory.compute_capability(machine(answer, query="compute_cap")) == expected


def test_a_compute_capability_that_is_no_number_is_told(machine, tmp_path):
    with pytest.raises(UserError, match=r"'\[N/A\]' to --query-gpu=compute_cap"):
        inventory.compute_capability(machine("[N/A]\n", query="compute_cap"))
    assert inventory.compute_capability({"PATH": str(tmp_path / "none")}) is None


def test_a_driver_that_hangs_is_told(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(inventory, "NVIDIA_SMI_DEADLINE_S", 0.2)
    with pytest.raises(UserError, match=r"nvidia-smi failed .*timed out"):
        nvidia_devices({"PATH": str(tmp_path)})


def test_devices_count_only_where_torch_can_use_them(machine, monkeypatch):
    environ = machine(four())
    monkeypatch.setattr(inventory.metadata, "version", lambda name: "2.13.0+cpu")
    assert local_inventory(environ).hosts[0].devices == ()
    monkeypatch.setattr(inventory.metadata, "version", lambda name: "2.13.0")
    (host,) = local_inventory(environ).hosts
    assert (host.name, host.address) == (socket.gethostname(), "127.0.0.1")
    assert host.devices == tuple(map(device, range(4)))
    assert host.ranks is None


def test_address():
    assert host_address({}) == "127.0.0.1"
    assert host_address({"MFLEET_HOST_ADDRESS": "10.1.2.3"}, alone=False) == "10.1.2.3"
    with pytest.raises(UserError, match="MFLEET_HOST_ADDRESS=node1 is not an IP address"):
        host_address({"MFLEET_HOST_ADDRESS": "node1"})


def test_no_route_means_no_address(tmp_path):
    """In a network of its own without a default route. With one: see test_launchers."""
    if reason := why_not():
        pytest.skip(reason)
    program = (
        "from megatron_fleet.cluster.inventory import host_address\n"
        "from megatron_fleet.config.errors import UserError\n"
        "try: print(host_address({}, alone=False))\n"
        "except UserError as error: print(error)\n"
    )
    command = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "no default route" in done.stdout
    assert "MFLEET_HOST_ADDRESS" in done.stdout


def test_the_controllers_host_comes_first_and_has_ranks_only_with_a_node():
    own, other = Host("a", "10.0.0.1", (device(0),)), Host("b", "10.0.0.2", (device(1),))
    assert with_nodes(own, [other, own]).hosts == (own, other)
    assert with_nodes(own, [other]).hosts == (Host("a", "10.0.0.1", ranks=(), rollout=False), other)


def test_ranks_that_others_started_come_with_their_hosts_and_devices():
    own, node = Host("a", "10.0.0.1", (device(0), device(1))), Host("b", "10.0.0.2", (device(2), device(3)))
    ranks = [
        StartedRank(0, 1, "b", "10.9.0.2", device(2)),
        StartedRank(1, 0, "b", "10.9.0.2", device(3)),
        StartedRank(2, 0, "c", "10.9.0.3", device(0)),
    ]
    a, b, c = with_started_ranks(own, [node], ranks).hosts
    assert (a.ranks, a.rollout, a.devices) == ((), True, own.devices)
    # Its i-th rank sits on its i-th device; the address is what the node says.
    assert (b.ranks, b.devices, b.address, b.rollout) == ((1, 0), (device(3), device(2)), "10.0.0.2", True)
    assert (c.ranks, c.devices, c.address, c.rollout) == ((2,), (device(0),), "10.9.0.3", False)
    on_cpus = [StartedRank(0, 0, "a", "10.0.0.1"), StartedRank(1, 1, "a", "10.0.0.1")]
    (alone,) = with_started_ranks(Host("a"), [], on_cpus).hosts
    assert (alone.ranks, alone.devices) == ((0, 1), ())


def test_hosts_of_one_name_are_refused():
    ranks = [StartedRank(0, 0, "localhost", "10.0.0.1"), StartedRank(1, 0, "localhost", "10.0.0.2")]
    with pytest.raises(UserError, match=r"Ranks 0 and 1 both claim to be local rank 0 of host localhost"):
        with_started_ranks(Host("a"), [], ranks)
