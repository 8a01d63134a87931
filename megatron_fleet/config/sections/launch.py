"""Section `launch`: where and how `mfleet launch` runs a job. Nothing else reads it, so an experiment is the same one
with every value of the group `cluster`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]*$"


class SlurmConfig(Section):
    partition: str | None = Field(None, pattern=_NAME, description="Partition; null: the cluster's default.")
    account: str | None = Field(None, pattern=_NAME, description="Account that is charged.")
    qos: str | None = Field(None, pattern=_NAME, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that the hosts must have, as sbatch takes them.")
    time: str = Field(
        "24:00:00",
        pattern=r"^(\d+-)?\d{1,3}(:\d{2}){0,2}$",
        description="Time limit of one attempt, as sbatch takes it; then the run is requeued and resumes.",
    )
    signal_s: int = Field(
        600,
        ge=60,
        le=65535,
        description="Seconds before the time limit at which the run is signalled to save and end: longer than an "
        "update and a checkpoint take.",
    )
    exclusive: bool = Field(True, description="No other job on the hosts.")
    parallel: int | None = Field(None, ge=1, description="Runs of a sweep at a time; null: all that fit.")
    options: dict[str, str] = Field(
        {},
        description="Further options of sbatch by their long names, as {reservation: NAME}; with an empty value one "
        "that takes none. One that the launcher sets itself is replaced, and left out where the value is empty: "
        '{gpus-per-node: ""} asks for no GPUs. A request for GPUs by gpus, gpus-per-task, gpus-per-socket, gres or '
        "tres-per-… replaces --gpus-per-node.",
    )
    rollout_hosts: int = Field(
        0,
        ge=0,
        description="Further hosts, of another kind, that have engines and no ranks: a heterogeneous job; needs "
        "rollout.engine.colocated=false.",
    )
    rollout_options: dict[str, str] = Field(
        {}, description="Options of sbatch for those, as {partition: NAME, gpus-per-node: '4'}; see `options`."
    )
    container: Literal["pyxis", "apptainer"] = Field(
        "pyxis", description="What runs launch.image: Slurm's plugin, or apptainer."
    )
    mounts: tuple[str, ...] = Field((), description="Folders of the hosts in the container, as /scratch:/scratch.")


class SkyPilotConfig(Section):
    infra: tuple[str, ...] = Field(
        ("slurm", "runpod", "lambda", "vast", "nebius", "primeintellect", "kubernetes", "gcp", "aws"),
        min_length=1,
        description="Where the job may run, in the order in which it is tried; also with a region, as `aws/us-east-1`.",
    )
    accelerators: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Acceptable GPUs, in order of preference. Those too small for the run, by `mfleet plan`, are "
        "skipped. null: cluster.gpu, then H100, H200, B200.",
    )
    spot: tuple[str, ...] = Field((), description="Places, as in `infra`, where preemptible hosts are taken.")
    images: dict[str, str] = Field(
        {}, description="Machine image by place; others, and places not named, take SkyPilot's own."
    )
    disk_gb: int = Field(750, ge=50, description="Disk of each host, for model, checkpoints and both environments.")


class KubernetesConfig(Section):
    namespace: str = Field("default", pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", description="Namespace.")
    queue: str | None = Field(None, description="Kueue's local queue; null: the job starts at once.")
    labels: dict[str, str] = Field(
        {}, description="Labels of the JobSet and its pods, as {kueue.x-k8s.io/priority-class: high}."
    )
    annotations: dict[str, str] = Field(
        {},
        description="Annotations of the JobSet and its pods, as {kueue.x-k8s.io/podset-required-topology: "
        "topology.example.com/rack}.",
    )
    priority_class: str | None = Field(None, description="Priority class of the pods.")
    image_pull_secrets: tuple[str, ...] = Field(
        (), description="Secrets of the namespace with which launch.image is pulled from its registry."
    )
    node_selector: dict[str, str] = Field({}, description="Labels that the nodes must have.")
    tolerations: tuple[str, ...] = Field(
        (), description="Taints of nodes that the pods tolerate, by their keys, whatever value and effect they have."
    )
    claim: str | None = Field(
        None,
        description="Persistent volume claim, writable by many hosts, for runs/; null: each host's own disk, which is "
        "lost with it.",
    )
    volumes: tuple[str, ...] = Field(
        (),
        description="Further persistent volume claims and where they are mounted, as models:/mnt/models, or "
        "models:/mnt/models:ro to read only.",
    )
    env_secrets: tuple[str, ...] = Field(
        (),
        description="Secrets that the namespace has already, whose entries become environment variables of the job; "
        "variables that the job gets from this shell come before them.",
    )
    cpus: int | None = Field(None, ge=1, description="CPUs of each host; null: no limit.")
    memory_gb: int | None = Field(None, ge=1, description="Memory of each host; null: no limit.")
    shared_memory_gb: int = Field(64, ge=1, description="Size of /dev/shm, which counts as memory.")
    gpu_resource: str = Field("nvidia.com/gpu", description="Name of the resource that launch.gpus counts.")
    resources: dict[str, int | str] = Field(
        {}, description="Further resources of each host, as {rdma/ib: 1, ephemeral-storage: 500Gi}."
    )
    rdma: Literal["ipc_lock", "privileged"] | None = Field(
        None,
        description="Rights of the container for RDMA. ipc_lock: the capability to lock memory, which InfiniBand and "
        "EFA need; privileged: all, for clusters that show InfiniBand to privileged containers only. null: no extra "
        "rights.",
    )
    pod: dict[str, Any] = Field(
        {},
        description="Whatever else the pods need: a part of a pod's spec, which is merged into ours, as "
        "{securityContext: {runAsUser: 1000}}; the container is named host. Mappings merge, null removes a key; "
        "items of lists merge with ours of the same mountPath or name, all others are appended.",
    )


class LaunchConfig(Section):
    kind: Literal["local", "torchrun", "slurm", "skypilot", "kubernetes"] = Field(
        "local", description="What starts the job; the group `cluster` sets it."
    )
    min_hosts: int | None = Field(
        None,
        ge=1,
        description="Slurm: with fewer hosts than cluster.nodes, as after the loss of one, the job starts with as few "
        "as these; parallel.data and rollout.engine.replicas shrink in proportion. null: it waits for all.",
    )
    gpus: int = Field(8, ge=0, description="GPUs of each host; 0: ranks and engines compute on CPUs.")
    shared_disk: bool = Field(
        True, description="The project and run.out are on a disk that all hosts, and this one, have at the same paths."
    )
    install: bool = Field(
        False, description="Run setup.sh on the hosts first: once where they share a disk, while the others wait."
    )
    install_timeout_s: int = Field(3600, ge=60, description="A host that has not been set up by then ends the job.")
    doctor: bool = Field(
        True,
        description="Slurm, SkyPilot, Kubernetes: `mfleet doctor --quick` runs on the hosts first, and a host on which "
        "the run would not work ends the job.",
    )
    max_requeues: int = Field(
        20,
        ge=0,
        description="Maximum number of restarts of a run that was preempted after a checkpoint, or lost a host.",
    )
    fabric: Literal["auto", "ethernet", "infiniband", "efa", "provider"] = Field(
        "auto",
        description="Network between the hosts, for NCCL's variables. auto: none, NCCL looks by itself; provider: "
        "none, and those of this shell are not carried along, because the provider's own script sets them.",
    )
    environment: dict[str, str] = Field({}, description="Further environment variables of the job; no secrets.")
    secrets: tuple[str, ...] = Field(
        (), description="Names of further environment variables with secrets that the job needs."
    )
    image: str | None = Field(None, description="Container image with the project in /megatron_fleet (Dockerfile).")
    slurm: SlurmConfig = SlurmConfig()
    skypilot: SkyPilotConfig = SkyPilotConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
