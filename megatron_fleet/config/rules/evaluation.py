"""Validation rules for `eval`."""

from __future__ import annotations

import re

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


def _overlap(c: Config) -> str | None:
    if c.eval.overlap and c.rollout.engine.colocated:
        return (
            "eval.overlap=true with rollout.engine.colocated=true: engines sleep while the trainer computes; set one "
            "of them to false."
        )
    return None


def _upload(c: Config) -> str | None:
    if c.eval.upload is None or re.fullmatch(r"s3://[^/]+(/.*)?", c.eval.upload):
        return None
    return f"eval.upload={c.eval.upload} is no address in an object store; write s3://bucket or s3://bucket/prefix."


RULES: tuple[Rule, ...] = (
    _overlap,
    _upload,
)
