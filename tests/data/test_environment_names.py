"""Names of environments in task files become parts of metric and file names unchanged."""

import posixpath
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fleet.config.files import environment_name
from megatron_fleet.data.rows import parse_row
from megatron_fleet.telemetry.registry import METRICS, WILDCARDS

NAMES = [re.sub(r"\{(?!env\})\w+\}", "1", metric.pattern) for metric in METRICS if "{env}" in metric.pattern]
names = st.text(st.sampled_from("./ :~-_a\\é\ud800") | st.characters(), max_size=12)


@given(names)
@example("..")
@example("...")
@example("../..")
@example(". .")
@example("a/../b")
def test_a_metric_name_has_the_environment_as_one_component(env_key):
    task, problems = parse_row({"key": "k", "prompt": "p", "env_key": env_key}, 1)
    if task is None:
        assert {problem.field for problem in problems} <= {"env_key", "env_key after the colon"}
        return
    name = environment_name(task.env_key)
    assert re.fullmatch(WILDCARDS["{env}"][0], name) and name not in (".", "..")
    assert name.encode().decode() == name and not name.isspace()
    for template in NAMES:
        made = template.replace("{env}", name)
        assert posixpath.normpath(made) == made
        assert made.split("/") == [part.replace("{env}", name) for part in template.split("/")]


@given(names)
def test_mlflow_takes_every_metric_name(env_key):
    validation = pytest.importorskip("mlflow.utils.validation")
    task, _ = parse_row({"key": "k", "prompt": "p", "env_key": env_key}, 1)
    if task is not None:
        for template in NAMES:
            validation._validate_metric_name(template.replace("{env}", environment_name(task.env_key)))


@pytest.mark.parametrize("env_key", [".", "..", "...", "." * 60])
def test_a_name_of_dots_is_refused(env_key):
    task, (problem,) = parse_row({"key": "k", "prompt": "p", "env_key": env_key}, 7)
    assert task is None and str(problem).startswith("task 7 (k): env_key: expected a name that is not only dots")
