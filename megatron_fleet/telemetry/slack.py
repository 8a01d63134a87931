"""Thread of messages in a Slack channel, one per run.

A thread of this process sends them one after the other. A slow Slack, a rate limit or an outage delays messages, never
the run; messages that Slack refuses are left out with a warning.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.network import go_direct, proxy_of
from megatron_fleet.config.secrets import SLACK_TOKEN, redacted
from megatron_fleet.storage.local import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slack_sdk import WebClient

    from megatron_fleet.config.sections.logging import SlackConfig

log = logging.getLogger(__name__)

THREAD = "slack.json"
"""File in ``run.out`` with the thread of the run, in which later attempts go on."""
ANSWER_S = 10
"""Seconds for one answer of Slack."""
OPEN_S = 10.0
"""Maximum wait for the answer to the first message; after that the run starts without it."""
CLOSE_S = 15.0
"""Maximum wait at the end of a run for messages that are not sent yet."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before a message is sent again when Slack does not answer; it doubles each time."""
MAX_WAITING = 100
SCOPES = ("chat:write", "files:write")
HEADER_CHARACTERS, TEXT_CHARACTERS = 150, 3000
"""Slack's limits on the texts of blocks."""
_TRANSIENT = ("ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout")
_NO_THREAD = ("cannot_reply_to_message", "invalid_thread_ts", "restricted_action_thread_locked", "thread_not_found")
_TOKEN_REMEDY = f"set {SLACK_TOKEN} to the bot token (xoxb-…) of an app in this workspace"
_REMEDIES = {
    "channel_not_found": "correct the name or id, and invite the app to the channel if it is private",
    "not_in_channel": "invite the app to the channel, or give it the scope chat:write.public",
    "is_archived": "name another channel",
    "missing_scope": f"give the app the scopes {' and '.join(SCOPES)}, and install it again",
    **dict.fromkeys(
        ("invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "not_allowed_token_type"),
        _TOKEN_REMEDY,
    ),
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        title: plain text.
        text: in Slack's markup; see `escape`.
        draw: returns a PNG image that belongs to the text.
        lasting: is not left out when too many messages wait.
    """

    title: str
    text: str
    draw: Callable[[], bytes] | None = None
    lasting: bool = False


def escape(text: str) -> str:
    """Escape what Slack's markup would take for a mention or a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def check_slack(config: SlackConfig, environ: Mapping[str, str]) -> None:
    """Check the token and its scopes with Slack; an outage of Slack is only a warning.

    Raises:
        UserError: there is no token, or Slack refuses it.
    """
    if config.channel is None:
        return
    client = _client(config, environ)
    try:
        scopes = client.auth_test().headers
    except Exception as error:
        if _seconds_to_retry(error, 0.0) is None:
            raise _refusal(config.channel, error) from None
        log.warning("Slack does not answer (%s); the run starts anyway, and its messages wait", _said(error))
        return
    granted = next((value for name, value in scopes.items() if name.lower() == "x-oauth-scopes"), None)
    missing = [] if granted is None else [scope for scope in SCOPES if scope not in granted.replace(" ", "").split(",")]
    if missing:
        raise UserError(
            f"logging.slack.channel={config.channel}: the app of {SLACK_TOKEN} lacks the scope "
            f"{' and '.join(missing)}; add it at api.slack.com/apps, and install the app again."
        )


@final
class SlackThread:
    """The run's thread. Its methods may be called from any thread, and do not wait unless they say so."""

    def __init__(self, config: SlackConfig, environ: Mapping[str, str], file: Path) -> None:
        """Args: ``file``: keeps where the thread is; the thread that it names goes on.

        Raises:
            UserError: there is no token, or the package slack_sdk is missing.
        """
        assert config.channel is not None
        self._client, self._channel, self._file = _client(config, environ), config.channel, file
        self._place: tuple[str, str] | None = None
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._hurried = self._unanswered = self._pictures_refused = False
        self._left_out = 0
        self._answered = threading.Event()
        self._refused: Exception | None = None
        self._sender = threading.Thread(target=self._send_all, name="slack", daemon=True)

    def open(self, first: Message) -> None:
        """Send the first message of this attempt and wait for the answer, at most ``OPEN_S``.

        Raises:
            UserError: Slack refuses it, for example because there is no such channel.
        """
        self.put(first)
        self._answered.wait(OPEN_S)
        if self._refused is not None:
            raise _refusal(self._channel, self._refused)

    def put(self, message: Message) -> None:
        """Send a message after those before. When too many wait, the oldest one that is not lasting is left out."""
        with self._changed:
            if self._refused is not None:
                return
            if not self._sender.is_alive() and self._closing_at is None:
                self._sender.start()
            self._messages.append(message)
            if len(self._messages) > MAX_WAITING:
                passing = next((m for m in self._messages if not m.lasting), self._messages[0])
                self._messages.remove(passing)
                self._left_out += 1
            self._changed.notify()

    def close(self) -> None:
        """Wait until all messages are sent, at most ``CLOSE_S``. Idempotent."""
        with self._changed:
            self._closing_at = self._closing_at or time.monotonic() + CLOSE_S
            self._changed.notify()
        if self._sender.is_alive() and self._refused is None:
            self._sender.join(CLOSE_S)
            left = len(self._messages) + self._sender.is_alive()
            if left + self._left_out:
                log.warning(
                    "%d Slack messages could not be delivered; metrics.jsonl has everything", left + self._left_out
                )
                self._left_out = 0

    def _send_all(self) -> None:
        self._place = self._read()  # only now: a checkpoint from elsewhere may have brought the file
        while (message := self._next()) is not None:
            if not self._deliver(message):
                with self._changed:
                    self._messages.appendleft(message)
                return

    def _next(self) -> Message | None:
        """Wait for a message; ``None``: there will be none."""
        with self._changed:
            while not self._messages:
                if self._closing_at is not None:
                    return None
                self._changed.wait()
            return self._messages.popleft()

    def _deliver(self, message: Message) -> bool:
        """Send until Slack has accepted or refused; ``False``: time is over."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                self._send(message)
                self._unanswered = False
                self._answered.set()
                return True
            except Exception as error:
                wait = _seconds_to_retry(error, pause)
                if wait is None:
                    self._refuse(message, error)
                    return True
                hurry = not _rate_limited(error)
                if not self._unanswered:
                    log.warning("Slack does not answer (%s); messages wait", _said(error))
                    self._unanswered = True
            self._answered.set()
            pause = min(2 * pause, LONGEST_PAUSE_S)
            if not self._pause(wait, hurry):
                return False

    def _refuse(self, message: Message, error: Exception) -> None:
        if not self._answered.is_set():
            self._refused = error
            self._answered.set()
        else:
            log.warning("a message could not be sent to Slack (%s): %s", _said(error), message.title)

    def _pause(self, seconds: float, hurry: bool) -> bool:
        """Wait; ``hurry``: once only until the run ends. Returns whether there is time to send again."""
        end = time.monotonic() + seconds
        with self._changed:
            while (now := time.monotonic()) < end:
                if self._closing_at is not None:
                    if hurry and not self._hurried:
                        self._hurried = True
                        return True
                    if end > self._closing_at:
                        return False
                self._changed.wait(end - now)
        return True

    def _send(self, message: Message) -> None:
        title, text = redacted(message.title), redacted(message.text)
        whole = f"*{escape(title)}*\n{text}"
        if message.draw is not None and self._place is not None and self._upload(message.draw, whole, self._place):
            return
        if self._place is not None:
            try:
                self._post(whole, [_section(whole)], *self._place)
                return
            except Exception as error:
                if _code(error) not in _NO_THREAD:
                    raise
        # The first message of the run, or its thread was removed.
        header = {"type": "header", "text": {"type": "plain_text", "text": title[:HEADER_CHARACTERS]}}
        self._keep(*self._post(whole, [header, _section(text)], self._channel, None))

    def _post(self, text: str, blocks: list[dict[str, Any]], channel: str, parent: str | None) -> tuple[str, str]:
        """Send a message, and return its channel's id and its time stamp."""
        posted = self._client.chat_postMessage(
            channel=channel,
            thread_ts=parent,
            text=text[:TEXT_CHARACTERS],
            blocks=blocks,
            unfurl_links=False,
            unfurl_media=False,
        )
        return str(posted["channel"]), str(posted["ts"])

    def _upload(self, draw: Callable[[], bytes], comment: str, place: tuple[str, str]) -> bool:
        """Send an image with a text. Returns ``False`` when Slack does not want it: then the text alone is sent."""
        if self._pictures_refused:
            return False
        try:
            self._client.files_upload_v2(
                content=draw(),
                filename="curve.png",
                title="Learning curve",
                alt_txt="Learning curve",
                channel=place[0],
                thread_ts=place[1],
                initial_comment=comment[:TEXT_CHARACTERS],
            )
        except Exception as error:
            if _seconds_to_retry(error, 0.0) is not None:
                raise
            self._pictures_refused = True
            log.warning("Slack does not accept images (%s); messages are sent without", _said(error))
            return False
        return True

    def _read(self) -> tuple[str, str] | None:
        if not self._file.exists():
            return None
        try:
            found = read_object(self._file, "remove it; the run then starts a new thread")
        except UserError as error:
            log.warning("%s", error)
            return None
        channel, parent = found.get("channel_id"), found.get("thread_ts")
        if found.get("channel") == self._channel and isinstance(channel, str) and isinstance(parent, str):
            return channel, parent
        return None

    def _keep(self, channel: str, parent: str) -> None:
        self._place = channel, parent
        content = {"channel": self._channel, "channel_id": channel, "thread_ts": parent}
        try:
            write_atomically(self._file, (json.dumps(content) + "\n").encode())
        except (UserError, OSError) as error:
            log.warning("the next attempt will start another thread in Slack: %s", error)


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:TEXT_CHARACTERS]}}


