"""Records of a run's evaluations: every file, late ones in the line of their step, none made twice."""

import json

import numpy as np
import pytest

pytest.importorskip("hydra")

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.config.load import load
from megatron_fleet.config.sections.logging import TrajectoriesConfig
from megatron_fleet.envs.base import Image
from megatron_fleet.evaluation.episode_records import EpisodeRecords
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.loop.records import Records
from megatron_fleet.models.images import digest
from megatron_fleet.rollout.requests import Accounting
from megatron_fleet.storage.open import open_folder
from megatron_fleet.telemetry.shards import Shard


def evaluation(reward: float) -> Evaluation:
    mask, none = np.array([False, True]), np.zeros(2, np.float32)
    spans = (Span("prompt", 0, 1, 0), Span("action", 1, 2, 0, 3))
    ids = np.array([300, 301], np.int32)
    one = Trajectory("task", "shop", 0, 0, ids, mask, none, spans, reward, "", Outcome.COMPLETED)
    return Evaluation([Group(0, "task", "shop", [one])], [Group(0, "task", "shop", [one])], Accounting(2, 2), 3, 1.5)


def records(out, resumed_step: int | None = None, tensorboard: bool = False, more: tuple[str, ...] = ()) -> Records:
    drawn = [f"logging.tensorboard={str(tensorboard).lower()}", "logging.plot=false"]
    config = load(["experiment=quickstart", f"run.out={out}", "run.id=mine_1", *drawn, *more])
    return Records(config, resumed_step, started=0.0)


def rows(out) -> dict[int, dict]:
    return {row["step"]: row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}


def test_a_late_evaluation_is_in_the_line_and_the_files_of_its_step(tmp_path):
    kept = records(tmp_path)
    kept.step(1, {"loss": 0.5}, {})
    assert not kept.evaluated(1)
    kept.evaluation(1, kept.episodes_of(1, evaluation(1.0)) | {"timing/eval_wait": 0.25}, in_step=True)
    kept.step(2, {"loss": 0.25}, {})
    kept.close()
    line = rows(tmp_path)[1]
    assert (line["loss"], line["timing/eval_wait"]) == (0.5, 0.25)
    assert (line["eval/all/pass_at_1"], line["eval/shop/greedy_pass_at_1"], line["timing/eval"]) == (1, 1, 1.5)
    assert "eval/all/pass_at_1" not in rows(tmp_path)[2]
    dump = tmp_path / "dumped_evals" / "global_step_1_evals"
    (aggregated,) = (dump / "aggregated_results.jsonl").read_text().splitlines()
    assert json.loads(aggregated)["eval/all/pass_at_1"] == 1
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"trajectories/eval_000001.parquet", "trajectories/greedy_000001.parquet"} <= names
    assert {f"dumped_evals/global_step_1_evals/{name}" for name in ("shop.jsonl", "greedy/shop.jsonl")} <= names


def test_a_store_has_evaluations_and_steps_with_their_images_once(tmp_path):
    """Steps go from ``run.out`` beyond the limit, once they are in the store."""
    config = load(["experiment=quickstart", f"run.out={tmp_path / 'run'}"])
    own = TrajectoriesConfig(upload=str(tmp_path / "store"), max_gb=5e-6)
    config = config.model_copy(
        update={
            "logging": config.logging.model_copy(update={"trajectories": own}),
            "eval": config.eval.model_copy(update={"upload": f"{tmp_path / 'store'}/"}),
        }
    )
    kept = EpisodeRecords(config, "mine_1", str, None)
    played = evaluation(1.0)
    image = Image("image/png", b"seen")
    name = digest(image)
    played.sampled[0].trajectories[0].images = {name: image}
    played.sampled[0].trajectories[0].messages = [{"role": "user", "content": "[image 1]", "images": [name]}]
    kept.evaluation(1, played, {"eval/all/pass_at_1": 1.0}, "global_step_1")
    for step in (1, 2, 3):
        kept.training(step, played.sampled)
    kept.close()
    assert kept.metrics(evaluation=True) == {"eval/all/uploads_failed": 0}
    assert kept.metrics(evaluation=False) == {"generate/uploads_failed": 0}
    steps = {f"rollouts/mine_1/trajectories/step_00000{step}.parquet" for step in (1, 2, 3)}
    dumps = {"shop.jsonl", "greedy/shop.jsonl", "aggregated_results.jsonl"}
    dumps |= {f"trajectories/{kind}_000001.parquet" for kind in ("eval", "greedy")}
    images = {f"{kind}/mine_1/images/{name}.png" for kind in ("evals", "rollouts")}
    stored = open_folder(tmp_path / "store")
    assert stored.sizes().keys() == steps | images | {f"evals/mine_1/global_step_1/{name}" for name in dumps}
    assert Shard(stored, min(steps), stored.sizes()[min(steps)]).records()[0]["messages"][0]["images"] == [name]
    left = {path.name for path in (tmp_path / "run" / "trajectories").iterdir()}
    assert left == {"eval_000001.parquet", "greedy_000001.parquet", "step_000003.parquet"}
    assert (tmp_path / "run" / "images" / f"{name}.png").exists()


@pytest.mark.parametrize(("resumed_step", "known"), [(1, True), (0, False), (None, False)])
def test_a_resumed_run_knows_whether_its_evaluation_was_made(tmp_path, resumed_step, known):
    before = records(tmp_path)
    before.step(1, {"loss": 0.5}, {})
    before.evaluation(1, before.episodes_of(1, evaluation(1.0)), in_step=True)
    before.close()
    after = records(tmp_path, resumed_step)
    assert after.evaluated(1) is known
    assert (tmp_path / "dumped_evals" / "global_step_1_evals").exists() is known
    after.close()


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "status"), [(Records.finish, "FINISHED"), (Records.close, "FAILED")])
def test_a_tracker_is_told_whether_the_run_came_to_its_end(tmp_path, ending, status):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'store.db'}"
    kept = records(tmp_path / "run", more=(f"logging.mlflow.uri={uri}",))
    kept.step(1, {"loss": 0.5}, {})
    ending(kept)
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("megatron_fleet").experiment_id])
    assert run.info.status == status


def test_distributions_of_a_step_are_drawn(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = records(tmp_path, tensorboard=True)
    kept.step(3, {"loss": 0.5}, {"distribution/turns": np.array([1.0, 4.0])})
    kept.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(drawn.step, drawn.histogram_value.num) for drawn in events.Histograms("distribution/turns")] == [(3, 2)]
    assert "distribution/turns" not in rows(tmp_path)[3]
