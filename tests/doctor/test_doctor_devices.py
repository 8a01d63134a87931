"""Probes of GPUs, on what nvidia-smi writes: element names of NVIDIA's nvsmi_device DTD, version 12 and later."""

import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from megatron_fleet.cluster.inventory import Device, Host
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import ROOT, load
from megatron_fleet.doctor import devices, network
from megatron_fleet.doctor.probe import ProbeContext, Result, ask

GIB = 1 << 30
HEALTHY = {
    "product_name": "NVIDIA H100 80GB HBM3",
    "reset": "No",
    "total": "81559 MiB",
    "free": "81079 MiB",
    "compute_mode": "Default",
    "dram": "0",
    "pending": "No",
    "state": "Completed",
    "status": "Success",
    "slowdown": "Not Active",
    "processes": "",
}
PROCESS = """<process_info>
    <gpu_instance_id>N/A</gpu_instance_id><compute_instance_id>N/A</compute_instance_id>
    <pid>{pid}</pid><type>C</type><process_name>{name}</process_name><used_memory>{memory}</used_memory>
</process_info>"""
GPU = """<gpu id="00000000:{bus:02X}:00.0">
    <product_name>{product_name}</product_name><product_brand>NVIDIA</product_brand>
    <uuid>GPU-{index}</uuid><minor_number>{index}</minor_number>
    <gpu_reset_status>
        <reset_required>{reset}</reset_required><drain_and_reset_recommended>No</drain_and_reset_recommended>
    </gpu_reset_status>
    <clocks_event_reasons>
        <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
        <clocks_event_reason_hw_slowdown>{slowdown}</clocks_event_reason_hw_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage>
        <total>{total}</total><reserved>551 MiB</reserved><used>4 MiB</used><free>{free}</free>
    </fb_memory_usage>
    <compute_mode>{compute_mode}</compute_mode>
    <ecc_errors>
        <volatile><dram_correctable>0</dram_correctable><dram_uncorrectable>{dram}</dram_uncorrectable></volatile>
        <aggregate><dram_correctable>0</dram_correctable><dram_uncorrectable>7</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
        <remapped_row_corr>0</remapped_row_corr><remapped_row_pending>{pending}</remapped_row_pending>
        <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <fabric><state>{state}</state><status>{status}</status></fabric>
    <processes>{processes}</processes>
</gpu>"""
PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\t{word}\t
 GPU1\t{word}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def log(*gpus: dict[str, str], driver: str = "580.95.05") -> str:
    rows = [GPU.format(index=i, bus=25 + i, **(HEALTHY | changes)) for i, changes in enumerate(gpus or ({}, {}))]
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <driver_version>{driver}</driver_version><cuda_version>13.0</cuda_version><attached_gpus>{len(rows)}</attached_gpus>
    {"".join(rows)}
