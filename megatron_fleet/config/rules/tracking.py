"""Validation rules for the trackers in `logging`."""

from __future__ import annotations

import re

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config
from megatron_fleet.config.urls import url_problem


def _mlflow(c: Config) -> str | None:
    uri = c.logging.mlflow.uri
    if uri is None or re.fullmatch(r"sqlite:///.+", uri):
        return None
    instead = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    problem = url_problem("logging.mlflow.uri", uri, instead=instead)
    return None if problem is None else problem.replace("; write ", "; write sqlite:///FILE, ")


RULES: tuple[Rule, ...] = (_mlflow,)
