"""Metrics of the sampler: every name is registered."""

import pytest

pytest.importorskip("torch")

from megatron_fleet.config.sections.data import CurriculumConfig, MixtureConfig
from megatron_fleet.data.sampler import make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.telemetry import registry
from megatron_fleet.telemetry.metrics import data_metrics

TASKS = [Task(f"{env}{i}", "p", env, "v") for env in ("shop", "a/b") for i in range(3)]
PLAIN = {"mix_total", "weight", "epoch"}


@pytest.mark.parametrize(
    ("curriculum", "names"),
    [
        (CurriculumConfig(), PLAIN),
        (CurriculumConfig(signal_weights=True, defer_after=1), PLAIN | {"signal", "reward", "deferred"}),
    ],
)
def test_names(curriculum, names):
    sampler = make_sampler(TASKS, 4, 0, MixtureConfig(curriculum=curriculum))
    sampler.observe((task.key, [0.0, 1.0]) for task in sampler.next())
    metrics = data_metrics(sampler.status())
    assert set(metrics) == {f"data/{name}/{env}" for name in names for env in ("shop", "a_b")}
    assert {name for name in metrics if registry.find(name) is None} == set()
    assert metrics["data/mix_total/shop"] + metrics["data/mix_total/a_b"] == pytest.approx(1)
    assert metrics["data/weight/a_b"] == pytest.approx(0.5)


def test_an_environment_that_was_not_measured_has_no_reward():
    sampler = make_sampler(TASKS, 4, 0, MixtureConfig(curriculum=CurriculumConfig(signal_weights=True)))
    sampler.observe([(task.key, [1.0]) for task in sampler.next()])
    metrics = data_metrics(sampler.status())
    assert metrics["data/signal/shop"] == 1
    assert "data/reward/shop" not in metrics
