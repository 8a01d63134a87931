"""``mfleet eval``: evaluation without training. An interrupted evaluation can be resumed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.config.errors import UserError, say, say_lines
from megatron_fleet.config.load import dump_resolved, load, load_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import build, check_verifiers
from megatron_fleet.data.split import MANIFEST, SplitManifest
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.dumps import Decode
from megatron_fleet.evaluation.episode_records import EpisodeRecords
from megatron_fleet.evaluation.evaluator import Evaluation, Evaluator, choose, notes
from megatron_fleet.evaluation.store import EpisodeStore, identity
from megatron_fleet.evaluation.terminal import show, table
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.registry import use_family
from megatron_fleet.preflight import checks
from megatron_fleet.rollout.collection import Collection, OnEpisode
from megatron_fleet.rollout.requests import CollectRequest, CollectResult
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.storage.run_folder import RunFolder
from megatron_fleet.telemetry.episodes import why_nothing_is_known

Side = Literal["held-out", "all"]


def read_config(
    overrides: Sequence[str],
    out: Path | None,
    checkpoint: str | None,
    endpoint: str | None = None,
    model: str | None = None,
) -> tuple[Config, Path | None]:
    """Return the configuration, and the folder of the run that ``checkpoint`` belongs to, if any.

    A run's checkpoint is evaluated with the run's configuration plus ``overrides`` (``section.key=value``); anything
    else with the configuration that ``overrides`` compose. ``endpoint`` and ``model``: ``eval.endpoint.url`` and
    ``.model``.

    Raises:
        UserError: as for ``load``, or the output folder holds a training run.
    """
    overrides = [*overrides, *endpoint_overrides(overrides, checkpoint, endpoint, model)]
    if checkpoint is not None and "://" not in checkpoint and not Path(checkpoint).exists():
        raise UserError(
            f"--checkpoint {checkpoint}: no such folder; name a run's, one of its checkpoints, or an HF folder."
        )
    run = None if checkpoint is None else run_of(checkpoint)
    given = [*overrides, f"run.out={(out or Path('runs', 'eval')).absolute()}"]
    if out is None and any(text.startswith("run.out=") for text in overrides):
        given = list(overrides)
    if not any(text.startswith("run.id=") for text in given):
        given = ["run.id=null", *given]  # not that of the run whose checkpoint is evaluated
    config = load(given) if run is None else load_resolved(run / "config.json", given)
    if (Path(config.run.out) / "metrics.jsonl").exists():
        raise UserError(f"{config.run.out} holds a training run; name another folder with --out.")
    engine = config.rollout.engine.model_copy(update={"colocated": False})  # there is no trainer
    rollout = config.rollout.model_copy(update={"engine": engine})
    evaluation = config.eval.model_copy(update={"overlap": False})
    return config.model_copy(update={"rollout": rollout, "eval": evaluation}), run


def run_of(checkpoint: str) -> Path | None:
    """Return the run folder of ``checkpoint`` (the folder itself or a checkpoint in it); ``None``: no local run."""
    path = Path(checkpoint)
    for folder in (path, path.parent.parent):
        if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


def main(config: Config, checkpoint: str | None, run: Path | None, side: Side) -> int:
    """Evaluate and write everything below ``run.out``; returns the exit status.

    Args:
        checkpoint: a run's folder, one of its checkpoints, another Megatron checkpoint; ``None``: ``model.path`` as it
            is.
        run: folder of the run whose task split is reused.

    Raises:
        UserError: a problem that the user can fix.
    """
    out = Path(config.run.out)
    if config.eval.endpoint.url is not None:
        return asyncio.run(evaluate_endpoint(config, run, side))
    if checkpoint is not None:
        use_family(config.model.family)
        path = hf_folder(newest(checkpoint), out / "model")
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
    return asyncio.run(evaluate_model(config, run, side))


async def evaluate_model(config: Config, run: Path | None, side: Side) -> int:
    """Evaluate the HF folder ``model.path``; see `main`."""
    out = Path(config.run.out)
    checks.check_evaluation(config)
    held_out = tasks_of(config, run, side)
    tasks = chosen_tasks(config, held_out)
    checks.check_images(config, tasks)
    store = open_store(config, fingerprint(Path(config.model.folder)), tasks)
    async with AsyncExitStack() as stack:
        services: list[RolloutService] = []

        async def collect(*args: Any) -> CollectResult:
            if not services:  # lazily: nothing is started when all episodes are in the store
                services.append(await stack.enter_async_context(RolloutService(config, out, episode_python())))
            return await services[0].collect(*args)

        evaluation = await play(config, held_out, store, collect)
    finish(config, evaluation, Tokenizer(config.model.folder).decode)
    check_known(evaluation)
    return 0


async def evaluate_endpoint(config: Config, run: Path | None, side: Side) -> int:
    """Evaluate the model behind ``eval.endpoint``: no weights, no engines, no tokens.

    Raises:
        UserError: as for ``main``; or the endpoint refuses or stopped answering. Finished episodes are kept.
    """
    from megatron_fleet.agents.chat_probe import probe

    checks.check_endpoint(config)
    endpoint, sampling = config.eval.endpoint, config.rollout.sampling
    held_out = tasks_of(config, run, side)
    tasks = chosen_tasks(config, held_out)
    store = open_store(config, endpoint.model_dump(exclude={"api_key_env", "max_retries"}), tasks)
    services: list[RolloutService] = []
    async with AsyncExitStack() as stack:

        async def collect(*args: Any) -> CollectResult:
            if not services:
                temperatures = [sampling.temperature, *([0.0] if config.eval.greedy else [])]
                timeout_s = config.rollout.engine.turn_timeout_s(sampling.max_tokens_per_turn)
                dialect = await probe(endpoint, timeout_s, temperatures, sampling.max_tokens_per_turn)
                if left := dialect.left_to_server(json.loads(endpoint.extra_body or "{}")):
                    say(f"{endpoint.url} takes no {', '.join(left)}: its own defaults apply.")
                service = RolloutService(config, Path(config.run.out), episode_python(), dialect=dialect)
                services.append(await stack.enter_async_context(service))
            return await services[0].collect(*args)

        evaluation = await play(config, held_out, store, collect)
    finish(config, evaluation, decode=lambda _: "")
    if services and services[0].dead is not None:
        raise UserError(
            f"eval.endpoint.url={endpoint.url}: stopped because {services[0].dead}; run the same command again to "
            f"continue."
        )
    check_known(evaluation)
    return 0


def endpoint_overrides(
    overrides: Sequence[str], checkpoint: str | None, endpoint: str | None, model: str | None
) -> list[str]:
    """Translate ``--endpoint`` and ``--model`` to overrides; without a folder, ``model.path`` is the model's address.

    Raises:
        UserError: only one of the two is given, or another model is named in addition.
    """
    if endpoint is None and model is None:
        return []
    if endpoint is None or model is None:
        missing = "--endpoint URL" if endpoint is None else "--model NAME"
        raise UserError(f"--endpoint and --model go together; add {missing}.")
    if checkpoint is not None or any(text.startswith(("model.path=", "model=")) for text in overrides):
        other = "--checkpoint" if checkpoint is not None else "model.path"
        raise UserError(f"--endpoint and {other} name two models; remove one of them.")
    address = endpoint.rstrip("/")
    return [f"eval.endpoint.url={address}", f"eval.endpoint.model={model}", f"model.path={address}/{model}"]


def open_store(config: Config, model: Mapping[str, Any], tasks: Sequence[Task]) -> EpisodeStore:
    """Open the episode store in ``run.out`` and write the configuration there. ``model``: identity of the model."""
    out = Path(config.run.out)
    out.mkdir(parents=True, exist_ok=True)
    store = EpisodeStore(out, identity(config, model), tasks)
    write_atomically(out / "config.json", dump_resolved(config).encode())
    return store


def newest(checkpoint: str) -> str:
    """Return the newest checkpoint of a run's folder; any other address is returned unchanged."""
    folder = Path(checkpoint, "checkpoints")
    if not folder.is_dir():
        return checkpoint
    steps = sorted(path for path in folder.iterdir() if re.fullmatch(r"step_\d+", path.name))
    if not steps:
        raise UserError(f"{folder}: there is no checkpoint yet; name an HF folder with model.path=… instead.")
    return str(steps[-1])


