"""`mfleet trajectories`: what it finds, prints and exports, of folders, single files and buckets."""

import hashlib
import io
import json
import re

import numpy as np
import PIL.Image
import pytest
from run_maker import RunMaker, groups, trajectory
from s3_server import BUCKET, found_by_boto3

from megatron_fleet.agents.trajectory import Group, Outcome
from megatron_fleet.cli import main
from megatron_fleet.envs.base import Image
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer
from megatron_fleet.telemetry.shards import RECORD, Shard
from megatron_fleet.telemetry.trajectories import load_trajectories

OUT = io.BytesIO()
PIL.Image.new("RGB", (2, 2)).save(OUT, "PNG")
PICTURE = OUT.getvalue()


@pytest.fixture
def run(make_run: RunMaker):
    """Two evaluations and two steps of two environments; one episode of step 2 says something of its own."""
    make_run.evaluate(0, groups({"s0": [0.0, 0.0]}), groups({"s0": [0.0]}))
    make_run.train(1, groups({"s1": [0.0, 1.0]}) + groups({"b1": [0.25, None]}, "bank"))
    image = Image("image/png", PICTURE)
    said = trajectory("s2", sample=0, reward=0.5, outcome=Outcome.MAX_TURNS, reason="<b>half</b> of it")
    said.messages += [{"role": "tool", "content": "Straße 1\x1b[31m <script>alert(1)</script>"}]
    said.images = {hashlib.sha256(PICTURE).hexdigest(): image}
    said.messages[1]["images"] = list(said.images)
    make_run.train(2, [Group(0, "s2", "shop", [said, trajectory("s2", sample=1, reward=1.0)])])
    make_run.evaluate(2, groups({"s0": [1.0, 1.0]}))
    return make_run.folder


def listed(capsys, *arguments) -> list[str]:
    """Ids of what is listed."""
    assert main(["trajectories", *map(str, arguments)]) == 0
    return re.findall(r"^((?:step|eval|greedy)-\d+-\d+) ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ("--kind greedy", "greedy-0-0"),
        ("--kind eval --step 1-9", "eval-2-0 eval-2-1"),
        ("--step 1", "step-1-0 step-1-1 step-1-2 step-1-3"),
        ("--env bank", "step-1-2 step-1-3"),
        ("--env b*k --reward unknown", "step-1-3"),
        ("--task s?", "eval-0-0 eval-0-1 greedy-0-0 step-1-0 step-1-1 eval-2-0 eval-2-1 step-2-0 step-2-1"),
        ("--outcome max_turns", "step-2-0"),
        ("--reward 0.25..0.5", "step-1-2 step-2-0"),
        ("--reward 1 --kind train", "step-1-1 step-2-1"),
        ("--reward ..0 --kind train", "step-1-0"),
        ("--reward 0.3.. --step 1", "step-1-1"),
        ("--text STRASSE", "step-2-0"),
        ("--text half", "step-2-0"),
        ("--text OK --limit 2 --kind train", "step-1-0 step-1-1"),
        ("--text nowhere", ""),
    ],
)
def test_filters(run, capsys, filters, found):
    assert listed(capsys, run, *filters.split()) == found.split()


def test_the_list_counts_what_it_leaves_out(run, capsys):
    assert main(["trajectories", str(run), "--kind", "train", "--limit", "1"]) == 0
    heading, row, count = capsys.readouterr().out.splitlines()
    assert heading.split() == ["id", "environment", "task", "outcome", "reward", "turns", "tokens"]
    assert row.split() == ["step-1-0", "shop", "s1", "#0", "completed", "0", "1", "5"]
    assert count == "1 of 6 matching episodes, 6 in all"


def test_a_conversation_is_printed_and_tells_a_terminal_nothing(run, capsys):
    assert main(["trajectories", str(run), "step-2-0"]) == 0
    said = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in said)
    assert "step-2-0 · shop · s2 #0" in said and "reward 0.5 · max_turns · 5 tokens · weights of version 2" in said
    order = [
        "reason: <b>half</b> of it",
        "── user",
        "do it",
        "[image ",
        "── assistant",
        r"Straße 1\x1b[31m",
        "── final",
    ]
    assert sorted(order, key=said.index) == order
    assert main(["trajectories", str(run), "--show", "--env", "bank", "--limit", "1"]) == 0
    assert capsys.readouterr().out.count("━━ ") == 1