</nvidia_smi_log>"""


@pytest.fixture
def machine(tmp_path):
    """A function that makes an nvidia-smi with these answers; returns a machine with two GPUs that has it."""

    def make(text: str, read: str = "OK", nvlink: str = "OK", count: int = 2, config=None) -> ProbeContext:
        (tmp_path / "log.xml").write_text(text)
        for name, word in (("r", read), ("n", nvlink)):
            (tmp_path / f"p2p-{name}").write_text(PEERS.format(word=word))
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\ncase "$1" in -q) cat log.xml ;; topo) cat p2p-"$3" ;; *) exit 9 ;; esac\n'
        )
        program.chmod(0o755)
        gpus = tuple(Device(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", 80 * GIB) for i in range(count))
        return ProbeContext(config, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, Host("here", devices=gpus))

    return make


def test_a_healthy_machine(machine):
    here = machine(log())
    assert devices.devices(here) == Result("ok", "2 × NVIDIA H100 80GB HBM3 of 80 GiB")
    assert devices.others(here) == Result("ok", "none")
    assert devices.driver(here) == Result("ok", "580.95.05")
    assert devices.fabric(here) == Result("ok", "registered with the NVSwitch fabric")
    assert devices.peers(here) == Result("ok", "2 pairs, 2 by NVLink")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reset": "Yes"}, "GPU 1: a reset is required"),
        ({"dram": "2"}, "GPU 1: 2 uncorrectable memory errors (DRAM) since the driver started"),
        ({"pending": "Yes"}, "GPU 1: memory rows wait for a reset to be remapped"),
        ({"compute_mode": "Exclusive_Process"}, "GPU 1: compute mode Exclusive_Process, and an engine shares the GPU"),
        ({"slowdown": "Active"}, "GPU 1: slowed down (hw_slowdown)"),
    ],
)
def test_a_broken_gpu(machine, changes, said):
    result = devices.devices(machine(log({}, changes)))
    assert result.status == "failed" and said in result.detail and "leave the host out" in result.fix


def test_different_gpus_are_a_warning(machine):
    result = devices.devices(machine(log({}, {"product_name": "NVIDIA H200", "total": "143771 MiB"})))
    assert result.status == "warning" and "H100 80GB HBM3 of 80 GiB, NVIDIA H200 of 140 GiB" in result.detail


def test_other_gpus_than_the_run_is_for_are_a_warning(machine):
    keys = ["experiment=quickstart", "rollout.engine.colocated=true"]
    here = machine(log(), config=load([*keys, "cluster.gpu=H200"]))
    assert devices.devices(here).status == "warning"
    assert devices.devices(here).fix.startswith("cluster.gpu=H200, but the GPU here is NVIDIA H100 80GB HBM3: ")
    assert devices.devices(machine(log(), config=load([*keys, "cluster.gpu=H100"]))).status == "ok"


def test_fewer_gpus_than_the_run_needs(machine):
    here = machine(log(), config=load(["experiment=quickstart", "parallel.data=4", "rollout.engine.colocated=true"]))
    (asked,) = ask([p for p in devices.PROBES if p.run is devices.devices], here)
    assert asked.result.status in ("failed", "skipped")  # skipped by a torch for CPUs
    with pytest.raises(UserError, match="= 4 ranks need a GPU each, but there are 2"):
        devices.devices(here)


def test_other_processes(machine):
    theirs = PROCESS.format(pid=4711, name="/usr/bin/python3", memory="70210 MiB")
    result = devices.others(machine(log({}, {"processes": theirs, "free": "10869 MiB"})))
    assert result == Result(
        "failed",
        "GPU 1: process 4711 (/usr/bin/python3, 70210 MiB)",
        "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    )
    unseen = PROCESS.format(pid=1, name="[Not Found]", memory="N/A")
    assert "process 1 ([Not Found])" in devices.others(machine(log({"processes": unseen}, {}))).detail
    hidden = devices.others(machine(log({"free": "40000 MiB"}, {})))
    assert hidden.status == "failed" and "41559 MiB taken by processes outside of this container" in hidden.detail


def test_the_process_that_asks_is_not_another_one(machine):
    pids = {os.getpid(), os.getppid()} - {1}  # the parent may have ended
    own = "".join(PROCESS.format(pid=pid, name="python", memory="500 MiB") for pid in pids)
    assert devices.others(machine(log({"processes": own, "free": "40000 MiB"}, {}))) == Result("ok", "none")


def test_only_the_gpus_that_are_visible_count(machine):
    busy = PROCESS.format(pid=7, name="python", memory="100 MiB")
    assert devices.others(machine(log({}, {"processes": busy}), count=1)) == Result("ok", "none")


def test_an_old_driver(machine):
    result = devices.driver(machine(log(driver="570.133.20")))
    assert result == Result("failed", "570.133.20", "CUDA 13 needs driver 580 or newer; update it")
    assert f"GPU_NEED_DRIVER={devices.NEEDED_DRIVER} " in (ROOT / "setup.sh").read_text()


def test_fp8_kernels_are_missed_by_runs_with_fp8_engines_alone(machine, monkeypatch):
    said = "verified: torch\nnot verified: DeepGEMM for FP8 engines: import x: ImportError: y\nverified: 2 GPUs"
    monkeypatch.setattr(devices, "output", lambda *_: said)
    plain, fp8 = (
        load(["experiment=qwen3_8b_fleet", f"rollout.engine.quantization={kind}"]) for kind in ("none", "fp8")
    )
    assert devices.libraries(machine(log(), config=plain)) == Result("ok", "2 GPUs")
    for config in (fp8, None):
        result = devices.libraries(machine(log(), config=config))
        assert result.status == "warning" and result.detail.startswith("not verified: DeepGEMM")


def test_the_fabric_manager(machine):
    waiting = {"state": "In Progress", "status": "N/A"}
    result = devices.fabric(machine(log(waiting, waiting)))
    assert result.status == "failed" and "In Progress N/A" in result.detail and "nvidia-fabricmanager" in result.fix
    mismatch = devices.fabric(machine(log({}, {"status": "Insufficient Resources"})))
    assert mismatch.status == "failed" and "Completed Insufficient Resources" in mismatch.detail
    none = {"state": "N/A", "status": "N/A"}
    assert devices.fabric(machine(log(none, none))) == Result("ok", "no NVSwitch")


def test_peer_access(machine):
    closed = devices.peers(machine(log(), read="CNS", nvlink="NS"))
    assert closed.status == "failed" and closed.detail == "no peer access: 0→1 CNS, 1→0 CNS" and "IOMMU" in closed.fix
    pcie = devices.peers(machine(log(), nvlink="NS"))
    assert pcie.status == "warning" and pcie.detail == "2 pairs, 0 by NVLink"
    assert devices.peers(machine(log(), count=3)).detail == "nvidia-smi topo -p2p does not list all GPUs"


def test_a_driver_that_does_not_answer(machine, tmp_path):
    here = machine("Failed to initialize NVML: Driver/library version mismatch")
    with pytest.raises(UserError, match="the output of nvidia-smi -q -x could not be parsed"):
        devices.driver(here)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'; exit 255\n")
    with pytest.raises(UserError, match="nvidia-smi failed: Failed to initialize NVML: Unknown Error"):
        devices.driver(here)
    with pytest.raises(UserError, match="there is no nvidia-smi in PATH"):
        devices.driver(ProbeContext(None, {"PATH": str(Path(tmp_path, "none"))}, here.host))


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    from megatron_fleet.cluster.inventory import local_inventory

    (mine,) = local_inventory(os.environ).hosts
    # Other tests of this process hold GPU memory, and in a container nvidia-smi cannot say that it is ours.
    probes = [p for p in devices.PROBES if not p.slow and p.run is not devices.others]
    findings = ask(probes, ProbeContext(None, os.environ, mine))
    assert {f.name: f.result for f in findings if f.result.status == "failed"} == {}


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A function that fakes InfiniBand adapters: a port for each state, and their device files."""

    def make(*states: str, verbs: bool = True, locked: int = resource.RLIM_INFINITY) -> None:
        for number, state in enumerate(states):
            port = tmp_path / "class" / f"mlx5_{number}" / "ports" / "1"
            port.mkdir(parents=True)
            for name, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
                (port / name).write_text(f"{text}\n")
        (tmp_path / "dev").mkdir()
        if verbs:
            (tmp_path / "dev" / "uverbs0").touch()
        monkeypatch.setattr(network, "ADAPTERS", tmp_path / "class")
        monkeypatch.setattr(network, "VERBS", tmp_path / "dev")
        monkeypatch.setattr(resource, "getrlimit", lambda which: (locked, locked))

    return make


