"""Rendered manifests fit the schemas that SkyPilot and the JobSet controller publish; SkyPilot itself takes its own."""

from __future__ import annotations

import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespace_hosts import ROOT
from waiting import HANG_S

from megatron_fleet.config import keys
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.kubernetes import Kubernetes
from megatron_fleet.launch.plan import plan
from megatron_fleet.launch.skypilot import SkyPilot

jsonschema = pytest.importorskip("jsonschema")
SCHEMAS = Path(__file__).with_name("schemas")
STATIC = ROOT / "launch"
STORE = "checkpoint.store.url=s3://bucket/prefix"
TWO = ("parallel.data=2", "cluster.nodes=2", "checkpoint.export.last=false")
SKY: dict[str, list[str]] = {
    "one host": [],
    "two hosts": [*TWO],
    "CPUs": ["launch.gpus=0"],
    "an image": ["launch.image=registry/mf:1", "launch.install=false", "launch.skypilot.infra=[slurm,vast,lambda]"],
    "spot hosts": ["launch.skypilot.infra=[gcp,aws/us-east-1]", "launch.skypilot.spot=[gcp,aws/us-east-1]"],
    "machine images": ["launch.skypilot.infra=[lambda,gcp]", "launch.skypilot.images={gcp: skypilot:gpu-ubuntu-2204}"],
}
EVERY_KEY = [
    "launch.kubernetes.namespace=team",
    "launch.kubernetes.queue=training",
    "launch.kubernetes.labels={app: mfleet}",
    "launch.kubernetes.annotations={kueue.x-k8s.io/podset-required-topology: topology.example.com/rack}",
    "launch.kubernetes.priority_class=high",
    "launch.kubernetes.image_pull_secrets=[registry-pull]",
    "launch.kubernetes.node_selector={pool: h100}",
    "launch.kubernetes.tolerations=[nvidia.com/gpu,workload]",
    "launch.kubernetes.claim=runs",
    "launch.kubernetes.volumes=[models:/mnt/models:ro,data:/mnt/data]",
    "launch.kubernetes.env_secrets=[shared-wandb-key]",
    "launch.kubernetes.cpus=64",
    "launch.kubernetes.memory_gb=900",
    "launch.kubernetes.shared_memory_gb=128",
    "launch.kubernetes.gpu_resource=nvidia.com/mig-3g.40gb",
    "launch.kubernetes.resources={rdma/ib: 1, ephemeral-storage: 500Gi}",
    "launch.kubernetes.rdma=ipc_lock",
    "launch.kubernetes.pod={serviceAccountName: trainer, hostNetwork: true, securityContext: {runAsUser: 1000}, "
    "containers: [{name: host, securityContext: {seccompProfile: {type: Unconfined}}}]}",
]
JOBSETS: dict[str, list[str]] = {
    "one host": [],
    "two hosts with a queue": [*TWO, "launch.kubernetes.queue=training"],
    "limits": ["launch.kubernetes.cpus=64", "launch.kubernetes.memory_gb=900", "launch.kubernetes.claim=runs"],
    "CPUs": ["launch.gpus=0", "launch.kubernetes.node_selector={pool: cpu}", "launch.environment={A: b}"],
    "privileged": ["launch.kubernetes.rdma=privileged"],
    "every key": EVERY_KEY,
}
python_with_sky = os.environ.get("MFLEET_TEST_SKY")


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    monkeypatch.setattr(planning, "commit", lambda: "abc")


def sky_task(overrides: list[str]) -> str:
    job = plan([["experiment=quickstart", "cluster=skypilot", STORE, *overrides]], {"WANDB_API_KEY": "x"})
    SkyPilot().check(job)
    return SkyPilot().render(job).files["job.yaml"]


def jobset(overrides: list[str]) -> dict[str, Any]:
    words = ["experiment=quickstart", "cluster=kubernetes", "launch.image=registry/mf:1", STORE, *overrides]
    job = plan([words], {})
    Kubernetes().check(job)
    return yaml.safe_load(Kubernetes().render(job).files["job.yaml"])


def check_task(task: dict[str, Any]) -> None:
    schemas = json.loads((SCHEMAS / "skypilot-0.14.1.json").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])


def check_jobset(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, json.loads((SCHEMAS / "jobset-v1alpha2.json").read_text())["schema"])


@pytest.mark.parametrize("kind", SKY)
def test_tasks_fit_the_schema_of_skypilot(kind):
    check_task(yaml.safe_load(sky_task(SKY[kind])))


@pytest.mark.parametrize("kind", JOBSETS)
def test_jobsets_fit_their_schema(kind):
    check_jobset(jobset(JOBSETS[kind]))


def test_every_key_of_kubernetes_is_among_those_that_fit():
    named = [override.partition("=")[0] for override in EVERY_KEY]
    assert named == [key.name for key in keys.leaves() if key.name.startswith("launch.kubernetes.")]


def test_the_files_of_the_project_fit_the_schemas():
    check_task(yaml.safe_load((STATIC / "skypilot" / "train.yaml").read_text()))
    check_jobset(yaml.safe_load((STATIC / "kubernetes" / "train.yaml").read_text()))


@pytest.mark.slow
def test_the_schemas_refuse_what_is_misspelt():
    task = yaml.safe_load(sky_task([]))
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        check_task(task | {"num_node": 2})
    with pytest.raises(jsonschema.ValidationError, match="use_spots"):
        check_task(task | {"resources": {"ordered": [{"infra": "gcp", "use_spots": True}]}})
    good = jobset([])
    for path in (["spec"], ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0]):
        bad = deepcopy(good)
        place: Any = bad
        for step in path:
            place = place[step]
        place["misspelt"] = 1
        with pytest.raises(jsonschema.ValidationError, match="misspelt"):
            check_jobset(bad)


@pytest.mark.slow
@pytest.mark.skipif(python_with_sky is None, reason="MFLEET_TEST_SKY names no Python with skypilot==0.14.1")
def test_skypilot_loads_the_tasks_and_its_optimizer_chooses(tmp_path):
    assert python_with_sky is not None
    kinds = {kind: overrides for kind, overrides in SKY.items() if kind not in ("spot hosts", "machine images")}
    files = [STATIC / "skypilot" / "train.yaml"]
    for index, overrides in enumerate(kinds.values()):
        files.append(tmp_path / f"{index}.yaml")
        files[-1].write_text(sky_task(overrides))
    command = [python_with_sky, Path(__file__).with_name("sky_check.py"), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S * 2, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    static, one, two, cpus, image = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert one["secrets"] == ["MFLEET_TOKEN", "WANDB_API_KEY"] and one["tried"][:4] == ["slurm"] * 3 + ["runpod"]
    assert two["hosts"] == 2 and "vast" not in two["tried"] and image["tried"] == ["vast"] * 3 + ["lambda"] * 3
    assert {said["chosen"] for said in (static, one, two, image)} == {"Lambda gpu_8x_h100_sxm5"}
    assert cpus["chosen"] == "Lambda cpu_4x_general"
    recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    assert [said["recovery"] for said in (static, one, two, cpus, image)] == [recovery] * 5
