"""Messages in Slack: their wire format, one thread per run, and a Slack that fails, which the run never waits for."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from types import SimpleNamespace

import pytest
from held_ports import held_ports
from PIL import Image
from refusing_proxy import refusing_proxy
from slack_sdk.errors import SlackApiError
from slack_server import (
    CHANNEL,
    CHANNEL_ID,
    TOKEN,
    SlackServer,
    cut,
    held,
    rate_limited,
    refusing,
    slack_server,
    unavailable,
)
from waiting import HANG_S, wait_until

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.logging import SlackConfig
from megatron_fleet.telemetry import slack
from megatron_fleet.telemetry.chart_png import chart_png
from megatron_fleet.telemetry.charts import Chart, Series
from megatron_fleet.telemetry.slack import Message, SlackThread, check_slack, escape

ENVIRON = {"SLACK_BOT_TOKEN": TOKEN}
FIRST = Message("run started", "text", lasting=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No pause is long, and the end of a run waits for whatever is to come."""
    monkeypatch.setattr(slack, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(slack, "LONGEST_PAUSE_S", 0.01)
    for name in ("ANSWER_S", "OPEN_S", "CLOSE_S"):
        monkeypatch.setattr(slack, name, int(HANG_S))


@pytest.fixture
def server():
    with slack_server() as running:
        yield running


def config(server: SlackServer, channel: str = CHANNEL) -> SlackConfig:
    return SlackConfig(channel=channel, url=server.url)


def thread(server: SlackServer, folder, channel: str = CHANNEL, environ=ENVIRON) -> SlackThread:
    return SlackThread(config(server, channel), environ, folder / "slack.json")


def picture() -> bytes:
    return chart_png("mine", Chart("Reward and pass@1", (Series("reward", ((1, 0.1), (2, 0.4))),), share=True))


def test_all_messages_of_all_attempts_are_in_one_thread(server, tmp_path):
    first = thread(server, tmp_path)
    first.open(FIRST)
    first.put(Message("evaluation", "pass@1 0.5", picture))
    first.put(Message("a <b> & c", escape("1 < 2 & <!channel>")))
    first.close()
    again = thread(server, tmp_path)
    again.open(Message("run resumed", "text"))
    again.close()
    head, evaluation, escaped, resumed = server.messages
    assert (head["channel"], head["thread_ts"]) == (CHANNEL_ID, None)
    assert {m["thread_ts"] for m in (evaluation, escaped, resumed)} == {head["ts"]}
    assert evaluation["text"] == "*evaluation*\npass@1 0.5"
    assert Image.open(io.BytesIO(evaluation["file"])).format == "PNG"
    assert escaped["text"] == "*a &lt;b&gt; &amp; c*\n1 &lt; 2 &amp; &lt;!channel&gt;"
    assert resumed["text"] == "*run resumed*\ntext"
    assert TOKEN not in (tmp_path / "slack.json").read_text()


def test_a_slack_in_this_network_is_asked_without_the_proxy_of_the_environment(server, tmp_path, monkeypatch):
    public = SlackConfig(channel=CHANNEL)
    with refusing_proxy() as asked:
        check_slack(config(server), ENVIRON)
        sent = thread(server, tmp_path)
        sent.open(FIRST)
        sent.close()
        assert slack._client(public, ENVIRON).proxy == os.environ["http_proxy"]
        monkeypatch.setenv("no_proxy", "slack.com")
        monkeypatch.setenv("NO_PROXY", "slack.com")
        assert slack._client(public, ENVIRON).proxy is None
    assert asked == [] and len(server.messages) == 1


def test_another_channel_or_a_removed_thread_begins_a_new_one(server, tmp_path):
    server.channels |= dict.fromkeys(("#other", "C0OTHER0001"), "C0OTHER0001")
    for channel in (CHANNEL, "#other"):
        began = thread(server, tmp_path, channel)
        began.open(FIRST)
        began.close()
    assert [m["channel"] for m in server.messages] == [CHANNEL_ID, "C0OTHER0001"]
    server.messages.clear()
    later = thread(server, tmp_path, "#other")
    later.open(FIRST)
    later.close()
    assert [m["thread_ts"] for m in server.messages] == [None]
    (tmp_path / "slack.json").write_text("{")
    after = thread(server, tmp_path, "#other")
    after.open(FIRST)
    after.close()
    assert json.loads((tmp_path / "slack.json").read_text())["thread_ts"] == server.messages[1]["ts"]


@pytest.mark.parametrize("fault", [rate_limited("0"), unavailable, cut, refusing("internal_error")])
def test_what_may_succeed_later_is_sent_again(server, tmp_path, fault):
    messages = thread(server, tmp_path)
    messages.open(FIRST)
    server.faults.extend([fault, fault, fault])
    messages.put(Message("a", "b"))
    messages.put(Message("curve", "c", picture))
    messages.close()
    assert [m["text"] for m in server.messages[1:]] == ["*a*\nb", "*curve*\nc"]
    assert "file" in server.messages[2]


def test_a_run_starts_while_slack_is_down_and_its_messages_arrive_later(tmp_path):
    with held_ports(1) as (port,):
        down = SlackServer(url=f"http://127.0.0.1:{port}/api/")
        check_slack(config(down), ENVIRON)
        messages = thread(down, tmp_path)
        messages.open(FIRST)
        messages.put(Message("later", "text"))
        with slack_server(port) as server:
            messages.close()
            assert server.texts() == ["*run started*\ntext", "*later*\ntext"]


def test_messages_that_wait_are_bounded_and_the_lasting_ones_stay(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(slack, "MAX_WAITING", 5)
    messages, answers = thread(server, tmp_path), threading.Event()
    messages.open(FIRST)
    server.faults.append(held(answers))
    messages.put(Message("under way", "text"))
    wait_until(lambda: len(server.methods) == 2)
    messages.put(Message("evaluation", "text", lasting=True))
    for number in range(500):  # returns while Slack has not answered
        messages.put(Message(f"alert {number}", "text"))
    assert len(server.messages) == 1
    answers.set()
    with caplog.at_level(logging.WARNING):
        messages.close()
    titles = [text.split("*")[1] for text in server.texts()]
    assert titles == ["run started", "under way", "evaluation", *[f"alert {number}" for number in range(496, 500)]]
    assert "496 Slack messages could not be delivered" in caplog.text


def test_the_end_of_a_run_waits_neither_for_a_limit_nor_for_an_outage(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(slack, "FIRST_PAUSE_S", 10 * HANG_S)
    monkeypatch.setattr(slack, "LONGEST_PAUSE_S", 10 * HANG_S)
    for fault in (rate_limited(str(10 * HANG_S)), cut):
        messages = thread(server, tmp_path)
        messages.open(FIRST)
        server.faults.extend([fault] * 3)
        before = len(server.methods)
        messages.put(Message("a", "b"))
        wait_until(lambda before=before: len(server.methods) > before)
        messages.put(Message("completed", "b", lasting=True))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            messages.close()
        assert "2 Slack messages could not be delivered" in caplog.text
        # What the limit forbids is not tried; after an outage there is one more try.
        assert len(server.methods) - before == (2 if fault is cut else 1)
        server.faults.clear()


def test_an_app_that_may_not_upload_sends_the_text(server, tmp_path, caplog):
    messages = thread(server, tmp_path)
    messages.open(FIRST)
    server.faults.append(refusing("missing_scope"))
    for _ in range(2):
        messages.put(Message("evaluation", "pass@1 0.5", picture))
    messages.close()
    assert [("file" in m, m["text"]) for m in server.messages[1:]] == [(False, "*evaluation*\npass@1 0.5")] * 2
    assert caplog.text.count("Slack does not accept images (missing_scope)") == 1
    assert server.methods.count("files.getUploadURLExternal") == 1


def test_a_message_that_slack_refuses_is_left_out(server, tmp_path, caplog):
    messages = thread(server, tmp_path)
    messages.open(FIRST)
    server.faults.append(refusing("is_archived"))
    messages.put(Message("a", "b"))
    messages.put(Message("c", "d"))
    messages.close()
    assert server.texts() == ["*run started*\ntext", "*c*\nd"]
    assert "a message could not be sent to Slack (is_archived): a" in caplog.text


def test_a_wrong_channel_ends_the_run_before_anything_is_started(server, tmp_path):
    messages = thread(server, tmp_path, "#nowhere")
    with pytest.raises(UserError, match=r"logging\.slack\.channel=#nowhere: Slack refuses \(channel_not_found\); corr"):
        messages.open(FIRST)
    messages.put(Message("failed", "text"))
    messages.close()
    assert server.methods == ["chat.postMessage"]


def test_a_wrong_or_missing_token_is_one_sentence(server):
    check_slack(SlackConfig(), {})
    check_slack(config(server), ENVIRON)
    with pytest.raises(UserError, match=r"logging\.slack\.channel=#training-runs: there is no token; set SLACK_BOT_"):
        check_slack(config(server), {})
    with pytest.raises(UserError, match=r"Slack refuses \(invalid_auth\); set SLACK_BOT_TOKEN") as refused:
        check_slack(config(server), {"SLACK_BOT_TOKEN": "xoxb-wrong"})
    assert "xoxb-wrong" not in str(refused.value)
    server.scopes = "chat:write"
    with pytest.raises(UserError, match=r"lacks the scope files:write; add it at"):
        check_slack(config(server), ENVIRON)
    server.faults.extend([unavailable])
    check_slack(config(server), ENVIRON)
    assert server.methods == ["auth.test"] * 4


def test_slack_says_how_long_to_wait():
    response = SimpleNamespace(status_code=429, headers={"retry-after": "7"}, get={"error": "ratelimited"}.get)
    assert slack._seconds_to_retry(SlackApiError("refused", response), 1.0) == 7.0


def test_no_secret_is_in_a_message(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdef123456")
    messages = thread(server, tmp_path)
    messages.open(FIRST)
    messages.put(Message("it is abcdef123456", "and abcdef123456"))
    messages.close()
    assert server.texts()[1] == "*it is [SOME_API_KEY]*\nand [SOME_API_KEY]"