def _client(config: SlackConfig, environ: Mapping[str, str]) -> WebClient:
    token = environ.get(SLACK_TOKEN, "").strip()
    if not token:
        raise UserError(
            f"logging.slack.channel={config.channel}: there is no token; {_TOKEN_REMEDY}, or remove the channel."
        )
    try:
        from slack_sdk import WebClient
    except ImportError:
        raise UserError(
            "logging.slack.channel needs the package slack_sdk; pip install slack_sdk, or remove it."
        ) from None
    quiet = logging.getLogger(f"{__name__}.client")
    quiet.setLevel(logging.CRITICAL)  # what it would log is said here
    client = WebClient(token, base_url=config.url, timeout=ANSWER_S, retry_handlers=[], logger=quiet)
    if go_direct(config.url) or proxy_of(config.url) is None:
        client.proxy = None  # it takes the environment's, whatever no_proxy says
    return client


def _code(error: Exception) -> str | None:
    """Slack's name for an error; ``None``: it is not one of Slack's."""
    response = getattr(error, "response", None)
    code = response.get("error") if response is not None else None
    return code if isinstance(code, str) else None


def _said(error: Exception) -> str:
    """Describe an error in a few words, without secrets."""
    return redacted(_code(error) or str(error) or type(error).__name__)


def _rate_limited(error: Exception) -> bool:
    return getattr(getattr(error, "response", None), "status_code", None) == 429


def _seconds_to_retry(error: Exception, pause: float) -> float | None:
    """Seconds until the same request may succeed: what Slack says, else ``pause``; ``None``: it will not."""
    response = getattr(error, "response", None)
    if response is None:
        return pause if isinstance(error, OSError | HTTPException) else None
    if _rate_limited(error):
        headers = {name.lower(): value for name, value in response.headers.items()}
        try:
            return max(float(headers.get("retry-after", pause)), 0.0)
        except ValueError:
            return pause
    return pause if response.status_code >= 500 or _code(error) in _TRANSIENT else None


def _refusal(channel: str, error: Exception) -> UserError:
    remedy = _REMEDIES.get(_code(error) or "", f"correct it, or {SLACK_TOKEN}, or remove it")
    return UserError(f"logging.slack.channel={channel}: Slack refuses ({_said(error)}); {remedy}.")
