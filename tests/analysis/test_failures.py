"""The error taxonomy: each rule finds its case and leaves its neighbours alone."""

import pytest
from run_maker import episode

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.analysis.failures import CATEGORIES, by_category, failures, tool_errors


def with_results(*texts: str, **fields):
    return episode(messages=tuple(("tool", text) for text in texts), **fields)


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("Error (invalid_args): source is target", "arguments"),
        ("Error (tool_not_found): no tool update_ticket", "unknown_tool"),
        ("Error (timeout): 30 s", "timeout"),
        ("Error (execution_error): A57 belongs to Vera", "other_tool_error"),
        ("Error (execution_error): no booking B75", "not_found"),
        ("Error (execution_error): Permission denied for user 7", "authorisation"),
        ("Error: HTTP 404", "not_found"),
        ("error: 403 Forbidden", "authorisation"),
        ("Error (execution_error): missing parameter 'owner'", "arguments"),
        ("Error (execution_error): the backend timed out", "timeout"),
        ('{"error": "repo_id does not exist"}', "not_found"),
        ("You did this before.\nError (execution_error): A1 is frozen", "other_tool_error"),
        ("Error (transport_error): the server went away", "server"),
        ("Error executing tool get_user: not found", "not_found"),
        ("Error 404: nothing here", "not_found"),
        ("ValueError: invalid literal for int() with base 10: 'abc'", "arguments"),
        ('{"error": {"code": "NOT_FOUND"}}', "not_found"),
        ('{"error": {"code": "invalid_request"}}', "arguments"),
    ],
)
def test_tool_errors_are_told_apart(text, category):
    assert [name for name, _ in tool_errors(with_results(text))] == [category]
    assert set(failures(with_results(text))) == {category}


SAID = {
    "arguments": (
        "2 validation errors for call[create_issue]",
        "Input validation error: 'repo_id' is a required property",
        "Extra inputs are not permitted",
        "Input should be a valid string [type=string_type]",
        "MCP error -32602: Invalid params",
        "unexpected keyword argument 'foo'",
        "missing 1 required positional argument: 'id'",
        "repo_id: value is not a valid integer",
        "expected str, got int",
        'syntax error at or near "FORM"',
        "Invalid status 'opn'. Valid: open, closed",
        "amount must be positive",
        "Issue #404 could not be closed: validation failed",
        "Request failed with status code 422",
    ),
    "authorisation": (
        "HTTP 401 Unauthorized",
        "You do not have access to this repository",
        "You don't have permission to edit",
        "insufficient privileges for relation users",
        "Authentication required",
        "Not logged in",
        "session expired",
        "Only the owner can delete",
    ),
    "not_found": (
        'relation "foo" does not exist',
        "Could not find user bob",
        "Couldn't find flight",
        "No results",
        "No booking with id 7",
        "no user named Bob",
        "Client error '404 Not Found' for url 'x'",
    ),
    "unknown_tool": ("MCP error -32601: Method not found", "Unknown tool: foo", "Tool 'foo' not found"),
    "timeout": ("Request timed out after 30 s", "ReadTimeout"),
    "server": (
        "database is locked",
        "Rate limit exceeded (429)",
        "500 Internal Server Error",
        "Request failed with status code 503",
    ),
    "other_tool_error": (
        "order 400 already shipped",
        "room 404 is booked",
        "no room R90 is free",
        "Meeting room 401 is not available",
        "The card is no longer available",
    ),
}
"""Real messages of validators, servers, databases and web services."""


@pytest.mark.parametrize(("category", "message"), [(key, text) for key, texts in SAID.items() for text in texts])
def test_real_messages_are_told_apart(category, message):
    found = tool_errors(with_results(f"Error (execution_error): {message}"))
    assert found == [(category, message)]


def test_what_a_long_message_quotes_does_not_decide():
    found = tool_errors(with_results("Error (execution_error): sold out\n" + "x" * 600 + " HTTP 404"))
    assert [category for category, _ in found] == ["other_tool_error"]


@pytest.mark.parametrize(
    "text",
    [
        '{"error": null, "rows": []}',
        "errors: none",
        "0 results: not found",
        "Errors were fixed",
        "{broken",
        "",
        "Error handling guide\nUse try",
        "log:\nError (404): an old one",
        "Terror: a history",
    ],
)
def test_a_result_that_merely_speaks_of_errors_is_none(text):
    assert tool_errors(with_results(text)) == []


def test_what_the_policy_says_is_no_tool_error():
    assert failures(episode(messages=(("assistant", "Error (timeout): it said"),))) == {}


@pytest.mark.parametrize(
    ("outcome", "category"),
    [
        (Outcome.TIMEOUT, "timeout"),
        (Outcome.CONTEXT_OVERFLOW, "context_overflow"),
        (Outcome.PROMPT_TOO_LONG, "context_overflow"),
        (Outcome.GENERATION_TRUNCATED, "truncated"),
        (Outcome.MAX_TURNS, "max_turns"),
        (Outcome.NO_ACTION, "no_action"),
        (Outcome.ENV_FAILED, "environment"),
        (Outcome.ABORTED, "environment"),
        (Outcome.VERIFIER_FAILED, "verifier"),
    ],
)
def test_outcomes(outcome, category):
    assert set(failures(episode(outcome=outcome, reward=None))) == {category}


def test_every_outcome_but_completed_is_somewhere():
    assert [o for o in Outcome if not failures(episode(outcome=o, reward=None))] == [Outcome.COMPLETED]


def test_false_completion_needs_a_known_reward():
    assert set(failures(episode(reward=0.0))) == {"false_completion"}
    assert set(failures(episode(reward=-1.0))) == {"false_completion"}
    assert failures(episode(reward=None)) == {}
    assert failures(episode(reward=0.5, solved=True)) == {}
    assert "false_completion" not in failures(episode(reward=0.0, outcome=Outcome.MAX_TURNS))


def test_a_loop_is_the_same_action_three_times_whatever_was_thought():
    def said(*texts):
        return episode(messages=tuple(("assistant", t) for t in texts))

    call = '<tool_call>{"name": "x"}</tool_call>'
    assert "loop" in failures(said(*(f"<think>{i}</think>{call}" for i in range(3))))
    assert "loop" not in failures(said(call, call, "other"))
    assert "loop" not in failures(said(*("<think>the same</think>",) * 5))


def test_parse_errors_come_from_the_metrics():
    assert set(failures(episode(metrics={"parse_errors": 2.0}))) == {"parse_error"}
    assert failures(episode(metrics={"parse_errors": 0.0})) == {}


def test_an_episode_counts_once_per_category():
    found = by_category([with_results("Error: 404", "Error: 404 again", reward=0.0)])
    assert {key: len(own) for key, own in found.items() if own} == {"not_found": 1, "false_completion": 1}
    assert found.keys() == {c.key for c in CATEGORIES}
