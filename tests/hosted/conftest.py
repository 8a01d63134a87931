from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tinker_service import BASE_MODEL, KEY, Client, running

pytest.importorskip("tinker")

from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config

# A session whose service was killed warns for minutes, also during the tests that follow in this process.
logging.getLogger("tinker").propagate = False


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> Iterator[Callable[..., Client]]:
    """Gives a service with these options that knows nothing: to start one takes longer than most tests."""
    with ExitStack() as stack:
        started: dict[tuple[str, ...], Client] = {}

        def empty(*options: str) -> Client:
            client = started.get(options)
            if client is None or not client.usable():
                client = stack.enter_context(running(tmp_path_factory.mktemp("service"), *options))
                started[options] = client
            return client

        yield empty


@pytest.fixture
def service(services, request) -> Client:
    """The service of a test; its options may be given by indirect parametrisation."""
    return services(*getattr(request, "param", ()))


@pytest.fixture
def make_config(tmp_path, service):
    """Configuration of a hosted run; arguments are overrides."""

    (tmp_path / "out").mkdir(exist_ok=True)

    def made(*overrides: str) -> Config:
        return load(
            [
                *("experiment=quickstart", "trainer=hosted", f"hosted.url={service.url}"),
                *(f"hosted.base_model={BASE_MODEL}", f"run.out={tmp_path / 'out'}", *overrides),
            ]
        )

    return made
