"""Evaluations in Fleet's layout: every field, unknown rewards, resume; their copies in a real object store."""

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from s3_server import BUCKET, found_by_boto3

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.config.errors import UserError
from megatron_fleet.evaluation.dumps import AGGREGATED, EvalDumps
from megatron_fleet.evaluation.uploads import Uploads
from megatron_fleet.storage.open import open_folder


def spelt(ids) -> str:
    """A decoder that can be read: 3 → d."""
    return "".join(chr(97 + i) for i in ids)


def trajectory(env: str, sample: int, reward: float | None, outcome=Outcome.COMPLETED, tokens=6) -> Trajectory:
    """Two tokens of prompt, then the response."""
    spans = (Span("prompt", 0, 2, 0), Span("action", 2, tokens, 0, 4)) if tokens else ()
    mask = np.arange(tokens) >= 2
    messages = [{"role": "user", "content": "dö it"}, {"role": "assistant", "content": "done \ud800"}]
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    return Trajectory(f"{env}-task", env, 0, sample, ids, mask, logprobs, spans, reward, "", outcome, messages=messages)


def groups(*trajectories: Trajectory) -> list[Group]:
    return [Group(i, t.task_key, t.env_key, [t]) for i, t in enumerate(trajectories)]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_layout_and_every_field(tmp_path):
    dumps = EvalDumps(tmp_path, spelt, 50, None)
    sampled = groups(
        trajectory("shop", 0, 1.0), trajectory("shop", 1, None, Outcome.ENV_FAILED), trajectory("a/b", 0, 0.0)
    )
    files = dumps.write(
        20, sampled, groups(trajectory("shop", 0, 0.5)), {"eval/all/pass_at_1": 0.5, "odd": float("nan")}
    )
    folder = tmp_path / "global_step_20_evals"
    assert {name: str(path.relative_to(folder)) for name, path in files.items()} == {
        name: name for name in ("shop.jsonl", "a_b.jsonl", "greedy/shop.jsonl", AGGREGATED)
    }
    shop = lines(folder / "shop.jsonl")
    assert shop[0] == {
        "input_prompt": "ab",
        "output_response": "cdef",
        "score": [0.0, 0.0, 0.0, 1.0],
        "stop_reason": "stop",
        "env_class": "fleet_task",
        "env_extras": {"task_key": "shop-task", "data_source": "shop", "max_turns": 50},
        "data_source": "shop",
    }
    assert (shop[1]["score"], shop[1]["stop_reason"]) == (None, "env_init_failed")
    assert lines(folder / "a_b.jsonl")[0]["score"] == [0.0] * 4
    assert lines(folder / "a_b.jsonl")[0]["data_source"] == "a/b"
    assert lines(folder / "greedy" / "shop.jsonl")[0]["score"] == [0.0, 0.0, 0.0, 0.5]
    assert lines(folder / AGGREGATED) == [{"eval/all/pass_at_1": 0.5, "odd": None}]


def test_prompts_that_repeat_the_history_are_no_response(tmp_path):
    episode = trajectory("shop", 0, 1.0, tokens=8)
    spans = (Span("prompt", 0, 2, 0), Span("action", 2, 4, 0, 4), Span("prompt", 4, 6, 1), Span("action", 6, 8, 1, 4))
    episode.spans, episode.segment_starts = spans, (0, 4)
    files = EvalDumps(tmp_path, spelt, 50, None).write(0, groups(episode), [], {})
    (line,) = lines(files["shop.jsonl"])
    assert (line["input_prompt"], line["output_response"], line["score"]) == ("ab", "cdgh", [0.0, 0.0, 0.0, 1.0])


def test_without_token_ids_the_messages_tell(tmp_path):
    files = EvalDumps(tmp_path, spelt, 50, None).write(0, groups(trajectory("shop", 0, 1.0, tokens=0)), [], {})
    (line,) = lines(files["shop.jsonl"])
    assert line["input_prompt"] == "user: dö it"
    assert line["output_response"].startswith("assistant: done")
    assert line["score"] == [1.0]


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_stop_reason(tmp_path, outcome):
    files = EvalDumps(tmp_path, spelt, 50, None).write(0, groups(trajectory("shop", 0, None, outcome)), [], {})
    expected = {"context_overflow": "length", "generation_truncated": "length", "env_failed": "env_init_failed"}
    expected |= dict.fromkeys(("completed", "max_turns", "no_action"), "stop")
    assert lines(files["shop.jsonl"])[0]["stop_reason"] == expected.get(outcome, outcome)


def test_resume_drops_what_a_lost_attempt_wrote(tmp_path):
    dumps = EvalDumps(tmp_path, spelt, 50, None)
    for step in (0, 10, 20):
        dumps.write(step, groups(trajectory("shop", 0, 1.0)), [], {})
    (tmp_path / "notes").mkdir()
    EvalDumps(tmp_path, spelt, 50, resumed_step=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_0_evals", "global_step_10_evals", "notes"]
    EvalDumps(tmp_path, spelt, 50, resumed_step=None)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


def some_files(folder: Path) -> dict[str, Path]:
    contents = {"empty.jsonl": b"", "small.jsonl": b"{}\n", "sub/large.npz": bytes(range(256)) * (17 << 12)}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


def test_copies_in_the_store_are_whole_when_close_returns(tmp_path, s3):
    files, uploads = some_files(tmp_path), Uploads(f"s3://{BUCKET}/runs")
    uploads.add(files, "evals/run/global_step_3")
    uploads.close()
    assert uploads.failed == 0
    stored = open_folder(f"s3://{BUCKET}/runs/evals/run/global_step_3")
    assert stored.sizes() == {name: path.stat().st_size for name, path in sorted(files.items())}
    assert all(stored.read(name) == path.read_bytes() for name, path in files.items())


def test_files_named_by_their_content_are_sent_once(tmp_path, s3):
    files = some_files(tmp_path)
    for names in (["empty.jsonl"], ["empty.jsonl", "small.jsonl"]):
        uploads = Uploads(f"s3://{BUCKET}/once")  # of two attempts
        for _ in range(2):
            uploads.add_once({name: files[name] for name in names}, "images")
        uploads.close()
        for name in names:
            files[name].write_bytes(b"sent again")
    stored = open_folder(f"s3://{BUCKET}/once/images")
    assert [stored.read(name) for name in stored.sizes()] == [b"", b"{}\n"] and uploads.stored(
        "images"
    ) == stored.sizes()


def test_failed_copies_are_told_once_and_counted(tmp_path, s3, caplog):
    uploads = Uploads("s3://no-such-bucket/runs")
    with caplog.at_level(logging.WARNING):
        uploads.add(some_files(tmp_path), "evals")
        uploads.add({"gone": tmp_path / "gone"}, "evals")
        uploads.close()
    assert uploads.failed == 4
    (told,) = [record.getMessage() for record in caplog.records]
    assert "empty.jsonl was not copied" in told and "no-such-bucket" in told


def test_a_local_folder_will_do_and_close_does_not_wait_for_ever(tmp_path):
    files, uploads = some_files(tmp_path / "here"), Uploads(str(tmp_path / "there"))
    uploads.add(files, "evals")
    uploads.close()
    assert (tmp_path / "there" / "evals" / "sub" / "large.npz").read_bytes() == files["sub/large.npz"].read_bytes()
    uploads.close()
    with pytest.raises(UserError, match="ftp://"):
        Uploads("ftp://bucket")
