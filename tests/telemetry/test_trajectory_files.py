"""Files of episodes: rows that come back, images once each, what is removed, the first prompt of each environment."""

import hashlib
import os

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.config.errors import UserError
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Image
from megatron_fleet.evaluation.dumps import dump_record
from megatron_fleet.evaluation.store import EpisodeStore
from megatron_fleet.models.images import ImageSpan
from megatron_fleet.telemetry.episodes import rollout_metrics
from megatron_fleet.telemetry.shards import Shard
from megatron_fleet.telemetry.trajectories import PromptLog, TrajectoryLog, image_file, load_trajectories, prune

FILES = [Image("image/png", b"one"), Image("image/jpeg", b"two"), Image("../../evil", b"three")]
NAMES = [hashlib.sha256(image.data).hexdigest() for image in FILES]


def seen(sample: int = 0) -> Trajectory:
    """Prompt 0-6 with an image at 1-4, action 6-8, observation 8-12 with two at 8-10 and 11-12."""
    mask = np.zeros(12, bool)
    mask[6:8] = True
    spans = (Span("prompt", 0, 6, 0), Span("action", 6, 8, 0, 3), Span("observation", 8, 12, 0))
    places = [(1, 4, NAMES[0]), (8, 10, NAMES[1]), (11, 12, NAMES[0])]
    ids = np.array([5, 9, 9, 9, 6, 7, 1, 2, 9, 9, 8, 9], np.int32)
    t = Trajectory(
        *(
            "t-1",
            "shop",
            0,
            sample,
            ids,
            mask,
            np.where(mask, -1, 0).astype(np.float32),
            spans,
            1.0,
            "",
            Outcome.COMPLETED,
        ),
        metrics={"turns": 1, "images": 4, "image_tokens": 6, "images_unseen": sample},
        messages=[{"role": "user", "content": "[image 1]", "images": [NAMES[0]]}, {"role": "tool", "content": "x"}],
        image_spans=tuple(ImageSpan(*place) for place in places),
        images=dict(zip(NAMES, FILES, strict=True)),
    )
    t.messages[1]["images"] = NAMES[1:]
    t.check()
    return t


def test_images_are_written_once_and_named_by_rows(tmp_path):
    log = TrajectoryLog(tmp_path / "trajectories", None)
    files = log.write(1, [Group(0, "t-1", "shop", [seen(0), seen(1)])])
    names = [f"{NAMES[0]}.png", f"{NAMES[1]}.jpg", f"{NAMES[2]}.bin"]
    images = [tmp_path / "images" / name for name in names]
    assert sorted((tmp_path / "images").iterdir()) == sorted(images) and files[1:] == images
    assert [path.read_bytes() for path in images] == [b"one", b"two", b"three"]
    line = Shard.open(files[0]).records()[1]
    assert line["image_spans"] == [[1, 4, 0, NAMES[0]], [8, 10, 0, NAMES[1]], [11, 12, 0, NAMES[0]]]
    assert [m["images"] for m in line["messages"]] == [NAMES[:1], NAMES[1:]]
    os.utime(images[0], (1, 1))
    log.write(2, [Group(0, "t-1", "shop", [seen()])])
    assert images[0].stat().st_mtime == 1


def test_no_name_leads_out_of_the_folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("../" * 21 + "x", "a" * 63, "a" * 63 + "/", "A" * 64):
        assert image_file(tmp_path / "images", name) is None


def test_an_evaluation_that_goes_on_keeps_its_images(tmp_path):
    tasks = [Task("t-1", "p", "shop")]
    store = EpisodeStore(tmp_path, {}, tasks)
    first = seen()
    store.add("eval", first)
    store.flush()
    assert not first.images, "the files are on disk, the bytes are not held"
    again = EpisodeStore(tmp_path, {}, tasks).played("eval", 1)[0, 0]
    assert again.image_spans == seen().image_spans and again.messages == seen().messages
    files = TrajectoryLog(tmp_path / "trajectories", None).write(0, [Group(0, "t-1", "shop", [again])], "eval")
    assert [path.name.split(".")[0] for path in files[1:]] == NAMES
    assert load_trajectories(files[0])[0].image_spans == seen().image_spans


def test_dumps_have_one_placeholder_for_an_image():
    record = dump_record(seen(), lambda ids: " ".join(map(str, ids)), 4)
    assert record["input_prompt"] == "5 9 6 7" and record["output_response"] == "1 2 9 8 9"
    assert len(record["score"]) == 6 and record["images"] == NAMES


def test_images_are_counted():
    metrics = rollout_metrics([Group(0, "t-1", "shop", [seen(0), seen(1), seen(2)])], 1.0)
    numbers = {name: metrics[f"environment/shop/{name}"] for name in ("avg_images", "avg_image_tokens")}
    assert numbers == {"avg_images": 4, "avg_image_tokens": 6}
    assert metrics["environment/total_images_unseen"] == 3


def trajectory(sample: int, length: int, reward: float | None) -> Trajectory:
    mask = np.arange(length) >= 2
    return Trajectory(
        task_key="book-flight",
        env_key="travel",
        group=0,
        sample=sample,
        token_ids=np.arange(length, dtype=np.int32) * 7 + sample,
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -0.1 * np.arange(length), 0).astype(np.float32),
        spans=(Span("prompt", 0, 2, 0), Span("action", 2, length, 0, 4)),
        reward=reward,
        reward_reason="seat is booked",
        outcome=Outcome.COMPLETED,
        metrics={"turns": 1.0},
        messages=[{"role": "user", "content": "Büche einen Flug"}],
    )