def rdma(fabric: str = "infiniband") -> Result:
    config = load(["experiment=quickstart", "parallel.data=2", "cluster.nodes=2", f"launch.fabric={fabric}"])
    return network.rdma(ProbeContext(config, {}, Host("here", devices=(Device(0, "GPU-0", "NVIDIA H100", 80 * GIB),))))


def test_adapters_of_a_fabric(adapters):
    adapters("4: ACTIVE", "4: ACTIVE")
    assert rdma() == Result("ok", "2 of 2 ports active: InfiniBand 400 Gb/sec (4X NDR)")
    assert rdma("ethernet").status == "skipped"


@pytest.mark.parametrize(
    ("states", "rest", "status", "said"),
    [
        ((), {}, "failed", "no RDMA adapter: NCCL uses TCP between hosts"),
        (("1: DOWN", "2: INIT"), {}, "failed", "0 of 2 ports active"),
        (("4: ACTIVE",), {"verbs": False}, "failed", "but no /dev/infiniband/uverbs* here"),
        (("4: ACTIVE",), {"locked": 8 << 20}, "warning", "may lock only 8192 KiB of memory"),
        (("4: ACTIVE", "1: DOWN"), {}, "warning", "1 of 2 ports active"),
    ],
)
def test_a_broken_fabric(adapters, states, rest, status, said):
    adapters(*states, **rest)
    result = rdma()
    assert result.status == status and said in result.detail and result.fix
    assert rdma("auto").status == "warning"
