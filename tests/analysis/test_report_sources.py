"""Reports of runs that are not in a run's folder: in a store, and in the layout of Fleet's training system."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from run_maker import RunMaker, groups
from s3_server import BUCKET, found_by_boto3

from megatron_fleet.analysis import run_files
from megatron_fleet.analysis.fleet_layout import split
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.runs import find_runs
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError
from megatron_fleet.evaluation.uploads import Uploads
from megatron_fleet.storage.local import fingerprint
from megatron_fleet.storage.open import open_folder

PROMPT = "<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\ndo {}<|im_end|>\n<|im_start|>assistant\n"
RESPONSE = (
    '<think>hm</think><tool_call>{"name": "find"}</tool_call><|im_end|>\n'
    "<|im_start|>user\nTool result:\nfine<|im_end|>\n<|im_start|>assistant\nnext<|im_end|>\n"
    "<|im_start|>user\nError: HTTP 404<|im_end|>\n<|im_start|>assistant\n<done><|im_end|>\n"
)


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "megatron_fleet" / "runs"


def dumped(task: str, reward: float, stop: str = "stop") -> str:
    record = {
        "input_prompt": PROMPT.format(task), "output_response": RESPONSE, "score": [0.0] * 9 + [reward],
        "stop_reason": stop, "env_class": "fleet_task", "data_source": "shop",
        "env_extras": {"task_key": task, "data_source": "shop", "max_turns": 50},
    }  # fmt: skip
    return json.dumps(record) + "\n"


def trained(step: int, prompt: str, reward: float) -> str:
    record = {
        "step": step, "env_key": "shop", "data_source": "shop", "stop_reason": "length", "reward": reward, "turns": 7,
        "tokens": 900, "prompt": prompt, "text": "plain", "timestamp": 1.0, "image_paths": [], "num_screenshots": 0,
    }  # fmt: skip
    return json.dumps(record) + "\n"


def older_run(folder: Path, evaluation: str) -> Path:
    """An evaluation before and after. ``evaluation``: name of its folder, with {} for the step."""
    files = {}
    for step, reward in ((0, 0.0), (20, 1.0)):
        name = evaluation.format(step)
        lines = [dumped(f"t{i}", reward) for i in range(6) for _ in range(3)]
        lines += [dumped("lost", 0.0, "env_init_error"), "{broken\n"]
        files[f"{name}/shop.jsonl"] = "".join(lines)
        files[f"{name}/aggregated_results.jsonl"] = json.dumps({"eval/all/pass_at_3": reward}) + "\n"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def training_steps(folder: Path) -> None:
    folder.mkdir(parents=True)
    for step in range(1, 21):
        content = trained(step, "a", step / 20) + trained(step, "a", 0.0) + trained(step, "b", 0.0)
        (folder / f"global_step_{step}.jsonl").write_text(content)


def check_older_run(text: str) -> None:
    text = text.replace("\\", "")
    assert "| pass@1, training temperature | 0.000 → 1.000 | " in text
    # Of 19 episodes 18 are known: that whose environment failed is not counted as 0.
    assert (
        "| shop | improved | +1.000 [+1.000, +1.000] | 0.000 [0.000, 0.000] | 1.000 [1.000, 1.000] | 6 | 1 → 1 |"
        in text
    )
    assert "A score of 0 there may also be an episode whose verifier failed" in text
    assert "the dump of eval 0: 1 episodes are cut or damaged" in text
    assert "| not found | 19 (100 %) | 19 (100 %) | HTTP 404" in text


def test_the_folders_of_fleets_training_system(tmp_path, capsys):
    folder = older_run(tmp_path / "exports", "dumped_evals/global_step_{}_evals")
    training_steps(folder / "dumped_trajectories")
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    check_older_run(text)
    assert "The files of training steps name no tasks" in text
    # Eight of the twenty training steps are read, evenly spaced: rewards of the first and the last.
    assert "| Reward and pass@1 | training reward | 0.01667 | 0.3333 |" in text.replace("\\", "")
    run = read_run(folder)
    assert run.training_steps == list(range(1, 21)) and len(run.rows) == 10
    (first, second, other) = run.read_step("step", 1)
    assert (first.task, first.sample, second.sample) == (second.task, 0, 1) and other.task != first.task
    assert [(summary.id, summary.state, summary.step) for summary in find_runs(str(folder))] == [
        ("exports", "records", 20)
    ]


def test_text_is_split_into_the_messages_that_were_said():
    assert [role for role, _ in split(PROMPT.format("x"), RESPONSE)] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert split("a", "b") == (("user", "a"), ("assistant", "b"))
    # Text with markers cut off in the middle of a message is kept.
    assert split(PROMPT.format("x"), "<think>never en")[-1] == ("assistant", "<think>never en")


def test_older_runs_in_a_bucket_are_downloaded_only_as_far_as_needed(s3, tmp_path, cache, capsys):
    older_run(tmp_path / "run", "global_step_{}")
    older_run(tmp_path / "run", "global_step_10/not")  # other files
    training_steps(tmp_path / "rollouts")
    base = f"s3://{BUCKET}/{tmp_path.name}"
    for source, target in ((tmp_path / "run", "evals/mine"), (tmp_path / "rollouts", "rollouts/mine")):
        for path in source.rglob("*.jsonl"):
            open_folder(f"{base}/{target}").write(path.relative_to(source).as_posix(), path.read_bytes())
    assert main(["report", f"{base}/evals/mine"]) == 0
    check_older_run((tmp_path / "mine.report.md").read_text())
    copies = {path.name: path for path in cache.rglob("*.jsonl")}
    steps = sorted(int(name.split("_")[2].split(".")[0]) for name in copies if name.startswith("global_step"))
    assert len(steps) == 8 and (steps[0], steps[-1]) == (1, 20)
    # A copy that is not as long as the store says is not believed.
    copies["global_step_1.jsonl"].write_text("cut")
    assert [e.reward for e in read_run(f"{base}/evals/mine").read_step("step", 1)] == [0.05, 0.0, 0.0]
    assert [(run.id, run.state, run.step) for run in find_runs(base)] == [("mine", "records", 20)]
    with pytest.raises(UserError, match="holds neither"):
        read_run(f"{base}/evals/none")


def test_a_run_in_a_checkpoint_store_has_the_evaluations_that_it_uploaded(s3, tmp_path, cache, capsys):
    base = f"s3://{BUCKET}/{tmp_path.name}"
    maker = RunMaker(tmp_path / "run")
    uploading = {"eval": {"upload": base}, "logging": {"trajectories": {"upload": base}}}
    config = {"run": {"name": "mine", "id": "mine_1"}, **uploading}
    (maker.folder / "config.json").write_text(json.dumps(config))
    for step, reward in ((0, 0.0), (2, 0.5), (4, 1.0)):
        maker.evaluate(step, groups({f"s{i}": [reward, 0.0] for i in range(6)}))
        written = maker.folder / "trajectories" / f"eval_{step:06d}.parquet"
        uploads = Uploads(base)
        uploads.add({f"trajectories/{written.name}": written}, f"evals/mine_1/global_step_{step}")
        if step < 4:
            maker.train(step + 1, groups({"t": [0.0, 1.0]}))
            name = f"step_{step + 1:06d}.parquet"
            uploads.add({name: maker.folder / "trajectories" / name}, "rollouts/mine_1/trajectories")
        uploads.close()

    async def weights(path: Path) -> dict:
        (path / "weights").write_bytes(bytes(10_000))
        return {"weights": fingerprint(path / "weights")}

    records = [maker.folder / name for name in ("config.json", "metrics.jsonl", "split.json")]
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, records=records)
    asyncio.run(checkpoints.save(4, weights, {}))
    store = RunStore(f"{base}/checkpoints/mine_1")
    store.begin_attempt()
    store.upload(Checkpoint.open(checkpoints.folders()[0]), threading.Event())

    assert main(["report", store.url]) == 0
    text = (tmp_path / "mine_1.report.md").read_text().replace("\\", "")
    assert "| pass@1, training temperature | 0.000 → 0.500 | step 0 " in text and "2 eval" in text
    assert main(["report", str(maker.folder)]) == 0
    same = (maker.folder / "report.md").read_text().replace("\\", "")
    assert [line for line in text.splitlines() if line.startswith("| shop")] == [
        line for line in same.splitlines() if line.startswith("| shop")
    ]
    names = {path.name for path in cache.rglob("*") if path.is_file()}
    shards = {"eval_000000.parquet", "eval_000004.parquet", "step_000001.parquet", "step_000003.parquet"}
    assert names == {"config.json", "metrics.jsonl", "split.json", *shards}
    assert [(run.id, run.step) for run in find_runs(f"{base}/rollouts")] == [("mine_1", 3)]
    assert sorted((run.id, run.state) for run in find_runs(base)) == [("mine_1", "records"), ("mine_1", "stored")]
    # Small files may change without a change of their size.
    before = run_files.RunFiles(store.url).folder / "config.json"
    before.write_text(before.read_text().replace("mine_1", "mine_2"))
    assert read_run(store.url).id == "mine_1"
    assert main(["runs", "compare", store.url, str(maker.folder), "--out", "page.html"]) == 0
    assert "+0.000 [+0.000, +0.000] (6 shared tasks)" in capsys.readouterr().out