def test_exports(run, tmp_path, capsys):
    out = tmp_path / "out"
    for ending in ("jsonl", "parquet", "html"):
        assert main(["trajectories", str(run), "--kind", "train", "--env", "shop", "--out", f"{out}/a.{ending}"]) == 0
        assert f"4 of 6 episodes: {out}/a.{ending}" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "a.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["step-1-0", "step-1-1", "step-2-0", "step-2-1"]
    whole = [t for step in (1, 2) for t in load_trajectories(run / "trajectories" / f"step_00000{step}.parquet")]
    exported = load_trajectories(out / "a.parquet")
    for one, two in zip([t for t in whole if t.env_key == "shop"], exported, strict=True):
        assert (one.messages, one.reward, one.spans) == (two.messages, two.reward, two.spans)
        assert np.array_equal(one.behaviour_logprobs, two.behaviour_logprobs)
    page = (out / "a.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;half" in page
    assert page.count("<details") == 4 and page.count("data:image/jpeg") == 1 and "default-src 'none'" in page
    assert listed(capsys, out / "a.parquet", "--outcome", "max*") == ["step-0-2"]  # an export is read as any other file


def test_a_damaged_file_is_named_and_the_others_are_read(run, capsys):
    (run / "trajectories" / "step_000001.parquet").write_bytes(b"PAR1 torn")
    assert main(["trajectories", str(run), "--kind", "train"]) == 0
    said = capsys.readouterr()
    assert "step_000001.parquet is cut off, damaged" in said.err and "step-2-1" in said.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "nowhere: there is no such folder or file"),
        ([".", "--step", "x"], "--step=x is neither a step nor a range"),
        ([".", "--reward", "1..0"], "--reward=1..0 is not a range"),
        ([".", "--limit", "0"], "--limit=0: give 1 or more"),
        (["run", "step-9-9"], "there is no episode step-9-9 that matches"),
        (["run", "--out", "a.txt"], "--out=a.txt: the name must end in"),
        (["a.parquet"], "a.parquet: there is no such file"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_sentence(run, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(run.parent)
    assert main(["trajectories", *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1


def test_fleets_own_files(tmp_path, capsys):
    evaluation = tmp_path / "dumped_evals" / "global_step_20_evals"
    evaluation.mkdir(parents=True)
    prompt, answer = "<|im_start|>user\nbook it<|im_end|>\n<|im_start|>assistant\n", "sure<|im_end|>"
    row = {"input_prompt": prompt, "output_response": answer, "score": [0.0, 1.0], "stop_reason": "stop"}
    row |= {"env_extras": {"task_key": "t-1"}, "data_source": "booking"}
    (evaluation / "booking.jsonl").write_text(json.dumps(row) + "\n")
    assert listed(capsys, tmp_path, "--env", "booking", "--reward", "1") == ["eval-20-0"]
    single = evaluation / "booking.jsonl"
    assert main(["trajectories", str(single), "--text", "SURE", "--show"]) == 0
    assert "── assistant\nsure" in capsys.readouterr().out
    assert main(["trajectories", str(single), "--out", str(tmp_path / "x.parquet")]) == 0
    (record,) = Shard.open(tmp_path / "x.parquet").records(RECORD)
    assert (record["task"], record["reward"], record["messages"][0]["content"]) == ("t-1", 1.0, "book it")


def test_what_is_in_a_bucket(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with found_by_boto3():
        here = open_folder(run)
        files = {
            f"rollouts/mine_1/{name}": name for name in here.sizes() if name.startswith(("trajectories/", "images/"))
        }
        copies = [Copy(name, target, here.sizes()[name]) for target, name in files.items()]
        transfer(here, open_folder(f"s3://{BUCKET}"), copies)
        place = f"s3://{BUCKET}/rollouts/mine_1"
        assert listed(capsys, place, "--step", "2", "--text", "strasse") == ["step-2-0"]
        assert listed(capsys, f"{place}/trajectories", "--env", "bank") == ["step-1-2", "step-1-3"]
        assert listed(capsys, f"{place}/trajectories/step_000002.parquet") == ["step-2-0", "step-2-1"]
        page = tmp_path / "page.html"
        assert main(["trajectories", place, "--outcome", "max_turns", "--out", str(page)]) == 0
        assert "data:image/jpeg" in page.read_text()
        assert main(["trajectories", f"s3://{BUCKET}/none"]) == 2
        assert "holds no trajectories" in capsys.readouterr().err
