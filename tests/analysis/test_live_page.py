"""The live page's server and what it reads of a run that goes on."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

from run_maker import groups
from starlette.testclient import TestClient

from megatron_fleet import cli
from megatron_fleet.analysis.live import follow, server, view
from megatron_fleet.analysis.live.follow import RunFollower, Wanted
from megatron_fleet.analysis.live.server import LivePage
from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.status import (
    Alert,
    AwaitedStatus,
    EngineStatus,
    EnvironmentStatus,
    PhaseStatus,
    RunStatus,
)
from megatron_fleet.telemetry.trajectories import TrajectoryLog

TOKEN, COOKIE = "the-token", "mfleet_1"
PAGES = ("/", "/live.js", "/live.css", "/icon.svg", "/data/now", "/data/charts", "/data/trajectories")
STATUS = RunStatus("demo", "demo_1", "running", "node-0", 7, time=1000.0, started=0.0, step=2, steps=4)


def looked(folder: Path) -> RunFollower:
    follower = RunFollower(folder)
    follower.look()
    return follower


def steps(follower: RunFollower) -> list[int]:
    follower.look()
    return [row["step"] for row in follower.metrics.rows]


def client(folder: Path, token: str | None = TOKEN) -> TestClient:
    app = LivePage(RunFollower(folder)).app(TOKEN, COOKIE)
    return TestClient(app, cookies=None if token is None else {COOKIE: token}, follow_redirects=False)


def test_only_what_is_new_of_the_metrics_is_read(make_run):
    for step in (1, 2):
        make_run.train(step, groups({"t": [0.0, 1.0]}))
    follower = looked(make_run.folder)
    with (make_run.folder / "metrics.jsonl").open("r+b") as file:
        file.write(b"x" * 20)  # over what was read before
    make_run.train(3, groups({"t": [1.0, 1.0]}))
    assert steps(follower) == [1, 2, 3]
    version = follower.metrics.version
    assert steps(follower) == [1, 2, 3] and follower.metrics.version == version


def test_a_row_that_grows_and_one_that_is_being_written(make_run):
    make_run.train(1, groups({"t": [0.0, 1.0]}))
    follower = looked(make_run.folder)
    make_run.metrics.write(1, {"eval/all/pass_at_1": 0.5})
    assert steps(follower) == [1] and follower.metrics.latest("eval/all/pass_at_1") == (1, 0.5)
    with (make_run.folder / "metrics.jsonl").open("ab") as file:
        line = json.dumps({"step": 2, "reward/avg_raw_reward": 0.25}).encode() + b"\n"
        file.write(line[:20])
        file.flush()
        assert steps(follower) == [1]
        file.write(line[20:])
    assert steps(follower) == [1, 2] and follower.metrics.latest("reward/avg_raw_reward") == (2, 0.25)


def test_a_resumed_run_replaces_metrics_and_trajectories(make_run):
    for step in (1, 2, 3):
        make_run.train(step, groups({"t": [0.0]}))
    follower = looked(make_run.folder)
    assert len(follower.search(Wanted(), 100).rows) == 3
    make_run.metrics.close()
    log = MetricsLog(make_run.folder / "metrics.jsonl", 1, started=2000.0)
    TrajectoryLog(make_run.folder / "trajectories", 1)
    assert steps(follower) == [1]
    log.write(2, {"reward/avg_raw_reward": 1.0})
    assert steps(follower) == [1, 2]
    assert [(row.kind, row.step) for row in follower.search(Wanted(), 100).rows] == [("step", 1)]
    version = follower.version
    make_run.log.write(1, groups({"t": [1.0]}))
    follower.look()
    assert follower.version != version and [row.reward for row in follower.search(Wanted(), 100).rows] == [1.0]


def test_the_list_is_newest_first_and_filtered(make_run):
    make_run.train(1, groups({"a": [0.0, 1.0]}) + groups({"b/x": [None, 0.5]}, "web/shop"))
    make_run.evaluate(1, groups({"c": [1.0]}))
    make_run.train(2, groups({"a": [0.0]}))
    follower = looked(make_run.folder)

    def found(**wanted: object) -> list[str]:
        rows = follower.search(Wanted(**wanted), 100).rows  # type: ignore[arg-type]
        return [view.listed(row)["id"] for row in rows]

    assert found() == ["step-2-0", "eval-1-0", "step-1-0", "step-1-1", "step-1-2", "step-1-3"]
    assert found(kind="eval") == ["eval-1-0"] and found(step=2) == ["step-2-0"]
    assert found(env="web_shop") == ["step-1-2", "step-1-3"] == found(text="B/")
    assert found(outcome="verifier_failed") == ["step-1-2"] == found(reward="unknown")
    assert found(reward="partial") == ["step-1-3"]
    assert found(reward="zero") == ["step-2-0", "step-1-0"]
    assert found(reward="solved") == ["eval-1-0", "step-1-1"]
    assert follower.search(Wanted(), 2).more and not follower.search(Wanted(), 6).more


def test_a_search_in_a_long_run_goes_on_where_the_last_one_ended(make_run, monkeypatch):
    for step in range(1, 6):
        make_run.train(step, groups({"old" if step == 1 else "new": [0.0]}))
    follower = looked(make_run.folder)
    monkeypatch.setattr(follow, "SEARCH_S", -1.0)
    opened: list[str] = []
    real = follow.Shard.open
    monkeypatch.setattr(follow.Shard, "open", lambda path: (opened.append(path.name), real(path))[1])
    for searched_to in (5, 4, 3, 2):
        found = follower.search(Wanted(text="old"), 10)
        assert (found.rows, found.more, found.searched_to) == ([], True, searched_to)
    found = follower.search(Wanted(text="old"), 10)
    assert len(found.rows) == 1 and not found.more
    assert len(opened) == len(set(opened)) == 5  # no file twice


def test_damaged_files_are_named_and_the_rest_is_shown(make_run, monkeypatch):
    monkeypatch.setattr(server, "LOOK_S", 0.0)
    make_run.train(1, groups({"t": [0.0]})).train(2, groups({"t": [0.0]}))
    (make_run.folder / "trajectories" / "step_000002.parquet").write_bytes(b"no shard")
    (make_run.folder / "status.json").write_text("[]")
    (make_run.folder / "config.json").write_text("{")
    page = client(make_run.folder)
    assert page.get("/data/now").status_code == 200
    assert [row["id"] for row in page.get("/data/trajectories").json()["rows"]] == ["step-1-0"]
    for _ in range(2):  # they are named as long as they are damaged
        notes = page.get("/data/now").json()["notes"]
        names = ("config.json", "status.json", "step_000002.parquet")
        assert len(notes) == 3 and all(any(name in note for note in notes) for name in names)


def test_a_run_that_has_only_begun(tmp_path):
    page = client(tmp_path)
    now = page.get("/data/now").json()
    assert now["facts"][0]["value"] == "0" and now["timeline"]["steps"] == [] and now["environments"] == []
    assert page.get("/data/charts").json() == []
    assert page.get("/data/trajectories").json() == {"rows": [], "more": False, "searched_to": None}


def test_the_status_becomes_figures_bars_and_tables(make_run):
    seconds = {"step": 10.0, "generate": 6.0, "policy_train": 3.0, "eval": 4.0}
    make_run.metrics.write(1, {f"timing/{phase}": value for phase, value in seconds.items()})
    phases = [
        PhaseStatus("rollout", 1000.0, 5.0, 8, 8),
        PhaseStatus("eval", 1002.0, None, 3, 12, [AwaitedStatus("t7", "maps", 970.0, 3, 4)]),
    ]
    engines = [EngineStatus("engine 0", True, 3, 0, 0.5, 100.0), EngineStatus("engine 1", False)]
    shop = EnvironmentStatus(episodes=5, known=4, reward=0.5, tool_calls=4, tool_errors=3, quarantined=0)
    parts = {"phases": phases, "engines": engines, "environments": {"shop": shop}, "memory": {"ranks": 3 << 30}}
    alerts = [Alert(900.0, "ERROR", "old"), Alert(999.0, "WARNING", "new")]
    status = replace(STATUS, step_began=1000.0, playing=4, waiting=2, allowed=6, alerts=alerts, **parts)
    status.write(make_run.folder)
    follower = looked(make_run.folder)
    now = view.now(follower, 1010.0)
    facts = {fact["label"]: (fact["value"], fact["detail"]) for fact in now["facts"]}
    assert facts["steps"] == ("2 of 4", "10 s per step, 20 s left")
    assert facts["now"] == ("eval 3/12", "for 8 s")
    assert facts["episodes"] == ("4 playing", "2 waiting for a worker, at most 6 may play now")
    current, (finished,) = now["timeline"]["current"], now["timeline"]["steps"]
    assert [(p["kind"], p["start"], p["seconds"], p["running"]) for p in current["parts"]] == [
        ("generate", 0.0, 5.0, False),
        ("eval", 2.0, 8.0, True),
    ]
    parts = [(part["kind"], part["start"], part["seconds"]) for part in finished["parts"]]
    assert parts == [("generate", 0, 6), ("train", 6, 3), ("eval", 9, 4), ("other", 13, 1)]
    texts = {name: [[cell["text"] for cell in row] for row in table["rows"]] for name, table in now["tables"].items()}
    assert texts["engines"][1][:2] == ["engine 1", "not serving"]
    assert texts["environments"][0][-1] == "5 ended, reward 0.50"
    assert texts["awaited"] == [["t7", "maps", "3 of 4", "40 s"]]
    assert texts["memory"] == [["ranks (host)", "3.00"]]
    assert [alert["text"] for alert in now["alerts"]] == ["new", "old"]
    assert now["state"]["text"] == "running"
    later = view.now(follower, 2000.0)
    assert later["state"] == {"text": "silent for 16 min 40 s", "tone": "bad", "detail": later["state"]["detail"]}
    assert later["timeline"]["current"]["parts"][1]["seconds"] == 0.0  # it did nothing that anybody knows of


def test_without_the_token_nothing_is_served(simple_run):
    page = client(simple_run, None)
    for path in (*PAGES, "/data/trajectory/step-1-0", "/data/image/x", "/nowhere"):
        for token in (None, b"", b"wrong", TOKEN.encode() + b"x", "ü".encode()):
            headers = {} if token is None else {b"Cookie": COOKIE.encode() + b"=" + token}
            answer = page.get(path, headers=headers)
            assert (answer.status_code, answer.text) == (403, server.REFUSED), path
        assert page.get(path, params={"token": "ü"}).status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(simple_run):
    page = client(simple_run, None)
    answer = page.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert {"HttpOnly", f"{COOKIE}={TOKEN}"} <= set(answer.headers["set-cookie"].split("; "))
    assert page.get("/").status_code == 200
    for path in PAGES:
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer" and TOKEN not in str(headers)


def test_no_request_names_a_file(simple_run):
    page = client(simple_run)
    assert page.get("/data/now").status_code == 200
    for path in (
        *("/..%2fconfig.json", "/%2e%2e/config.json", "/data/image/..%2f..%2fconfig.json", "/config.json"),
        *("/data/trajectory/..%2f..-1-0", "/data/trajectory/step-1-99", "/data/trajectory/step-9-0"),
        *("/data/trajectory/step-1--1", "/data/image/" + "a" * 64, "/data/image//etc/passwd", "/metrics.jsonl"),
    ):
        answer = page.get(path)
        assert answer.status_code == 404 and len(answer.content) < 100, path


def test_what_did_not_change_is_not_sent_again(simple_run):
    page = client(simple_run)
    page.get("/data/now")
    for path in ("/data/charts", "/data/trajectories?env=shop"):
        answer = page.get(path)
        assert answer.status_code == 200 and len(answer.content) > 100
        again = page.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
    assert page.get("/data/trajectories?limit=x").status_code == 400
    assert page.post("/data/now").status_code == 405


def test_one_trajectory_with_its_tokens(simple_run):
    page = client(simple_run)
    page.get("/data/now")
    found = page.get("/data/trajectory/step-2-1").json()
    assert (found["row"]["id"], found["row"]["task"], found["row"]["reward"]) == ("step-2-1", "t1", 1.0)
    assert found["record"]["messages"][1] == ["user", "do it"]
    assert found["record"]["ids"] == [5, 6, 7, 8, 9] and found["record"]["runs"] == [3, 2]


def test_what_cannot_be_served_is_one_sentence(simple_run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["report", str(simple_run), "--serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: --port={port} is in use on 127.0.0.1; name another one, or 0 for any free one.\n"
    )
    for arguments, said in (
        ([str(simple_run / "none"), "--serve"], "no such folder"),
        ([str(simple_run), "--serve", "--port", "70000"], "0 to 65535"),
        ([str(simple_run), "--serve", "--out", "x.html"], "--serve writes no files"),
        (["s3://bucket/run", "--serve"], "needs the folder"),
        ([str(simple_run), "--port", "1"], "add it, or leave them out"),
    ):
        assert cli.main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_the_cost_at_a_service_is_shown(make_run):
    make_run.train(1, groups({"t": [0.0, 1.0]}))
    make_run.metrics.write(1, {"cost/cumulative_usd": 1234.5, "cost/step_usd": 0.25})
    facts = {fact["label"]: (fact["value"], fact["detail"]) for fact in view.now(looked(make_run.folder), 1.0)["facts"]}
    assert facts["cost so far"] == ("$1,234.50", "$0.25 in step 1")


def test_large_numbers_are_written_out(make_run):
    make_run.train(1, groups({"t": [0.0, 1.0]}))
    make_run.metrics.write(1, {"engine/prompt_tokens": 14080.0, "engine/kv_cache_usage_max": 0.1834})
    table = view.now(looked(make_run.folder), clock=1.0)["tables"]["engines"]
    assert [[cell["text"] for cell in row] for row in table["rows"]] == [
        ["prompt_tokens", "14,080"], ["kv_cache_usage_max", "0.1834"],
    ]  # fmt: skip
