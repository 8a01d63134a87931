"""Whole runs on real parts: Megatron, vLLM, Ray, the OpenEnv server."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import MODEL, ChatServer, Oracle, serving
from gcs_server import GCS_BUCKET, found_by_google
from mlflow import MlflowClient
from planted import PLANTED, found_in, watched
from refusing_proxy import refusing_proxy
from s3_server import BUCKET, s3_server
from score_rollouts import assert_all_agree
from slack_server import CHANNEL, slack_server
from waiting import wait_until
from whole_runs import RUN_TIMEOUT_S, Run, wait_for

from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.embedded_fleet.tasks import SHIPPED_TASKS
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer

pytestmark = pytest.mark.slow

PROBED = ("rollout.engine.probe_interval=1",)
WEIGHTS = "hf/model.safetensors"
PARTS = ("parameters", "gradients", "optimizer")
SUMMARY_KEYS = {
    "pass_at_1_before",
    "pass_at_1_after",
    "steps",
    "seconds_to_first_step",
    "seconds_total",
    "episodes_started",
    "episodes_by_outcome",
    "tokens_generated",
    "tokens_trained",
    "mismatch_kl",
    "weight_versions",
}
CONVERTER = Path(__file__).parents[2] / "tools" / "convert" / "to_hf.py"


def convert(*arguments):
    command = [sys.executable, CONVERTER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that is recorded and stored in every way; the services that it uses know the planted keys alone, and are on
    this host, behind no proxy, although the environment names one.
    """
    folder = tmp_path_factory.mktemp("runs")
    keys = PLANTED["AWS_ACCESS_KEY_ID"], PLANTED["AWS_SECRET_ACCESS_KEY"]
    with s3_server(keys) as server, slack_server() as slack, refusing_proxy() as asked:
        slack.token = PLANTED["SLACK_BOT_TOKEN"]
        recorded = (
            *("logging.wandb.project=tests", "logging.wandb.mode=offline"),
            f"logging.mlflow.uri=sqlite:///{folder}/ml.db",
            *(f"logging.slack.channel={CHANNEL!r}", f"logging.slack.url={slack.url}"),
            *(f"checkpoint.store.url=s3://{BUCKET}/runs", f"logging.trajectories.upload=s3://{BUCKET}/episodes"),
        )
        run = Run(folder / "first", (*PROBED, "eval.overlap=true", *recorded), environ=server.environment())
        run.output = run.finish(watch=True)
        run.slack, run.asked_of_proxy = slack, asked
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment().items():
                patch.setenv(name, value)
            bucket = open_folder(f"s3://{BUCKET}")
            copies = [Copy(name, name, size) for name, size in bucket.sizes().items()]
            transfer(bucket, LocalFolder(folder / "bucket"), copies)
    return run