def test_trajectories_come_back(tmp_path):
    written = [trajectory(0, 5, 1.0), trajectory(1, 9, None), seen()]
    written[1].reward_reason, written[1].final_answer = "half of a pair: \ud83d", "42"
    (path,) = TrajectoryLog(tmp_path, None).write(1, [Group(0, "book-flight", "travel", written[:2])])
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001.parquet"] == [path.name]
    written[1].reward_reason = "half of a pair: ?"
    path = TrajectoryLog(tmp_path / "more", None).write(2, [Group(0, "t", "e", written)])[0]
    for one, two in zip(written, load_trajectories(path), strict=True):
        for name in set(Trajectory.__slots__) - {"images"}:
            a, b = getattr(one, name), getattr(two, name)
            assert np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b, name


def test_trajectories_of_lost_steps_go(tmp_path):
    log = TrajectoryLog(tmp_path, None)
    for step in range(3):
        for kind in ("step", "eval", "greedy"):
            log.write(step, [], kind)
    (tmp_path / ".step_000001.parquet.0123abcd.partial").write_text("a writer was killed")
    others = {"notes.txt", "a.b_000009.txt", "mine_000009.txt"}
    for name in others:
        (tmp_path / name).write_text("mine")
    TrajectoryLog(tmp_path, resumed_step=1)
    names = {f"{kind}_{step:06d}.parquet" for kind in ("step", "eval", "greedy") for step in (0, 1)}
    assert {p.name for p in tmp_path.iterdir()} == names | others
    TrajectoryLog(tmp_path, None)
    assert {p.name for p in tmp_path.iterdir()} == others


def pictured(*contents: bytes) -> Trajectory:
    """An episode whose only message shows these images."""
    t = trajectory(0, 5, 1.0)
    t.images = {hashlib.sha256(data).hexdigest(): Image("image/png", data) for data in contents}
    t.messages[0]["images"] = list(t.images)
    return t


def many_steps(folder) -> dict[str, int]:
    """Six steps of an image of its own each and one of all, and an evaluation with the image of the first step."""
    log = TrajectoryLog(folder / "trajectories", None)
    for step in range(1, 7):
        log.write(step, [Group(0, "t", "e", [pictured(b"all" * 999, b"%d" % step * 99_999)])])
    log.write(3, [Group(0, "t", "e", [pictured(b"1" * 99_999)])], "eval")
    return {path.name: path.stat().st_size for path in (folder / "trajectories").iterdir()}


def test_the_oldest_steps_go_and_images_that_no_other_names(tmp_path):
    shards, folder = many_steps(tmp_path), tmp_path / "trajectories"
    assert prune(folder, sum(shards.values()) + 6 * 99_999 + 999 * 3) == []
    gone = prune(folder, 570_000 + sum(shards.values()))
    assert gone == ["step_000001.parquet", "step_000002.parquet"], "the first alone frees little: its image is needed"
    left = {path.read_bytes()[:3] for path in (tmp_path / "images").iterdir()}
    assert left == {b"all", b"111", b"333", b"444", b"555", b"666"}
    assert len(prune(folder, 0)) == 3
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["eval_000003.parquet", "step_000006.parquet"], "evaluations and the newest step stay"


def test_nothing_goes_that_is_not_in_the_store_or_that_a_damaged_shard_may_name(tmp_path):
    shards, folder = many_steps(tmp_path), tmp_path / "trajectories"
    stored = {"step_000001.parquet": shards["step_000001.parquet"], "step_000002.parquet": 1}
    assert prune(folder, 0, stored) == ["step_000001.parquet"]
    (folder / "step_000004.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(UserError, match=r"step_000004\.parquet is cut off, damaged"):
        prune(folder, 0)
    assert len(list(folder.iterdir())) == 6 and len(list((tmp_path / "images").iterdir())) == 7


def prompted(env: str, first: int, started: bool = True) -> Trajectory:
    ids = np.arange(first, first + 4, dtype=np.int32) if started else np.empty(0, np.int32)
    spans = (Span("prompt", 0, 3, 0), Span("action", 3, 4, 0, 1)) if started else ()
    mask = np.arange(len(ids)) == 3
    return Trajectory("t", env, 0, 0, ids, mask, -1.0 * mask, spans, 1.0, "", Outcome.COMPLETED)


def test_one_prompt_for_each_environment(tmp_path):
    folder = tmp_path / "prompts"
    log = PromptLog(folder, lambda ids: " ".join(map(str, ids)))
    log.write([Group(0, "t", "desk", [prompted("desk", 0, started=False)])])
    assert not folder.exists()
    log.write([Group(0, "t", "desk", [prompted("desk", 10), prompted("desk", 20)])])
    log.write([Group(0, "t", "a/b", [prompted("a/b", 30)]), Group(1, "t", "desk", [prompted("desk", 40)])])
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"desk.txt": "10 11 12", "a_b.txt": "30 31 32"}
    PromptLog(folder, lambda ids: "again").write([Group(0, "t", "desk", [prompted("desk", 10)])])
    assert (folder / "desk.txt").read_text() == "again"
