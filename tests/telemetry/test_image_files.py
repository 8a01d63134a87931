"""Images of episodes on disk: once each, named by trajectories, kept by evaluations that go on."""

import hashlib
import json
import os

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Image
from megatron_fleet.evaluation.dumps import dump_record
from megatron_fleet.evaluation.store import EpisodeStore
from megatron_fleet.models.images import ImageSpan
from megatron_fleet.telemetry.episodes import rollout_metrics
from megatron_fleet.telemetry.image_files import image_file
from megatron_fleet.telemetry.sinks import TrajectoryLog, load_trajectories

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


def test_pictures_are_written_once_and_named_by_lines(tmp_path):
    log = TrajectoryLog(tmp_path / "trajectories", None)
    files = log.write(1, [Group(0, "t-1", "shop", [seen(0), seen(1)])])
    names = [f"{NAMES[0]}.png", f"{NAMES[1]}.jpg", f"{NAMES[2]}.bin"]
    pictures = [tmp_path / "images" / name for name in names]
    assert sorted((tmp_path / "images").iterdir()) == sorted(pictures) and files[2:] == pictures
    assert [path.read_bytes() for path in pictures] == [b"one", b"two", b"three"]
    line = json.loads(files[0].read_text().splitlines()[1])
    assert line["image_spans"] == [[1, 4, 0, NAMES[0]], [8, 10, 0, NAMES[1]], [11, 12, 0, NAMES[0]]]
    assert [m["images"] for m in line["messages"]] == [NAMES[:1], NAMES[1:]]
    os.utime(pictures[0], (1, 1))
    log.write(2, [Group(0, "t-1", "shop", [seen()])])
    assert pictures[0].stat().st_mtime == 1


def test_no_name_leads_out_of_the_folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("../" * 21 + "x", "a" * 63, "a" * 63 + "/", "A" * 64):
        assert image_file(tmp_path / "images", name) is None


def test_an_evaluation_that_goes_on_keeps_its_pictures(tmp_path):
    tasks = [Task("t-1", "p", "shop")]
    store = EpisodeStore(tmp_path, {}, tasks)
    first = seen()
    store.add("eval", [first])
    store.flush()
    assert not first.images, "the files are on disk, the bytes are not held"
    again = EpisodeStore(tmp_path, {}, tasks).played("eval", 1)[0, 0]
    assert again.image_spans == seen().image_spans and again.messages == seen().messages
    files = TrajectoryLog(tmp_path / "trajectories", None).write(0, [Group(0, "t-1", "shop", [again])], "eval")
    assert [path.name.split(".")[0] for path in files[2:]] == NAMES
    assert load_trajectories(files[0])[0].image_spans == seen().image_spans


def test_dumps_have_one_placeholder_for_a_picture():
    record = dump_record(seen(), lambda ids: " ".join(map(str, ids)), 4)
    assert record["input_prompt"] == "5 9 6 7" and record["output_response"] == "1 2 9 8 9"
    assert len(record["score"]) == 6


def test_pictures_are_counted():
    metrics = rollout_metrics([Group(0, "t-1", "shop", [seen(0), seen(1), seen(2)])], 1.0)
    numbers = {name: metrics[f"environment/shop/{name}"] for name in ("avg_images", "avg_image_tokens")}
    assert numbers == {"avg_images": 4, "avg_image_tokens": 6}
    assert metrics["environment/total_images_unseen"] == 3
