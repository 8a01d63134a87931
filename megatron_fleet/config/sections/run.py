"""Sections `run`, `cluster` and `checkpoint`: the run, its processes and its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Rule, Section, is_in_store

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


class RunConfig(Section):
    name: str = Field(description="Name of the run, used in records and titles.")
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=120,
        description="Id of the run, and the prefix of everything that it stores remotely. null: as `out` has it in "
        "run.json, or `<name>_<8 hex digits>` for a new folder.",
    )
    out: str = Field(description="Folder of the run's outputs; created if missing.")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and initial state.")
    steps: int | None = Field(
        None, ge=0, description="Optimizer batches (rollout + update) to run in all, resumed ones included."
    )
    epochs: float | None = Field(
        None,
        gt=0,
        description="Length of the run instead of `steps`, which is then set: an epoch is as many prompts as there are "
        "training tasks that data.mixture draws from, rounded up to whole steps. A prompt counts when it is drawn, "
        "whether or not its group is trained on.",
    )
    deterministic: bool = Field(
        True,
        description="Seed every request. On CPUs equal seeds then give equal runs. On GPUs they do not: kernels of "
        "engines round differently with the requests they batch, and attention's backward pass with every run.",
    )
    project: str = Field(
        "megatron_fleet",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=120,
        description="Folder of the run in checkpoint.store.url.",
    )
    resume: Literal["auto", "must", "never"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="auto: resume from the newest whole checkpoint, in `out` or the store, else start. must: the same, "
        "but refuse to start without one. A step: resume from its checkpoint; later ones no longer count. never: start "
        "anew; if `out` has the records of an earlier run, it is renamed to `<out>.1`, or the next free number.",
    )
    time_limit_s: float | None = Field(
        None,
        gt=0,
        description="Save and end this many seconds after the start, with exit status 75; episodes are abandoned, an "
        "update is finished. null: no limit.",
    )
    shared: bool = Field(
        False,
        description="Who may read the outputs. false: only the user who starts the run (folders that it makes have "
        "mode 0700, files 0600); true: also those whom the user's umask permits, such as a group.",
    )

    @property
    def last_step(self) -> int:
        """Steps in all. Raises ValueError while the length is in epochs, see `loop.run_tasks.in_steps`."""
        if self.steps is None:
            raise ValueError("the length of the run is not in steps yet")
        return self.steps


class ClusterConfig(Section):
    ranks: Literal["local", "external"] = Field(
        "local",
        description="local: `mfleet train` starts the ranks, on this machine or through cluster.nodes; external: "
        "torchrun or srun does, and MFLEET_CONTROLLER and MFLEET_TOKEN tell them where this process listens.",
    )
    nodes: int = Field(
        0,
        ge=0,
        description="Hosts that run `mfleet node`, this one included if it does, those with --rollout-only not; 0: all "
        "is on this machine.",
    )
    gpu: Literal["A100", "H20", "H100", "H200", "B200", "B300"] | None = Field(
        None,
        description="Kind of GPU that layout and micro-batches were chosen for. `mfleet plan` and `mfleet train "
        "--dry-run --gpus` compute with it, SkyPilot requests it first, and a run on another kind warns. null: "
        "any; plans are for H100.",
    )
    join_timeout_s: float = Field(600, gt=0, description="Deadline for all hosts, and for all ranks, to connect.")
    collective_timeout_s: float = Field(
        1800,
        gt=0,
        description="Timeout of a collective between ranks; a longer one ends the ranks. None is pending while they "
        "wait for the controller.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a failed trainer allowed within an hour; each resumes from the last checkpoint.",
    )


class StoreConfig(Section):
    url: str | None = Field(
        None,
        description="Where every checkpoint is copied in the background: s3://…, gs://…, or a folder on another "
        "disk. Below it: `<run.project>/<last part of model.path>/<run.id>/global_step_<N>/`.",
    )
    keep: int | None = Field(None, ge=1, description="Number of newest checkpoints to keep in the store; null: all.")
    mb_per_s: float | None = Field(
        None, gt=0, description="Limit of the uploads, in 10⁶ bytes per second; null: no limit."
    )
    drain_timeout_s: float = Field(
        1800,
        ge=0,
        description="Wait for unfinished uploads, and for exports, when the run ends; what is left stays in `run.out`. "
        "Without a folder that all hosts share: also the wait for one upload before the next checkpoint.",
    )


class ExportConfig(Section):
    """Checkpoints as HF folders, for other programs and as `model.path` of another run."""

    last: bool = Field(True, description="Write the trained model to `run.out/hf` at the end of the run.")
    every: int = Field(
        0,
        ge=0,
        description="Checkpoints of steps that are multiples of this are exported to `run.out/exports/step_<N>` while "
        "training continues; 0: none.",
    )
    best: bool = Field(False, description="So is each new best checkpoint by checkpoint.keep_best.")
    keep: int = Field(
        2, ge=1, description="Number of newest exports of `every` to keep in `run.out`; the store keeps all."
    )
    check: bool = Field(
        False,
        description="Load each export in vLLM and compare a few log-probs with the trainer's, within "
        "rollout.engine.probe_tolerance: at once on CPUs; on GPUs when the run has ended and left them.",
    )


class CheckpointConfig(Section):
    interval: int = Field(5, ge=0, description="Steps between checkpoints; 0 = only at the end.")
    asynchronous: bool = Field(
        True,
        description="Ranks copy their state to host memory, as much again as they hold, and write it while training "
        "continues. false: training waits until it is written, without a copy.",
    )
    keep: int = Field(2, ge=1, description="Number of newest checkpoints to keep in `run.out`.")
    keep_every: int = Field(
        0, ge=0, description="Checkpoints of steps that are multiples of this are kept as well; 0: none."
    )
    keep_best: str | None = Field(
        None, description="The checkpoint with the highest value of this metric is kept as well: `eval/all/pass_at_1`."
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="When a checkpoint cannot be written, for example because the disk is full: stop the run, or "
        "continue without it and try again at the next one. Earlier checkpoints stay.",
    )
    store: StoreConfig = StoreConfig()
    export: ExportConfig = ExportConfig()


def _length(c: Config) -> str | None:
    if c.run.steps is None and c.run.epochs is None:
        return "run.steps and run.epochs are both null; give the length of the run as one of them."
    if c.run.steps is not None and c.run.epochs is not None:
        return f"run.steps={c.run.steps} and run.epochs={c.run.epochs:g} exclude each other; set run.steps=null."
    return None


def _store(c: Config) -> str | None:
    url = c.checkpoint.store.url
    if url is None:
        return None
    if "@" in url:
        return "checkpoint.store.url holds an @, as an address with a key does, which would be written to files."
    if "://" in url and not is_in_store(url):
        return f"checkpoint.store.url={url} is not the address of a folder; write a path, s3://… or gs://bucket/prefix."
    return None


def _export(c: Config) -> str | None:
    export, interval = c.checkpoint.export, c.checkpoint.interval
    if export.every and (not interval or export.every % interval):
        return (
            f"checkpoint.export.every={export.every} is not a multiple of checkpoint.interval={interval}: only steps "
            f"with a checkpoint can be exported; change one of them."
        )
    if export.best and c.checkpoint.keep_best is None:
        return "checkpoint.export.best needs checkpoint.keep_best; name the metric, for example eval/all/pass_at_1."
    if c.policy.lora.rank and (export.every or export.best or export.check):
        return (
            f"checkpoint.export: only the last step of a run with policy.lora.rank={c.policy.lora.rank} can be "
            f"exported, without a check; leave out every, best and check."
        )
    return None


RULES: tuple[Rule, ...] = (_length, _store, _export)
