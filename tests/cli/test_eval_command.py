"""`mfleet eval` as a user runs it: an HF folder, the same weights as a checkpoint, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("vllm")

from megatron_fleet.cli import main

TINY = Path(__file__).parents[2] / "assets" / "tiny"
SMALL = ("experiment=quickstart", "eval.tasks=4", "eval.samples=2", "rollout.engine.max_num_seqs=16")
CLOCK = ("timing/", "eval/all/attempts_")


def evaluate(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fleet.cli", "eval", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=6 * HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(out: Path) -> dict[str, float]:
    found = json.loads((out / "metrics.json").read_text())
    return {name: value for name, value in found.items() if not name.startswith(CLOCK)}


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_a_folder_and_a_checkpoint_of_the_same_weights_score_the_same_and_nothing_is_played_twice(tmp_path, capsys):
    first = evaluate(*SMALL, "--out", str(tmp_path / "hf"))
    assert [line.split()[0] for line in first.splitlines() if line.split()[1:3] == ["4", "4"]] == ["all"]
    found = metrics(tmp_path / "hf")
    assert found["eval/all/episodes"] == 8 and found["eval/all/greedy_tasks"] == 4
    dump = tmp_path / "hf" / "dumped_evals" / "global_step_0_evals"
    written = {path.relative_to(dump).as_posix() for path in dump.rglob("*.jsonl")}
    assert {"aggregated_results.jsonl", "booking.jsonl", "greedy/booking.jsonl"} <= written
    row = json.loads((dump / "booking.jsonl").read_text().splitlines()[0])
    assert row["input_prompt"].startswith("<|im_start|>") and len(row["score"]) > 10

    assert "played before" not in first
    evaluate(*SMALL, "--out", str(tmp_path / "hf"))  # starts no engine: there is nothing to play
    assert metrics(tmp_path / "hf") == found
    attempts = json.loads((tmp_path / "hf" / "metrics.json").read_text())["eval/all/attempts_started"]
    assert attempts == 0

    assert main(["convert", "to-megatron", str(TINY), str(tmp_path / "megatron")]) == 0
    evaluate(*SMALL, "--out", str(tmp_path / "again"), "--checkpoint", str(tmp_path / "megatron"))
    assert metrics(tmp_path / "again") == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--checkpoint", "{tmp}/none"), "none"),
        (("model.path={tmp}/none",), "none: there is no such folder"),
        (("--checkpoint", "{tmp}/run", "--out", "{tmp}/eval"), "there is no checkpoint yet"),
        (("--out", "{tmp}/training"), "holds a training run; name another folder with --out"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(tmp_path, capsys, arguments, words):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "metrics.jsonl").touch()
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    from megatron_fleet.config.load import dump_resolved, load

    (run / "config.json").write_text(dump_resolved(load(["experiment=quickstart"])))
    overrides = () if str(run) in " ".join(arguments).format(tmp=tmp_path) else ("experiment=quickstart",)
    out = () if "--out" in arguments else ("--out", str(tmp_path / "out"))
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(["eval", *overrides, *out, *given]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


def test_a_checkpoint_that_is_not_there(capsys):
    assert main(["eval", "--checkpoint", "/nope"]) == 2
    assert "--checkpoint /nope: no such folder; name a run's" in capsys.readouterr().err
