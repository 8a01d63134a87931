"""Of services that metrics are sent to."""

from __future__ import annotations

import re

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


def _mlflow(c: Config) -> str | None:
    uri = c.logging.mlflow.uri
    if uri is None or re.fullmatch(r"https?://[^@]+|sqlite:///.+", uri):
        return None
    if "@" in uri:
        return (
            "logging.mlflow.uri holds a user or a password, which would be written to files; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead."
        )
    return f"logging.mlflow.uri={uri} is no tracking server; write http://host:port, https://host or sqlite:///FILE."


RULES: tuple[Rule, ...] = (_mlflow,)
