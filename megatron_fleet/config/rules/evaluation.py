"""Validation rules for `eval`."""

from __future__ import annotations

import re

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json
from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config
from megatron_fleet.config.urls import url_problem


def _overlap(c: Config) -> str | None:
    if c.eval.overlap and c.rollout.engine.colocated:
        return (
            "eval.overlap=true with rollout.engine.colocated=true: engines sleep while the trainer computes; set one "
            "of them to false."
        )
    return None


def _upload(c: Config) -> str | None:
    if c.eval.upload is not None and "@" in c.eval.upload:
        return "eval.upload holds an @, as an address with a key does, which would be written to files; leave it out."
    if c.eval.upload is None or re.fullmatch(r"s3://[^/]+(/.*)?", c.eval.upload):
        return None
    return f"eval.upload={c.eval.upload} is no address in an object store; write s3://bucket or s3://bucket/prefix."


def _endpoint_url(c: Config) -> str | None:
    url, instead = c.eval.endpoint.url, "set the variable that eval.endpoint.api_key_env names instead"
    return None if url is None else url_problem("eval.endpoint.url", url, instead=instead)


def _endpoint_key(c: Config) -> str | None:
    name = c.eval.endpoint.api_key_env
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return None
    return f"eval.endpoint.api_key_env={name!r} is no name of an environment variable; write one, as OPENAI_API_KEY."


def _endpoint_extra_body(c: Config) -> str | None:
    body, where = c.eval.endpoint.extra_body, "eval.endpoint.extra_body"
    if body is None:
        return None
    try:
        added = parse_json(body.encode(), where, "correct it")
    except UserError as error:
        return str(error)
    return None if isinstance(added, dict) else f"{where} must be a JSON object, as {{}}; correct it."


RULES: tuple[Rule, ...] = (
    _overlap,
    _upload,
    _endpoint_url,
    _endpoint_key,
    _endpoint_extra_body,
)