def test_a_run_leaves_what_it_promises(first):
    summary = json.loads((first.out / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 3
    assert summary["weight_versions"] == 3
    assert sum(summary["episodes_by_outcome"].values()) == 3 * 16 + 2 * (6 + 3)
    assert (first.out / "curve.svg").read_bytes().startswith(b"<svg ")
    assert list((first.out / "tensorboard").iterdir())
    assert list((first.out / "wandb").glob("offline-run-*/*.wandb"))
    client = MlflowClient(f"sqlite:///{first.out.parent}/ml.db")
    [tracked] = client.search_runs([client.get_experiment_by_name("megatron_fleet").experiment_id])
    assert tracked.data.metrics["trainer/global_step"] == 3 and tracked.info.status == "FINISHED"
    kept = sorted(p.name for p in (first.out / "checkpoints").iterdir())
    assert kept[-2:] == ["step_000002", "step_000003"]  # another one, if it was on its way to the store for long
    assert "finished 3 steps" in first.output.strip().splitlines()[-1]
    first.assert_nothing_left()


def test_a_proxy_in_the_environment_is_asked_for_nothing_on_this_host(first):
    assert near(first.asked_of_proxy) == []


def near(asked):
    """Those of the requests to a proxy that are for this host. Ray asks clouds for their metadata."""
    return [url for url in asked if "127.0.0.1" in url or "localhost" in url]


def test_only_the_processes_that_use_a_secret_hold_it(first):
    assert len(first.held) > 8
    held = {command: names for command, names in first.held.items() if names}
    assert {command: names for command, names in held.items() if not allowed(command, names)} == {}
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} in held.values()  # of the rank: else nothing was seen


def allowed(command: str, names: set[str]) -> bool:
    """A rank reads models and writes checkpoints in an object store; W&B's own processes send metrics and ask git."""
    if command.endswith("megatron_fleet.cli rank "):
        return names <= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    return ("/wandb/bin/wandb-" in command or command.startswith("git ")) and names <= {"WANDB_API_KEY"}


def test_no_record_no_page_no_message_and_no_line_of_the_terminal_holds_a_secret(first):
    command = [sys.executable, "-m", "megatron_fleet.cli", "report", str(first.out)]
    reported = subprocess.run(command, env=os.environ | PLANTED, capture_output=True, timeout=RUN_TIMEOUT_S)
    assert reported.returncode == 0, reported.stderr
    written = {path.relative_to(first.out.parent).as_posix() for path in first.out.parent.rglob("*")}
    stored = {name.rpartition("/")[2] for name in written if name.startswith("bucket/runs/")}
    assert written >= {"first/run.json", "first/report.html"} and stored >= {"manifest.json", "__0_0.distcp"}
    assert any(name.startswith("bucket/episodes/") for name in written)
    assert files_with_secrets(first.out.parent) == {}
    assert not found_in(first.output.encode() + reported.stdout + reported.stderr)
    assert len(first.slack.messages) > 2 and first.slack.problems == []
    assert not found_in(str(first.slack.messages).encode())


def files_with_secrets(folder: Path) -> dict[str, set[str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    return {str(path): names for path in files if (names := found_in(path.read_bytes()))}


def test_only_its_user_can_read_a_run(first):
    outputs = [first.out, *(path for path in first.out.rglob("*") if not path.is_symlink())]
    assert len(outputs) > 30
    assert {str(path): oct(path.stat().st_mode) for path in outputs if path.stat().st_mode & 0o077} == {}


@pytest.mark.in_turn(number=0, of=2)
def test_an_endpoint_s_key_is_in_no_environment_but_that_of_the_command(tmp_path):
    command = [sys.executable, "-m", "megatron_fleet.cli", "eval", "--model", MODEL, "--out", str(tmp_path / "out")]
    small = ("eval.tasks=2", "eval.samples=2", "eval.greedy=false")
    oracle = Oracle(load_tasks(SHIPPED_TASKS))
    with serving(ChatServer(oracle, key=PLANTED["OPENAI_API_KEY"])) as server, refusing_proxy() as asked:
        process = subprocess.Popen(
            [*command, "--endpoint", server.url, *small],
            env=os.environ | PLANTED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with watched(process) as held:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0 and near(asked) == [], output
    assert server.keys == {PLANTED["OPENAI_API_KEY"]}  # the worker got it in a message
    assert [command for command in held if "WorkerActor" in command]
    assert {command: names for command, names in held.items() if names} == {}
    assert files_with_secrets(tmp_path) == {}
    assert not found_in(output.encode())


def test_every_episode_is_accounted_for(first):
    for row in first.metrics()[1:]:
        fates = ("trained", "filtered", "unknown", "too_few_known", "masked", "too_old", "no_tokens")
        assert sum(row[f"accounting/{fate}"] for fate in fates) == row["accounting/episodes"] == 16


def test_the_on_policy_ratio_is_exactly_one(first):
    ratios = [row["policy/ratio_mean"] for row in first.metrics()[1:] if "policy/ratio_mean" in row]
    assert ratios
    assert set(ratios) == {1.0}


def test_a_damaged_checkpoint_is_not_converted(first, tmp_path):
    shutil.copytree(first.out / "checkpoints" / "step_000002", tmp_path / "run" / "checkpoints" / "step_000002")
    shutil.copyfile(first.out / "config.json", tmp_path / "run" / "config.json")
    shards = tmp_path / "run" / "checkpoints" / "step_000002" / "__0_0.distcp"
    with shards.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    done = convert(shards.parent, tmp_path / "hf")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {shards} ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_megatron_transformers_and_vllm_agree_on_rollouts(first, tmp_path):
    """After three updates, on what the updated engine sampled; test_expert_runs has the same before any."""
    assert_all_agree(first, "eval_000003", first.out / "hf", tmp_path)


@pytest.mark.nightly(minutes=2)
def test_a_killed_run_goes_on_from_its_bucket_and_ends_like_the_undisturbed_one(first, tmp_path):
    """Bit for bit, although its folder is lost, its trainer and engines take turns, and its first evaluation ends
    before the training begins instead of overlapping it.
    """
    with found_by_google():
        bucket = open_folder(f"gs://{GCS_BUCKET}")
        stored = ("run.id=killed", f"checkpoint.store.url=gs://{GCS_BUCKET}/runs")
        run = Run(tmp_path / "killed", (*PROBED, *stored, "rollout.engine.colocated=true"))
        process = run.start()
        wait_for(lambda: any(name.endswith("killed/global_step_1/manifest.json") for name in bucket.sizes()), process)
        process.kill()
        process.communicate()
        run.assert_nothing_left()
        shutil.rmtree(run.out)
        run.finish()
    assert run.facts() == first.facts()
    assert (run.out / WEIGHTS).read_bytes() == (first.out / WEIGHTS).read_bytes()

    for row in run.metrics()[1:]:
        assert all(row[f"timing/{name}"] > 0 for name in ("offload", "onload", "engines_sleep", "engines_wake"))
    table = json.loads((run.out / "memory.json").read_text())
    assert "frees no memory on platform 'cpu'" in table["engines"]
    held = {phase: [owners[part]["bytes"] for part in PARTS] for phase, owners in table["phases"].items()}
    parameters, gradients, optimizer = held["train"]
    # float32: the parameters are their own masters.
    assert 0 < gradients <= parameters and optimizer == pytest.approx(2 * parameters, rel=0.02)
    assert held["sync"] == [parameters, 0, 0]
    assert held["roll"] == [0, 0, 0]


@pytest.mark.nightly(minutes=1.5)
def test_four_ranks_take_the_same_first_step_as_one_though_the_rollout_takes_longer_than_a_collective_may(
    first, tmp_path
):
    """Two kinds of parallelism that divide the weights; tests/parity has every layout.

    No rank waits in a collective for the rollout: torch would end it.
    """
    limit_s = 40
    sizes = ("parallel.tensor=2", "parallel.pipeline=2", f"cluster.collective_timeout_s={limit_s}")
    slow = ("env.faults.latency_median_s=15", "env.faults.latency_sigma=0", "cluster.max_restarts=0")
    run = Run(tmp_path / "ranks", (*PROBED, *sizes, *slow, "run.steps=1", "eval=none"))
    run.finish()
    one, four = first.metrics()[1], run.metrics()[0]
    assert four["timing/rollout_wait"] > limit_s
    for name in ("policy/final_loss", "policy/grad_norm", "policy/policy_entropy"):
        assert four[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
    assert four["policy/ratio_mean"] == 1.0
    # After the update engines compute what the trainer does.
    assert 0 < four["policy/probe_difference"] < 1e-3
    run.assert_nothing_left()
    done = convert(run.out / "checkpoints" / "step_000001", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / WEIGHTS).read_bytes() == (run.out / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("number", "file"),
    [
        (signal.SIGINT, "logs/engine-0.log"),
        pytest.param(signal.SIGTERM, "trajectories/eval_000000.parquet", marks=pytest.mark.nightly(minutes=1.5)),
    ],
)
@pytest.mark.in_turn(number=1, of=2)
def test_a_stopped_run_says_so_in_one_line_and_leaves_nothing(tmp_path, number, file):
    """While its processes start, and in the middle of its work."""
    run = Run(tmp_path / "stopped")
    process = run.start()
    wait_for(run.out / file, process)
    words = {word for command in run.processes() for word in command.split()}
    folders = {word for word in words if word[0] == "/" and Path(word).name.startswith("mf-")}
    assert len(folders) == 1 and Path(*folders).is_dir()  # Ray's and the engines', named to the janitor
    process.send_signal(number)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 128 + number
    assert "stopped by" in output.strip().splitlines()[-1] and output.count("stopped by") == 1
    run.assert_nothing_left()
    wait_until(lambda: not Path(*folders).exists())
