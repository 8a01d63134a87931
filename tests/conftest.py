"""Settings and fixtures for the tests of all folders."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from turns import left_out

# Any machine will do, however slow or busy: no example has a time limit. Every run has the same examples, so that a
# test that passed does not fail on another day; `--hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

LONGEST = (
    "e2e/test_whole_runs.py", "e2e/test_hosts_run.py", "e2e/test_launch_run.py", "e2e/test_kills.py",
    "e2e/test_expert_runs.py", "e2e/test_model_folders_run.py", "e2e/test_hosted_equals_native.py",
    "e2e/test_hosted_runs.py", "rollout/test_service.py", "hosted/test_hosted_trainer.py",
    "rollout/test_running_engines.py", "loop/test_guard_ranks.py", "weight_sync/test_families_updated.py",
    "parity/test_parity.py", "weights/test_families.py", "e2e/test_faults_run.py", "e2e/test_export_run.py",
    "rollout/test_start.py", "fuzz/test_fuzz.py", "cli/test_eval_command.py", "launch/test_launch_scripts.py",
    "rollout/test_owner.py", "evaluation/test_endpoint_eval.py", "convert/test_convert_kill.py",
    "trainer/test_layouts.py", "loop/test_interruptions.py", "trainer/test_lora.py", "trainer/test_overlap.py",
    "loop/test_colocation_ranks.py", "trainer/test_group.py", "weight_sync/test_passthrough.py",
    "benchmarks/test_scripts.py", "benchmarks/test_gpu_parts.py",
)  # fmt: skip
"""These files run first, so that none of them is left for the end of a run in several processes."""

TESTS = Path(__file__).parent
MANY_THREADS = 12
"""More new ones since the last collection of garbage are those of Megatron's groups. A trained model has 16 groups of
three threads, one of which wakes a hundred times a second; they belong to cycles of references when it is closed.
Hundreds take a third of a core from all later tests."""

gc.disable()  # until the test files have been imported: importing them takes a third less time without it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the tests marked nightly")
    parser.addoption("--turn", metavar="KEY", help="run some of those and of the marked in_turn, chosen by KEY")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = {id(item) for item in left_out(items, config.getoption("--nightly"), config.getoption("--turn"))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
    items[:] = [item for item in items if id(item) not in others]
    rank = {TESTS / file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Freeze the imported modules: every full garbage collection would spend a second on their million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """End the S3 server of this process: pytest-xdist may kill the process before its exit functions have run."""
    if "s3_server" in sys.modules:
        sys.modules["s3_server"].end_shared()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind prints objects that remain at exit as leaks


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """The variants that tests of this file will be played with; others need not be made.

    Called with names of parameters: their values, those of several names as tuples, each once and in order.
    """

    def values(*names: str) -> list[Any]:
        found = [
            tuple(item.callspec.params[name] for name in names)
            for item in request.session.items
            if item.path == request.path and hasattr(item, "callspec") and item.callspec.params.keys() >= set(names)
        ]
        return [value[0] if len(names) == 1 else value for value in dict.fromkeys(found)]

    return values


@pytest.fixture(scope="session")
def episode_python() -> Path:
    """Interpreter of the episode environment, as a run finds it."""
    from megatron_fleet.cluster.launcher import episode_python as find
    from megatron_fleet.config.errors import UserError

    try:
        return find()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def threads_left() -> list[int]:
    """One item: how many threads the last collection has left."""
    return [0]


@pytest.fixture(scope="module", autouse=True)
def _remaining_objects_are_frozen() -> Iterator[None]:
    """Keep later garbage collections from traversing what remains after a test file: imported modules and caches."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def groups_of_closed_models(threads_left: list[int]) -> Iterator[None]:
    """They are freed soon after the test that made them."""
    yield
    if "torch" in sys.modules and len(os.listdir("/proc/self/task")) > threads_left[0] + MANY_THREADS:
        gc.collect()
        threads_left[0] = len(os.listdir("/proc/self/task"))
