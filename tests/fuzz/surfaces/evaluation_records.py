"""The folder of an evaluation that goes on where it was cut off."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of
from run_maker import trajectory

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.dumps import EvalDumps
from megatron_fleet.evaluation.store import EpisodeStore
from megatron_fleet.evaluation.terminal import table
from megatron_fleet.storage.run_folder import ID, RunFolder
from megatron_fleet.telemetry.episodes import eval_metrics

TASKS = [Task(f"t{i}", "p", "shop") for i in range(2)]
OF = {"run": {"seed": 0}, "model": {"path": "m"}}


@cache
def seeds() -> list[Any]:
    with TemporaryDirectory() as place:
        store = EpisodeStore(Path(place), OF, TASKS)
        for sample in range(2):
            store.add("sampled", trajectory("t0", sample=sample, reward=float(sample)))
        store.flush()
        store.add("sampled", trajectory("t1", sample=0, reward=None))
        store.flush()
        RunFolder(Path(place), "run").close()
        files = folders.read(Path(place))
    return [{name: folders.structured(name, data) for name, data in files.items()}, files]


def check(tree: Any, folder: Path) -> bool:
    folders.write(folder, tree)
    with refusal_of(folder):
        with RunFolder(folder, "run") as run:
            assert ID.fullmatch(run.id)
        store = EpisodeStore(folder, OF, TASKS)
        played = store.played("sampled", 2)
        found = [Group(i, task.key, task.env_key, []) for i, task in enumerate(TASKS)]
        for (index, _), episode in played.items():
            found[index].trajectories.append(episode)
        metrics = eval_metrics(found, [], 1.0)
        assert table(metrics, 2)
        EvalDumps(folder / "fresh" / "dumps", lambda ids: " ".join(map(str, ids)), 10, None).write(
            0, found, [], metrics
        )
        store.add("sampled", trajectory("t1", sample=1))
        store.flush()
        return bool(played)
    return False


SURFACE = Surface("evaluation_records", 300, seeds, check, words=("t0", "t1", "shop", "sampled", "of", "tasks"))
