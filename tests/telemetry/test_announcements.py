"""What Slack hears of a run, and which metrics are an alert."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image
from slack_server import TOKEN, slack_server
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.platform.alerts import AlertHandler, alert, listening
from megatron_fleet.telemetry import alert_rules, slack
from megatron_fleet.telemetry.alert_rules import RATE_FEWEST, RATE_RECENT, SIGNAL_STEPS, AlertRules
from megatron_fleet.telemetry.announcements import announced
from megatron_fleet.telemetry.sinks import MetricsLog

QUICKSTART = "experiment=quickstart"
log = logging.getLogger("megatron_fleet.test")
FINE = {
    "accounting/episodes": 8,
    "reward/avg_raw_reward": 0.25,
    "reward/signal_ratio": 0.5,
    "generate/tokens_per_second": 100.0,
    "accounting/trained_tokens": 1000,
    "timing/policy_train": 2.0,
    "timing/step": 90.0,
    "environment/booking/tool_error_rate": 0.5,
    "environment/tool_error_rate": 0.9,
}
EVALUATION = {"eval/all/episodes": 8, "eval/all/pass_at_1": 0.5, "eval/a<b/pass_at_1": 0.25, "eval/c/pass_at_1": 0.75}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("SLACK_BOT_TOKEN", TOKEN)
    for name in ("ANSWER_S", "OPEN_S", "CLOSE_S"):
        monkeypatch.setattr(slack, name, int(HANG_S))
    with slack_server() as running:
        yield running


def config_of(server, out, *overrides: str) -> Config:
    where = ["logging.slack.channel=#training-runs", f"logging.slack.url={server.url}"]
    return load([QUICKSTART, f"run.out={out}", "run.id=mine_1", "run.steps=10", *where, *overrides])


def test_a_run_from_start_to_end(server, tmp_path):
    config = config_of(server, tmp_path, "logging.wandb.project=fleet", "logging.wandb.entity=team")
    with announced(config) as said:
        said.began(None)
        said.write(0, EVALUATION)
        said.write(1, FINE)
        said.write(2, FINE | {"eval/all/episodes": 8, "eval/all/pass_at_1": 0.625})
        alert(log, "stall", "step 3 takes 700 s", "policy_train")
        alert(log, "stall", "step 3 takes 900 s", "policy_train")
        alert(log, "stall", "step 3 takes 900 s", "rollout")
        log.warning("no alert")
        said.status = 0
    head, first, step, second, *stalls, completed = server.texts()
    assert head.startswith("*:rocket: mine_1 started*\n*Model:*") and "*Steps:* 10\n" in head
    assert "https://wandb.ai/team/fleet/groups/mine_1" in head
    assert first == (
        "*:chart_with_upwards_trend: evaluation after step 0*\nHeld-out pass@1 0.500\n"
        "```pass@1 change  environment\n0.250 +0.000  a&lt;b\n0.750 +0.000  c```"
    )
    assert step.splitlines() == [
        "*:white_check_mark: step 1 of 10 done*",
        "reward 0.250 · tokens/s 100",
        "1 min 30 s per step, about 13 min 30 s for the 9 that are left",
    ]
    assert "after step 2*\nHeld-out pass@1 0.500 → 0.625" in second
    assert [text.splitlines()[0] for text in stalls] == [
        "*:warning: stalled: policy_train*", "*:warning: stalled: rollout*",
    ]  # fmt: skip
    assert completed.startswith("*:white_check_mark: completed*\n2 steps, ")
    assert [number for number, message in enumerate(server.messages) if "file" in message] == [1, 3, 6]
    assert Image.open(io.BytesIO(server.messages[3]["file"])).width > 1000
    assert {message["thread_ts"] for message in server.messages[1:]} == {server.messages[0]["ts"]}


def test_an_attempt_that_goes_on_knows_the_curve_before(server, tmp_path):
    rows = MetricsLog(tmp_path / "metrics.jsonl", None)
    rows.write(0, EVALUATION)
    rows.write(7, FINE)
    rows.write(8, EVALUATION | {"eval/all/pass_at_1": 0.9})
    rows.close()
    with announced(config_of(server, tmp_path)) as said:
        said.began(7)
        said.write(8, FINE | EVALUATION | {"eval/all/pass_at_1": 0.75})
        said.stopping("SIGTERM")
        said.status = os.EX_TEMPFAIL
    head, step, evaluation, stopping, end = server.texts()
    assert head.startswith("*:rocket: mine_1 resumed*") and "*Steps:* 10, resumes after step 7" in head
    assert step.startswith("*:white_check_mark: step 8 of 10 done*")
    assert "Held-out pass@1 0.500 → 0.750" in evaluation
    assert stopping.startswith("*:octagonal_sign: stopping: SIGTERM*")
    assert (
        end == "*:double_vertical_bar: will resume*\n"
        "Saved after step 8, stopped by SIGTERM; the same command resumes the run."
    )


def test_what_a_restarted_trainer_forgot_is_not_in_the_curve(server, tmp_path):
    with announced(config_of(server, tmp_path)) as said:
        said.began(None)
        said.write(0, EVALUATION)
        said.write(2, FINE | EVALUATION | {"eval/all/greedy_pass_at_1": 1.0})
        said.write(1, FINE | EVALUATION)
    after_2, after_1 = server.texts()[-2:]
    assert "Held-out pass@1 0.500 → 0.500, greedy 1.000" in after_2 and "greedy" not in after_1


def test_an_evaluation_that_ends_some_steps_later_is_announced_under_its_own_and_nothing_is_forgotten(server, tmp_path):
    with announced(config_of(server, tmp_path)) as said:
        said.began(None)
        said.write(0, EVALUATION)
        for step in (1, 2, 3):
            said.write(step, FINE)
        said.write(1, {"eval/all/episodes": 8, "eval/all/pass_at_1": 0.625})
        assert [row["step"] for row in said._rows] == [0, 1, 2, 3]
    (text,) = [text for text in server.texts() if "evaluation after step 1" in text]
    assert "Held-out pass@1 0.500 → 0.625" in text


def test_a_run_that_fails_says_its_last_lines(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdef123456")
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [f"line {number} <@U123>" for number in range(5000)]
    (logs / "rank_0.log").write_text("\n".join([*lines, "```abcdef123456", "CUDA error"]))
    (logs / "rank_1.log").write_text("older")
    os.utime(logs / "rank_1.log", (0, 0))
    for where in (logs / "rank_0.log", logs):
        with pytest.raises(UserError), announced(config_of(server, tmp_path)) as said:
            said.began(None)
            said.write(1, FINE)
            raise UserError(f"the trainer died 3 times, last: rank 0 exited. Logs are in {where}; go on.")
        text = server.texts()[-1]
        assert text.startswith("*:x: failed*\nAfter step 1: the trainer died 3 times")
        assert text.endswith("line 4999 &lt;@U123&gt;\n'''[SOME_API_KEY]\nCUDA error```") and len(text) < 3000
    with pytest.raises(ZeroDivisionError), announced(config_of(server, tmp_path)) as said:
        said.began(None)
        raise ZeroDivisionError("<b>")
    text = server.texts()[-1]
    assert "ZeroDivisionError: &lt;b&gt;\n```" in text and "Traceback" in text and text.endswith("&lt;b&gt;```")
    with pytest.raises(KeyboardInterrupt), announced(config_of(server, tmp_path)) as said:
        said.began(None)
        raise KeyboardInterrupt
    assert server.texts()[-1].startswith("*:octagonal_sign: cancelled*")


def test_without_a_channel_there_is_no_message(tmp_path):
    with announced(load([QUICKSTART, f"run.out={tmp_path}"])) as said:
        said.began(None)
        said.write(1, FINE | EVALUATION)
        said.stopping("SIGTERM")
        said.status = 0
    assert list(tmp_path.iterdir()) == []


def raised(config: Config, *steps: dict[str, float]) -> list[tuple[str, str]]:
    """Kinds and subjects of the alerts that consecutive steps raise."""
    found = []
    rules = AlertRules(config)
    with listening(AlertHandler(found.append, cooldown_s=0.0)):
        for number, metrics in enumerate(steps, 1):
            rules.write(number, metrics)
    return [(one.kind, one.subject) for one in found]


@pytest.fixture
def config(tmp_path):
    return load([QUICKSTART, f"run.out={tmp_path}"])


def test_metrics_of_a_usual_step_are_no_alert(config):
    assert raised(config, *[FINE] * 50) == []


def test_an_environment_whose_tool_calls_fail_is_an_alert(config):
    bad = FINE | {"environment/booking/tool_error_rate": 0.51, "environment/mail/tool_error_rate": 1.0}
    assert raised(config, bad) == [("tool_errors", "booking"), ("tool_errors", "mail")]
    assert raised(config, bad | {"environment/mail/breaker_open": 1.0})[1] == ("outage", "mail")
    off = config.model_copy(update={"logging": load([QUICKSTART, "logging.alerts.tool_error_rate=null"]).logging})
    assert raised(off, bad) == []
    without_tools = load([QUICKSTART, f"run.out={config.run.out}", "env=python", "env.reward=m:f", "data.tasks=t.json"])
    assert raised(without_tools, bad) == []


def test_a_mismatch_is_an_alert(config):
    assert raised(config, FINE | {"policy/mismatch_kl": 0.3}) == [("mismatch", "")]


def test_steps_without_a_signal_are_an_alert_together(config):
    flat = FINE | {"reward/signal_ratio": 0.0}
    few = [flat] * (SIGNAL_STEPS - 1)
    assert raised(config, *few, FINE, *few) == []
    unknown = {name: value for name, value in FINE.items() if not name.startswith("reward/")}
    assert raised(config, *few, unknown) == [("no_signal", "")]


def test_a_drop_of_throughput_that_lasts_is_an_alert(config):
    usual = [FINE] * RATE_FEWEST
    slow = FINE | {"generate/tokens_per_second": 40.0}
    assert raised(config, *usual, slow, FINE, FINE, slow, FINE) == []
    assert raised(config, *usual, *[slow] * RATE_RECENT)[-1] == ("throughput", "generation")
    long = FINE | {"timing/policy_train": 5.0}
    assert raised(config, *usual, *[long] * RATE_RECENT)[-1] == ("throughput", "training")


def test_a_disk_without_room_for_checkpoints_is_an_alert(config, tmp_path, monkeypatch):
    newest = tmp_path / "checkpoints" / "step_000010"
    newest.mkdir(parents=True)
    (newest / "shard").write_bytes(bytes(1000))
    free = [1999]
    monkeypatch.setattr(alert_rules, "FLOOR_BYTES", 10)
    monkeypatch.setattr(alert_rules.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    assert raised(config, FINE) == [("disk", "")]
    free[0] = 2000
    assert raised(config, FINE) == []


def test_the_same_alert_is_passed_on_once_per_cooldown():
    now, found = [0.0], []
    handler = AlertHandler(found.append, cooldown_s=60.0, clock=lambda: now[0])
    with listening(handler):
        for now[0] in (0.0, 59.0, 61.0, 121.0):
            alert(log, "tool_errors", f"at {now[0]:g}", "booking")
        alert(log, "tool_errors", "at 121", "mail")
    assert [(one.subject, one.text) for one in found] == [
        ("booking", "at 0"), ("booking", "at 61 (1 more since the last message)"), ("booking", "at 121"),
        ("mail", "at 121"),
    ]  # fmt: skip


def test_warnings_still_reach_the_terminal():
    program = (
        "import logging; from megatron_fleet.platform.alerts import *\n"
        "log = logging.getLogger('megatron_fleet.x')\n"
        "with listening(AlertHandler(lambda _: None, 0.0)): alert(log, 'disk', 'full')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stderr == "full\n"
