"""JobSets on Kubernetes: ``launch/kubernetes/train.yaml`` with image, hosts, overrides, volume and queue filled in.

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

from megatron_fleet.cluster.launch.job import (
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
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.secrets import without_secrets

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
NAME_CHARACTERS = 40
"""Names of pods have a suffix, and at most 63 characters."""


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
            commands.append(("kubectl", namespace, "create", f"--filename={job.folder / name}"))
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


def _secret(job: Job, run: Run) -> dict[str, Any]:
    values = {name: job.environ[name] for name in job.secrets} | {TOKEN: new_token()}
    metadata = {"name": jobset_name(run)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": values}


def _jobset(job: Job, run: Run) -> dict[str, Any]:
    import yaml

    launch, kubernetes, name = job.config.launch, job.config.launch.kubernetes, jobset_name(run)
    jobset: dict[str, Any] = yaml.safe_load((SCRIPTS / "kubernetes" / "train.yaml").read_text(encoding="utf-8"))
    jobset["metadata"] = {"name": name, "namespace": kubernetes.namespace}
    if kubernetes.queue:
        jobset["metadata"]["labels"] = {QUEUE_LABEL: kubernetes.queue}
    jobset["spec"]["failurePolicy"]["maxRestarts"] = launch.max_requeues
    indexed = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    indexed["parallelism"] = indexed["completions"] = job.hosts
    pod = indexed["template"]["spec"]
    if kubernetes.node_selector:
        pod["nodeSelector"] = kubernetes.node_selector
    (host,) = pod["containers"]
    host["image"], host["args"] = launch.image, list(run.overrides)
    fixed = {"HOSTS": str(job.hosts), "HEAD": f"{name}-host-0-0.{name}"}
    ours = {"MFLEET_OUT": remote_out(run)}
    for variable in host["env"]:
        variable |= {"value": fixed[variable["name"]]} if variable["name"] in fixed else {}
    ours |= host_variables(job.config) | {variable: job.environ[variable] for variable in job.variables}
    host["env"] += [{"name": variable, "value": value} for variable, value in ours.items()]
    host["envFrom"][0]["secretRef"]["name"] = name
    host["resources"] = _resources(job)
    memory, runs = pod["volumes"]
    memory["emptyDir"]["sizeLimit"] = f"{kubernetes.shared_memory_gb}Gi"
    if kubernetes.claim:
        del runs["emptyDir"]
        runs["persistentVolumeClaim"] = {"claimName": kubernetes.claim}
    return jobset


def _resources(job: Job) -> dict[str, Any]:
    launch, kubernetes = job.config.launch, job.config.launch.kubernetes
    limits = {
        "nvidia.com/gpu": launch.gpus or None,
        "cpu": kubernetes.cpus,
        "memory": f"{kubernetes.memory_gb}Gi" if kubernetes.memory_gb else None,
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
