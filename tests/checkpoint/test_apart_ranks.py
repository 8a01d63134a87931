"""Ranks on two hosts that share no folder: each host sends its rank's shard to a store, and both resume from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import namespace_hosts
import pytest
from namespace_hosts import ROOT, Hosts, stop
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")

from policy_fixtures import make_config, write_config

from megatron_fleet.config.schema import ParallelConfig

reason = namespace_hosts.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason or "")]


def play(hosts: Hosts, folder: Path, out: str) -> dict[str, object]:
    """One attempt at the run, with the controller and a rank on one host and a rank on the other."""
    config = make_config(folder / "model", ParallelConfig(data=2))
    tree = config.model_dump()
    tree["run"] |= {"out": out, "id": "apart_1"}
    tree["cluster"] |= {"ranks": "external", "join_timeout_s": HANG_S}
    tree["checkpoint"]["store"]["url"] = str(folder / "store")
    tree["checkpoint"]["export"]["last"] = False
    where = {"MFLEET_CONTROLLER": f"{hosts.addresses['n1']}:29611", "MFLEET_TOKEN": "only this run knows it"}
    environment = os.environ | where | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/tests:{ROOT}"}
    started = []
    try:
        for rank, host in enumerate(("n1", "n2")):
            who = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            command = [sys.executable, "-m", "megatron_fleet.cli", "rank"]
            started.append(
                hosts.run(host, command, environment | who, stderr=subprocess.STDOUT, stdout=subprocess.DEVNULL)
            )
        program = [sys.executable, Path(__file__).with_name("apart_controller.py"), json.dumps(tree)]
        said = hosts.output("n1", program, environment, timeout_s=4 * HANG_S)
    finally:
        for process in started:
            stop(process)
    return json.loads(said.splitlines()[-1])


@pytest.mark.in_turn(number=0, of=2)
def test_hosts_that_share_no_folder_resume_from_the_store(tmp_path):
    write_config(tmp_path / "model")
    with Hosts(["n1", "n2"], visible=[tmp_path]) as hosts:  # /tmp is each host's own otherwise
        first = play(hosts, tmp_path, "/tmp/first")
        (saved,) = (tmp_path / "store").rglob("global_step_1")
        names = {path.name for path in saved.iterdir()}
        assert {"manifest.json", "trainer_state.json", ".metadata", "__0_0.distcp", "__1_0.distcp"} <= names
        second = play(hosts, tmp_path, "/tmp/second")  # as on other machines
        left = hosts.output("n2", ["sh", "-c", "ls -A /tmp/first/checkpoints /tmp/second/checkpoints"]).split()
    assert (first["from"], first["apart"], first["left"]) == (0, True, [])
    assert (second["from"], second["apart"], second["left"]) == (1, True, ["step_000001"])
    assert first["before"] != first["after"] == second["before"] != second["after"]
    assert not [name for name in left if "step" in name]