def hf_folder(checkpoint: str, out: Path) -> Path:
    """Return ``checkpoint`` as an HF folder: itself if it is one, else converted to ``out``, which may exist already.

    Raises:
        UserError: it is not a checkpoint, or it does not identify its model.
    """
    from megatron_fleet.convert.execute import Share, execute
    from megatron_fleet.convert.to_hf import plan_to_hf
    from megatron_fleet.storage.progress import ProgressLine

    if Path(checkpoint, "config.json").is_file() and any(Path(checkpoint).glob("*.safetensors")):
        return Path(checkpoint).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with ProgressLine() as progress:
        execute(plan_to_hf(checkpoint, None), str(out), 1, Share.parse("1/1"), progress)
    return out.absolute()


def tasks_of(config: Config, run: Path | None, side: Side) -> list[Task]:
    """Return the tasks to evaluate: the held-out ones (reusing the split of ``run``, if any), or all of ``data``."""
    manifest = None if run is None else run / MANIFEST
    previous = None
    if manifest is not None and manifest.is_file() and config.data.split_manifest is None:
        previous = SplitManifest.parse(manifest.read_bytes(), str(manifest))
    split = build(config.data, previous).split
    tasks = split.held_out if side == "held-out" else [*split.held_out, *split.train]
    if not tasks:
        raise UserError(
            f"data.tasks={config.data.tasks}: no task is held out with data.eval_fraction="
            f"{config.data.eval_fraction:g}; raise it, or add --tasks all."
        )
    check_verifiers(tasks, config)
    checks.check_environments(config, tasks)
    return tasks


