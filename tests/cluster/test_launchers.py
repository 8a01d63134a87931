"""Real srun and torchrun over two hosts: each process finds out which rank it is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespace_hosts
import pytest
import slurm_cluster
from namespace_hosts import ROOT, Hosts, stop
from slurm_cluster import CONTROLLER, Slurm

reason = namespace_hosts.why_not() or slurm_cluster.why_not()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason or "")

SCRIPT = Path(__file__).with_name("print_identity.py")
PRINT = [sys.executable, str(SCRIPT)]
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT)}
FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "host", "source")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Hosts([CONTROLLER, "n1", "n2"], visible=[tmp_path_factory.getbasetemp()]) as hosts, Slurm(hosts) as slurm:
        slurm.environ["PYTHONPATH"] = str(ROOT)
        yield slurm


def identities(text: str) -> list[tuple[Any, ...]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(tuple(identity[name] for name in FIELDS) for identity in found)


@pytest.mark.slow
def test_srun_with_as_many_ranks_on_each_host(slurm):
    out = slurm.output(["srun", "-N2", "--ntasks-per-node=2", *PRINT])
    assert identities(out) == [(i, 4, i % 2, 2, f"n{i // 2 + 1}", "srun") for i in range(4)]


@pytest.mark.slow
def test_srun_with_uneven_and_cyclic_ranks(slurm):
    out = slurm.output(["srun", "-N2", "-n3", "--distribution=cyclic", *PRINT])
    assert identities(out) == [(0, 3, 0, 2, "n1", "srun"), (1, 3, 0, 1, "n2", "srun"), (2, 3, 1, 2, "n1", "srun")]


@pytest.mark.slow
def test_a_batch_script_is_no_rank_and_its_steps_are(slurm, tmp_path):
    script = tmp_path / "job.sh"
    # A step smaller than the allocation, on its second host.
    script.write_text(f"#!/bin/sh\n{' '.join(PRINT)}\nsrun -N1 -n1 --nodelist=n2 {' '.join(PRINT)}\n")
    slurm.output(["sbatch", "--wait", "-N2", "-n4", f"--output={tmp_path}/job.log", script])
    first, *rest = (tmp_path / "job.log").read_text().splitlines()
    assert "start it with srun" in json.loads(first)["refused"]
    assert "SLURM_NTASKS=4" in json.loads(first)["refused"]
    assert identities("\n".join(rest)) == [(0, 1, 0, 1, "n2", "srun")]


def torchrun(hosts: int, node_rank: str) -> list[str]:
    static = ["--rdzv-backend=static", "--master-addr=n1", "--master-port=29400"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", "--nproc-per-node=2"]
    return [*command, *static, f"--node-rank={node_rank}", str(SCRIPT)]


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
def test_torchrun_with_an_agent_on_each_host(slurm):
    agents = [
        slurm.hosts.run(name, torchrun(2, str(i)), ENVIRON, stdout=subprocess.PIPE)
        for i, name in enumerate(slurm.nodes)
    ]
    try:
        out = "".join(agent.communicate(timeout=600)[0] for agent in agents)
    finally:
        for agent in agents:
            stop(agent)
    assert identities(out) == [(i, 4, i % 2, 2, f"n{i // 2 + 1}", "torchrun") for i in range(4)]


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_torchrun_within_one_srun_task_per_host(slurm):
    agent = " ".join(torchrun(2, "$SLURM_NODEID"))
    out = slurm.output(["srun", "-N2", "--ntasks-per-node=1", "sh", "-c", agent], timeout_s=600)
    assert identities(out) == [(i, 4, i % 2, 2, f"n{i // 2 + 1}", "torchrun") for i in range(4)]


@pytest.mark.slow
def test_other_hosts_reach_a_host_by_its_address(slurm):
    program = (
        "import os; from megatron_fleet.cluster.inventory import host_address; print(host_address(os.environ, False))"
    )
    for name in slurm.nodes:
        assert slurm.hosts.output(name, [sys.executable, "-c", program], ENVIRON).strip() == slurm.hosts.addresses[name]
