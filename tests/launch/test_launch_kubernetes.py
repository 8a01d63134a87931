"""What a cluster's pods need: by keys of their own, and by a part of a pod's spec that is merged into ours."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_fleet.config.errors import UserError
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.kubernetes import Kubernetes, merged
from megatron_fleet.launch.plan import plan

STORE = "checkpoint.store.url=s3://bucket/prefix"
TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "commit", lambda: "abc")


def jobset(*overrides: str) -> dict[str, Any]:
    words = ["experiment=quickstart", "cluster=kubernetes", "launch.image=registry/mf:1", STORE, *overrides]
    job = plan([words], {})
    Kubernetes().check(job)
    return yaml.safe_load(Kubernetes().render(job).files["job.yaml"])


def template(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def lacks(ours: Any, needed: Any) -> list[str]:
    """What a manifest lacks of a part of one: all keys, and for each item of a list one of ours that has all of it."""
    if isinstance(needed, dict):
        missing = [key for key in needed if key not in ours]
        return missing + [
            f"{key}.{one}" for key in needed.keys() & ours.keys() for one in lacks(ours[key], needed[key])
        ]
    if isinstance(needed, list):
        return [str(item) for item in needed if not any(lacks(one, item) == [] for one in ours)]
    return [] if ours == needed else [f"{needed!r}, not {ours!r}"]


NEEDED = """
metadata:
  annotations:
    example.ai/failure-alerts: "off"
    kueue.x-k8s.io/podset-required-topology: topology.example.com/tier-2
spec:
  priorityClassName: train-high
  imagePullSecrets: [{name: registry-pull}]
  tolerations: [{key: workload, operator: Exists, effect: NoSchedule}]
  securityContext: {runAsUser: 1000, runAsGroup: 100}
  volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
  containers:
    - securityContext: {privileged: true}
      volumeMounts: [{name: models, mountPath: /mnt/models, readOnly: true}]
      envFrom: [{secretRef: {name: shared-wandb-key}}]
"""
"""Of pods in the users' own job: `rayjob.yaml.tmpl` of fleet-ai/miles-fleet, names replaced."""


def test_the_pods_of_a_job_of_the_users_can_be_said():
    manifest = jobset(
        f'launch.kubernetes.annotations={{example.ai/failure-alerts: "off", {TOPOLOGY}: topology.example.com/tier-2}}',
        "launch.kubernetes.priority_class=train-high",
        "launch.kubernetes.image_pull_secrets=[registry-pull]",
        "launch.kubernetes.env_secrets=[shared-wandb-key]",
        "launch.kubernetes.rdma=privileged",
        "launch.kubernetes.pod={securityContext: {runAsUser: 1000, runAsGroup: 100}, "
        "tolerations: [{key: workload, operator: Exists, effect: NoSchedule}], "
        "volumes: [{name: models, persistentVolumeClaim: {claimName: models}}], "
        "containers: [{name: host, volumeMounts: [{name: models, mountPath: /mnt/models, readOnly: true}]}]}",
    )
    assert lacks(template(manifest), yaml.safe_load(NEEDED)) == []
    assert manifest["metadata"]["annotations"][TOPOLOGY] == "topology.example.com/tier-2"
    assert lacks(template(jobset()), yaml.safe_load(NEEDED)) != []


