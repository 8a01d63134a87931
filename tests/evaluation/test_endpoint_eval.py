"""`mfleet eval --endpoint`: the embedded fleet played by a server that solves it, through real HTTP and processes."""

import json
import signal
import subprocess
import sys
import threading
from functools import partial

import psutil
import pytest

pytest.importorskip("hydra")
pytest.importorskip("openai")

from chat_server import MODEL, ChatServer, Oracle, error, serving
from waiting import HANG_S, wait_until

from megatron_fleet.cli import main
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.embedded_fleet.tasks import SHIPPED_TASKS
from megatron_fleet.evaluation.eval_command import read_config
from megatron_fleet.telemetry.shards import Shard

KEY = "sk-not-to-be-seen"
SMALL = ("eval.tasks=6", "eval.samples=2", "rollout.episodes_in_flight=4", "eval.endpoint.max_retries=1")
SAYING_WHAT_ENDED = """
import sys
from pathlib import Path
from megatron_fleet.cli import main
from megatron_fleet.evaluation.store import EpisodeStore
add = EpisodeStore.add
def told(self, kind, trajectories):
    add(self, kind, trajectories)
    if trajectories:
        Path(sys.argv[1]).touch()
EpisodeStore.add = told
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.mark.slow
def test_an_oracle_solves_everything_and_an_endpoint_that_died_on_the_way_is_gone_on_with(tmp_path, capfd):
    """The oracle is gone after 15 answers, which is after some episodes and within others."""
    oracle, out = Oracle(load_tasks(SHIPPED_TASKS)), tmp_path / "out"
    server = ChatServer(lambda number, body: oracle(number, body) if number < 15 else error(503, "gone"), key=KEY)
    with serving(server):
        arguments = ("eval", "--endpoint", server.url, "--model", MODEL, "--out", str(out), *SMALL)
        assert main(arguments) == 2
        told = capfd.readouterr()
        assert "the endpoint does not answer: 503: gone; run the same command again to continue." in told.err
        assert "episodes were abandoned without a reward" in told.out
        first = json.loads((out / "metrics.json").read_text())
        assert 0 < first["eval/all/outcome/completed"] < 12
        assert first["eval/all/pass_at_1"] == 1.0 and first["eval/all/greedy_outcome/aborted"] == 6

        server.speak = oracle
        server.bodies.clear()
        assert main(arguments) == 0
        told = capfd.readouterr().out
        assert f"eval: {first['eval/all/outcome/completed']} of 12 episodes were played before" in told
        found = json.loads((out / "metrics.json").read_text())
        assert found["eval/all/attempts_started"] == 18 - first["eval/all/outcome/completed"]
        for name in ("pass_at_1", "greedy_pass_at_1", "avg_raw_reward"):
            assert found[f"eval/all/{name}"] == 1.0
        assert found["eval/all/outcome/completed"] == 12 and found["eval/all/unknown_reward_rate"] == 0
        assert {b["temperature"] for b in server.bodies} == {0.0, 1.0}

        server.bodies.clear()
        assert main(arguments) == 0 and server.bodies == []  # nothing is left, so nothing is asked

    dump = out / "dumped_evals" / "global_step_0_evals"
    lines = [json.loads(line) for path in dump.glob("[!a]*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 12 and all(line["score"] == [1.0] and "<done>" in line["output_response"] for line in lines)
    assert json.loads((dump / "aggregated_results.jsonl").read_text())["eval/all/pass_at_2"] == 1.0
    assert Shard.open(out / "trajectories" / "eval_000000.parquet").rows == 12
    assert main(["report", str(out)]) == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert server.keys == {KEY}


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
def test_an_evaluation_that_knows_nothing_is_no_result(tmp_path, capfd):
    oracle, faults = Oracle(load_tasks(SHIPPED_TASKS)), ("env.faults.verifier_failure_rate=1", "rollout.max_retries=0")
    with serving(ChatServer(oracle, key=KEY)) as server:
        address = ("--endpoint", server.url, "--model", MODEL)
        assert main(("eval", *address, "--out", str(tmp_path / "out"), *SMALL, *faults, "eval.greedy=false")) == 2
    told = capfd.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: No episode has a reward; most common reason: verifier_failed: ")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["eval/all/unknown_reward_rate"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--endpoint", "http://h/v1"), "--endpoint and --model go together; add --model NAME"),
        (("--model", "m"), "add --endpoint URL"),
        (("--endpoint", "h/v1", "--model", "m"), "h/v1 is not the address of a server"),
        (("--endpoint", "http://h/v1", "--model", "m", "--checkpoint", "c"), "--checkpoint name two models"),
        (("--endpoint", "http://h/v1", "--model", "m", "model.path=x"), "model.path name two models"),
        (("--endpoint", "http://u:hidden@h/v1", "--model", "m"), "eval.endpoint.url holds a user or a password"),
        (("--endpoint", "http://u:hidden@h/v1", "--model", "m", "model=tiny"), "--endpoint and model.path name two"),
        (("--endpoint", "http://h/v1", "--model", "m", "eval.endpoint.extra_body=[1]"), "must be a JSON object"),
        (("--endpoint", "http://h/v1", "--model", "m", "eval.endpoint.extra_body={"), "not JSON"),
        (("eval.endpoint.url=http://h/v1", "model.path=x"), "eval.endpoint.model must be set; add --model NAME"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(tmp_path, capsys, arguments, words):
    assert main(["eval", "--out", str(tmp_path / "out"), *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1 and "hidden" not in told
    assert not (tmp_path / "out").exists()


def test_a_refused_key_and_an_unknown_model_stop_before_anything_is_started(tmp_path, capsys):
    with serving(ChatServer(lambda number, body: {"content": ""}, key="another")) as server:
        for model, words in ((MODEL, "the key in OPENAI_API_KEY is refused (401"), ("org/none", "it has org/model")):
            out = tmp_path / model.replace("/", "_")
            assert main(["eval", "--endpoint", server.url, "--model", model, "--out", str(out), *SMALL]) == 2
            told = capsys.readouterr().err
            assert words in told and KEY not in told and told.count("\n") == 1
            assert not (out / "logs").exists()
            server.key = KEY
    assert server.bodies == []


def test_the_configuration_says_where_the_model_is(tmp_path):
    config, run = read_config([], tmp_path, None, "http://h:8/v1/", "org/m")
    assert (config.eval.endpoint.url, config.eval.endpoint.model) == ("http://h:8/v1", "org/m")
    assert config.model.path == "http://h:8/v1/org/m" and run is None


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_an_evaluation_that_is_interrupted_keeps_what_ended_and_leaves_no_process(tmp_path):
    oracle, out = Oracle(load_tasks(SHIPPED_TASKS)), tmp_path / "out"
    hang = threading.Event()

    def speak(number, body):
        if number > 15:
            hang.wait()
        return oracle(number, body)

    with serving(ChatServer(speak, key=KEY)) as server:
        ended = tmp_path / "ended"
        command = [sys.executable, "-c", SAYING_WHAT_ENDED, ended, "eval", "--endpoint", server.url, "--model", MODEL]
        heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells ignore it in the background
        started = subprocess.Popen([*command, "--out", str(out), *SMALL], start_new_session=True, preexec_fn=heeding)
        with started as evaluation:
            wait_until(lambda: len(server.bodies) > 16 and ended.exists(), lambda: evaluation.poll() is None)
            children = psutil.Process(evaluation.pid).children(recursive=True)
            assert children
            evaluation.send_signal(signal.SIGINT)
            assert evaluation.wait(HANG_S) != 0
        hang.set()
    wait_until(lambda: not [child for child in children if child.is_running()])
    (part,) = (out / "parts").glob("eval-*.parquet")
    assert Shard.open(part).rows >= 1