def chosen_tasks(config: Config, held_out: Sequence[Task]) -> list[Task]:
    """Choose ``eval.tasks`` of ``held_out``, and print notes about the choice."""
    tasks = choose(held_out, config.eval.tasks)
    for note in notes(tasks, held_out):
        say(note)
    return tasks


def fingerprint(model: Path) -> dict[str, Any]:
    """Identify the weights in an HF folder by file size and modification time, without reading them."""
    files = {path.name: path.stat() for path in sorted(model.glob("*.safetensors"))}
    return {"path": str(model), "weights": {name: [s.st_size, s.st_mtime_ns] for name, s in files.items()}}


async def play(
    config: Config, held_out: Sequence[Task], store: EpisodeStore, collect: Callable[..., Awaitable[CollectResult]]
) -> Evaluation:
    """Play the tasks of ``held_out`` that ``eval.tasks`` chooses. Episodes already in ``store`` are not repeated;
    finished ones are added to it."""

    async def resumed(request: CollectRequest, on_episode: OnEpisode | None) -> CollectResult:
        kind = "eval" if request.temperature else "greedy"
        played = store.played(kind, request.samples)
        request = replace(request, played=played)
        episodes = len(request.tasks) * request.samples
        if on_episode is not None:
            for trajectory in played.values():
                on_episode(trajectory)
        if len(played) == episodes:
            return Collection(request, max_retries=0).result(seconds=0.0)
        if played:
            say(f"{kind}: {len(played)} of {episodes} episodes were played before")

        def keep(trajectory: Trajectory) -> None:
            store.add(kind, trajectory)
            if on_episode is not None:
                on_episode(trajectory)

        try:
            return await collect(request, keep)
        finally:
            store.flush()

    return await Evaluator(config.eval, config.rollout, config.run, held_out, resumed).play(show)


def check_known(evaluation: Evaluation) -> None:
    """Raise UserError when no reward is known, since there is no result then."""
    groups = (*evaluation.sampled, *evaluation.greedy)
    if reason := why_nothing_is_known(t for group in groups for t in group.trajectories):
        raise UserError(
            f"No episode has a reward; most common reason: {reason}. Fix it, then evaluate into a new --out."
        )


def finish(config: Config, evaluation: Evaluation, decode: Decode) -> None:
    """Write trajectories, dumps and ``metrics.json``, upload them, print the table. ``decode``: token ids to text."""
    out = Path(config.run.out)
    metrics = evaluation.metrics(config.eval.pass_threshold)
    with RunFolder(out, config.run.name, config.run.id) as folder:
        records = EpisodeRecords(config, folder.id, decode, None)
        records.evaluation(0, evaluation, metrics, "eval_only")
        write_atomically(out / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
        records.close()
    say_lines(table(metrics, config.eval.samples))
    if left := metrics["eval/all/outcome/aborted"] + metrics.get("eval/all/greedy_outcome/aborted", 0):
        say(f"{left:.0f} episodes were abandoned without a reward; run the same command again to play them.")
    say(f"mfleet: see {out}")
