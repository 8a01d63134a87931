"""Explanations of refused arguments, by schemas of servers that may mean harm."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megatron_fleet.envs.explanation import MAX_ARGUMENTS_CHARS, MAX_CHARS, MAX_SCHEMA_CHARS, UNEXPLAINED, explain
from megatron_fleet.envs.openenv_tools import openai_tool

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
SLOW = "^(a+)+$"
TEXT = "a" * 20 + "b"


def explained(schema, **arguments):
    return explain(openai_tool("f", None, {"type": "object", **schema}), arguments)


def doubled(depth):
    """A schema of ``depth`` definitions that is as large as two to the power of it when written out."""
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    parts[f"d{depth}"] = {"required": ["b"]}
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def test_what_is_wrong_is_named():
    kinds = {"n": {"type": "integer"}, "inner": {"$ref": "#/$defs/inner"}, "word": {"enum": ["up", "down"]}}
    schema = {"properties": kinds, "required": ["n"], "additionalProperties": False}
    schema["$defs"] = {"inner": {"properties": {"x": {"type": "number", "minimum": 2}}}}
    assert explained(schema) == "'n' is a required property"
    assert explained(schema, n="1") == "n: '1' is not of type 'integer'"
    assert explained(schema, n=1, inner={"x": 1}) == "inner.x: 1 is less than the minimum of 2"
    assert explained(schema, n=1, word="left") == "word: 'left' is not one of ['up', 'down']"
    assert "'more' was unexpected" in explained(schema, n=1, more=1)
    assert explained(schema, n=1) == UNEXPLAINED


def test_no_address_in_a_schema_is_fetched():
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = json.dumps({"type": "integer"}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            for schema in (
                {"properties": {"q": {"$ref": f"{url}/ref"}}},
                {"properties": {"q": {"$dynamicRef": f"{url}/dynamic"}}},
                {"properties": {"q": {"$schema": DRAFT_7, "allOf": [{"$ref": f"{url}/nested"}]}}},
                {"$id": f"{url}/base", "properties": {"q": {"$ref": "other"}}},
            ):
                assert explained(schema, q="x") == UNEXPLAINED
        finally:
            server.shutdown()
            thread.join()
    assert asked == []


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"q": {"pattern": SLOW}}},
        {"properties": {"q": {"$schema": DRAFT_7, "pattern": SLOW}}},
        {"patternProperties": {SLOW: False}, "additionalProperties": False},
        {"patternProperties": {SLOW: {}}, "unevaluatedProperties": False},
        {"propertyNames": {"pattern": SLOW}},
        {"$schema": DRAFT_7, "properties": {"q": {"pattern": SLOW}}},
    ],
)
def test_no_pattern_is_tried(schema):
    assert explained(schema, **{"q": TEXT, TEXT: 1}) == UNEXPLAINED


def test_the_work_is_bounded():
    assert explained(doubled(3), a=1) == "'b' is a required property"
    assert explained(doubled(12), a=1) == UNEXPLAINED
    assert explained({"$ref": "#"}, a=1) == UNEXPLAINED
    assert explained({"required": ["b"]}, a="x" * MAX_ARGUMENTS_CHARS) == UNEXPLAINED
    assert explained({"required": ["b"], "title": "x" * MAX_SCHEMA_CHARS}, a=1) == UNEXPLAINED
    assert len(explained({"properties": {"a": {"type": "integer"}}}, a="x" * 5000)) == MAX_CHARS


@pytest.mark.parametrize("schema", [{"type": 3}, {"required": 3}, {"allOf": {"a": 1}}, {"$ref": "#/$defs/none"}])
def test_a_broken_schema_explains_nothing(schema):
    assert explained(schema, a=1) == UNEXPLAINED