def test_keys_for_what_many_clusters_need():
    manifest = jobset(
        "launch.kubernetes.queue=training",
        "launch.kubernetes.labels={kueue.x-k8s.io/priority-class: high}",
        "launch.kubernetes.tolerations=[nvidia.com/gpu]",
        "launch.kubernetes.volumes=[models:/mnt/models:ro,scratch:/mnt/a,scratch:/mnt/b]",
        "launch.kubernetes.rdma=ipc_lock",
        "launch.kubernetes.gpu_resource=nvidia.com/mig-3g.40gb",
        "launch.kubernetes.resources={rdma/ib: 1, ephemeral-storage: 500Gi}",
        "launch.kubernetes.cpus=64",
    )
    assert manifest["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "training",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert template(manifest)["metadata"] == {"labels": {"kueue.x-k8s.io/priority-class": "high"}}
    pod = template(manifest)["spec"]
    (host,) = pod["containers"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert host["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    limits = {"nvidia.com/mig-3g.40gb": 8, "cpu": 64, "rdma/ib": 1, "ephemeral-storage": "500Gi"}
    assert host["resources"] == {"limits": limits}
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"][2:]}
    mounts = [(claims[one["name"]], one["mountPath"], one.get("readOnly")) for one in host["volumeMounts"][2:]]
    assert mounts == [("models", "/mnt/models", True), ("scratch", "/mnt/a", None), ("scratch", "/mnt/b", None)]
    assert len(pod["volumes"]) == 4


def test_variables_of_this_shell_come_before_those_of_secrets_in_the_namespace():
    manifest = jobset("launch.kubernetes.env_secrets=[shared]")
    (host,) = template(manifest)["spec"]["containers"]
    # Of equal names, the last source decides.
    assert [one["secretRef"]["name"] for one in host["envFrom"]] == ["shared", manifest["metadata"]["name"]]


def test_variables_are_not_replaced_in_arguments():
    manifest = jobset("run.name=$(MFLEET_TOKEN) $HOME $$", 'launch.environment={A: "$(MFLEET_TOKEN)"}')
    (host,) = template(manifest)["spec"]["containers"]
    # Kubernetes replaces $(NAME), and makes $ of $$.
    assert "run.name=$$(MFLEET_TOKEN) $$HOME $$$$" in host["args"]
    assert {"name": "A", "value": "$$(MFLEET_TOKEN)"} in host["env"]


def test_a_part_of_a_pod_is_merged():
    part = (
        "launch.kubernetes.pod={terminationGracePeriodSeconds: 60, hostNetwork: true, restartPolicy: null, "
        "volumes: [{name: runs, emptyDir: null, nfs: {server: nfs, path: /runs}}, {name: other, emptyDir: {}}], "
        "initContainers: [{name: dind, image: docker, restartPolicy: Always}], "
        "containers: [{name: host, resources: {requests: {cpu: 8}}, "
        "volumeMounts: [{name: other, mountPath: /mnt/other}, {mountPath: /dev/shm, readOnly: true}]}]}"
    )
    before, pod = template(jobset())["spec"], template(jobset(part))["spec"]
    assert "restartPolicy" in before and "restartPolicy" not in pod
    assert pod["terminationGracePeriodSeconds"] == 60 and pod["hostNetwork"] is True
    assert pod["volumes"] == [
        before["volumes"][0],
        {"name": "runs", "nfs": {"server": "nfs", "path": "/runs"}},
        {"name": "other", "emptyDir": {}},
    ]
    assert [one["name"] for one in pod["initContainers"]] == ["dind"]
    ((was,), (host,)) = before["containers"], pod["containers"]
    assert host["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": 8}}
    assert host["volumeMounts"] == [
        {"name": "shared-memory", "mountPath": "/dev/shm", "readOnly": True},
        was["volumeMounts"][1],
        {"name": "other", "mountPath": "/mnt/other"},
    ]
    assert host.keys() == was.keys() and host["command"] == was["command"]


def test_lists_without_names_are_appended_and_ours_stays_as_it_was():
    ours = {"a": [{"key": 1}], "b": [{"name": "x", "c": 1}]}
    assert merged(ours, {"a": [{"key": 1}], "b": [{"name": "y"}]}) == {
        "a": [{"key": 1}, {"key": 1}],
        "b": [{"name": "x", "c": 1}, {"name": "y"}],
    }
    assert ours == {"a": [{"key": 1}], "b": [{"name": "x", "c": 1}]}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.kubernetes.pod={containers: {name: host}}", r"^launch.kubernetes.pod.containers must be a list"),
        ("launch.kubernetes.pod={volumes: [{name: runs, emptyDir: 1}]}", r"pod.volumes.emptyDir must be a mapping"),
        ("launch.kubernetes.pod={restartPolicy: [a]}", r"pod.restartPolicy must be a single value"),
        ("launch.kubernetes.volumes=[models]", r"^launch.kubernetes.volumes: 'models' is not a claim with a path"),
        ("launch.kubernetes.volumes=[models:mnt]", r"models:/mnt/models:ro to read only"),
    ],
)
def test_what_does_not_fit_a_pod_is_refused(override, said):
    with pytest.raises(UserError, match=said):
        jobset(override)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("a run", "--filename={}/a run/launch/job.yaml"), ('a,"b"', '--filename="{}/a,""b""/launch/job.yaml"')],
)
def test_kubectl_reads_a_path_with_a_comma_as_one(name, argument, tmp_path):
    words = ["experiment=quickstart", "cluster=kubernetes", "launch.image=a", STORE, f"run.out={name}"]
    *_, said = Kubernetes().render(plan([words], {})).commands[1]
    assert said == argument.format(tmp_path)
