"""JobSets on Kubernetes: ``launch/kubernetes/train.yaml`` with what `launch` and `launch.kubernetes` say filled in.

The runs of a sweep are JobSets of their own. Secrets go to the cluster through kubectl's standard input, as a Secret
with the JobSet's name; they are in no file here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import KubernetesConfig
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.launch.job import (
    FOLLOW_S,
    SCRIPTS,
    TOKEN,
    Job,
    Record,
    Rendered,
    Run,
    State,
    as_yaml,
    execute,
    host_variables,
    later_state,
    new_token,
    remote_out,
)

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
NAME_CHARACTERS = 40
"""Names of pods have a suffix, and at most 63 characters."""
_VOLUME = re.compile(r"([^:]+):(/[^:]+)(:ro)?")
"""Matches a persistent volume claim, where it is mounted, and whether to read only."""


class Kubernetes:
    """See `job.Launcher`."""

    def check(self, job: Job) -> None:
        """Check that there is an image, and what it has."""
        launch = job.config.launch
        if launch.image is None:
            raise UserError(
                "launch.image must be set for cluster=kubernetes; push the Dockerfile's image, and name it."
            )
        if launch.install:
            raise UserError("launch.install=true: the environments are in launch.image; set it to false.")
        for volume in launch.kubernetes.volumes:
            if not _VOLUME.fullmatch(volume):
                raise UserError(
                    f"launch.kubernetes.volumes: {volume!r} is not a claim with a path; write models:/mnt/models, or "
                    f"models:/mnt/models:ro to read only."
                )

    def render(self, job: Job) -> Rendered:
        """Return one JobSet for each run, and the commands that make its Secret and itself."""
        namespace = f"--namespace={job.config.launch.kubernetes.namespace}"
        files: dict[str, str] = {}
        commands: list[tuple[str, ...]] = []
        stdin: list[str] = []
        for index, run in enumerate(job.runs):
            name = f"job-{index}.yaml" if len(job.runs) > 1 else "job.yaml"
            files[name] = as_yaml(_jobset(job, run))
            commands.append(("kubectl", namespace, "apply", "--server-side", "--filename=-"))
            commands.append(("kubectl", namespace, "create", f"--filename={_file(job.folder / name)}"))
            stdin += [json.dumps(_secret(job, run)), ""]
        return Rendered(files, tuple(commands), tuple(stdin))

    def submit(self, job: Job, rendered: Rendered) -> Record:
        """Have the cluster check the JobSets, then make them."""
        environ = without_secrets(job.environ)
        for command in rendered.commands[1::2]:
            execute([*command, "--dry-run=server"], environ)
        for command, stdin in zip(rendered.commands, rendered.stdin, strict=True):
            execute(command, environ, stdin)
        detail = {"namespace": job.config.launch.kubernetes.namespace}
        names = [jobset_name(run) for run in job.runs]
        return Record("kubernetes", job.name, names, [str(run.out) for run in job.runs], job.commit, detail=detail)

    def follow(self, record: Record, folder: Path) -> State:
        """Print the logs of the JobSets, one after the other, until each has ended."""
        worst, kubectl = State("completed", 0), _kubectl(record)
        for name in record.ids:
            since: list[str] = []
            state = _state(kubectl, name)
            while state.status is None:
                selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
                logs = [*kubectl, "logs", "--follow", "--prefix", "--max-log-requests=100", selector, *since]
                subprocess.run(logs, env=without_secrets(os.environ), check=False)
                since = [f"--since={FOLLOW_S:.0f}s"]
                time.sleep(FOLLOW_S)
                state = later_state(partial(_state, kubectl, name))
            worst = state if state.status else worst
        return worst

    def cancel(self, record: Record, folder: Path) -> None:
        """Delete the JobSets, whose pods have time to save, and their Secrets."""
        for name in record.ids:
            command = [*_kubectl(record), "delete", "--ignore-not-found", "--wait=false", f"jobset/{name}"]
            execute([*command, f"secret/{name}"], without_secrets(os.environ))


def jobset_name(run: Run) -> str:
    """Return the name of a run's JobSet, a DNS label; ids are unique in their last characters."""
    name = re.sub(r"[^a-z0-9-]+", "-", f"mfleet-{run.id}".lower())
    return name if len(name) <= NAME_CHARACTERS else f"mfleet{name[-(NAME_CHARACTERS - 6) :]}".rstrip("-")


def _file(path: Path) -> str:
    """Quote a path for kubectl's ``--filename``, which takes a row of CSV."""
    text = str(path)
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def _secret(job: Job, run: Run) -> dict[str, Any]:
    values = {name: job.environ[name] for name in job.secrets} | {TOKEN: new_token()}
    metadata = {"name": jobset_name(run)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": values}


def _jobset(job: Job, run: Run) -> dict[str, Any]:
    import yaml

    launch, kubernetes, name = job.config.launch, job.config.launch.kubernetes, jobset_name(run)
    jobset: dict[str, Any] = yaml.safe_load((SCRIPTS / "kubernetes" / "train.yaml").read_text(encoding="utf-8"))
    queue = {QUEUE_LABEL: kubernetes.queue} if kubernetes.queue else {}
    jobset["metadata"] = {"name": name, "namespace": kubernetes.namespace} | _metadata(job, queue)
    jobset["spec"]["failurePolicy"]["maxRestarts"] = launch.max_requeues
    indexed = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    indexed["parallelism"] = indexed["completions"] = job.hosts
    if metadata := _metadata(job, {}):
        indexed["template"]["metadata"] = metadata
    pod = indexed["template"]["spec"]
    (host,) = pod["containers"]
    host["image"], host["args"] = launch.image, [_literal(text) for text in run.overrides]
    fixed = {"HOSTS": str(job.hosts), "HEAD": f"{name}-host-0-0.{name}"}
    ours = {"MFLEET_OUT": remote_out(run)}
    for variable in host["env"]:
        variable |= {"value": fixed[variable["name"]]} if variable["name"] in fixed else {}
    ours |= host_variables(job.config) | {variable: job.environ[variable] for variable in job.variables}
    host["env"] += [{"name": variable, "value": _literal(value)} for variable, value in ours.items()]
    # The last one decides.
    host["envFrom"] = [{"secretRef": {"name": secret}} for secret in (*kubernetes.env_secrets, name)]
    host["resources"] = _resources(job)
    memory, runs = pod["volumes"]
    memory["emptyDir"]["sizeLimit"] = f"{kubernetes.shared_memory_gb}Gi"
    if kubernetes.claim:
        del runs["emptyDir"]
        runs["persistentVolumeClaim"] = {"claimName": kubernetes.claim}
    indexed["template"]["spec"] = merged(merged(pod, _usual(kubernetes)), kubernetes.pod, "launch.kubernetes.pod")
    return jobset


def _metadata(job: Job, labels: dict[str, str]) -> dict[str, Any]:
    kubernetes = job.config.launch.kubernetes
    both = {"labels": labels | kubernetes.labels, "annotations": kubernetes.annotations}
    return {name: values for name, values in both.items() if values}


def _literal(text: str) -> str:
    """Escape a text in which Kubernetes would replace ``$(NAME)`` by the value of a variable, as of a secret."""
    return text.replace("$", "$$")


def _usual(kubernetes: KubernetesConfig) -> dict[str, Any]:
    """Return the part of the pod's spec that keys of their own ask for."""
    part: dict[str, Any] = {"containers": [{"name": "host"}]}
    (host,) = part["containers"]
    if kubernetes.priority_class:
        part["priorityClassName"] = kubernetes.priority_class
    if kubernetes.image_pull_secrets:
        part["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    if kubernetes.node_selector:
        part["nodeSelector"] = kubernetes.node_selector
    if kubernetes.tolerations:
        part["tolerations"] = [{"key": key, "operator": "Exists"} for key in kubernetes.tolerations]
    if kubernetes.rdma:
        rights = {"ipc_lock": {"capabilities": {"add": ["IPC_LOCK"]}}, "privileged": {"privileged": True}}
        host["securityContext"] = rights[kubernetes.rdma]
    if kubernetes.volumes:
        found = [match.groups() for match in map(_VOLUME.fullmatch, kubernetes.volumes) if match]
        names = {claim: f"claim-{index}" for index, claim in enumerate(dict.fromkeys(claim for claim, *_ in found))}
        part["volumes"] = [{"name": names[c], "persistentVolumeClaim": {"claimName": c}} for c in names]
        host["volumeMounts"] = [
            {"name": names[claim], "mountPath": path, **({"readOnly": True} if read_only else {})}
            for claim, path, read_only in found
        ]
    return part


def merged(ours: Any, theirs: Any, where: str = "") -> Any:
    """Return ``ours`` with a part of the same tree merged in.

    Mappings merge, and null removes a key. An item of a list merges with ours that has the same ``mountPath``, or else
    the same ``name``; other items are appended. Any other value replaces ours.

    Args:
        where: key of ``theirs``, for errors.

    Raises:
        UserError: one of the two has a mapping or a list where the other has something else.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = dict(ours)
        for key, value in theirs.items():
            if value is None:
                both.pop(key, None)
            else:
                both[key] = merged(both[key], value, f"{where}.{key}") if key in both else value
        return both
    if isinstance(ours, list) and isinstance(theirs, list):
        items = list(ours)
        for item in theirs:
            same = [index for index, one in enumerate(items) if _identity(one) and _identity(one) == _identity(item)]
            if same:
                items[same[0]] = merged(items[same[0]], item, where)
            else:
                items.append(item)
        return items
    if isinstance(ours, dict | list) or isinstance(theirs, dict | list):
        kind = "a mapping" if isinstance(ours, dict) else "a list" if isinstance(ours, list) else "a single value"
        raise UserError(f"{where} must be {kind}, as in the pod; correct it.")
    return theirs


def _identity(item: Any) -> str | None:
    return item.get("mountPath") or item.get("name") if isinstance(item, dict) else None


def _resources(job: Job) -> dict[str, Any]:
    launch, kubernetes = job.config.launch, job.config.launch.kubernetes
    limits = {
        kubernetes.gpu_resource: launch.gpus or None,
        "cpu": kubernetes.cpus,
        "memory": f"{kubernetes.memory_gb}Gi" if kubernetes.memory_gb else None,
        **kubernetes.resources,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return {"limits": given} if given else {}


def _kubectl(record: Record) -> list[str]:
    return ["kubectl", f"--namespace={record.detail['namespace']}"]


def _state(kubectl: list[str], name: str) -> State:
    shown = json.loads(execute([*kubectl, "get", f"jobset/{name}", "--output=json"], without_secrets(os.environ)))
    met = {c["type"] for c in shown.get("status", {}).get("conditions", []) if c["status"] == "True"}
    if "Completed" in met:
        return State("completed", 0)
    return State("failed", 1) if "Failed" in met else State("suspended" if "Suspended" in met else "running")
