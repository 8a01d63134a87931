"""Environment servers while the shell names a proxy, as on many clusters: those nearby are played, others name it."""

import pytest

pytest.importorskip("openenv")

from openenv.core.env_server import create_app
from refusing_proxy import refusing_proxy
from tool_servers import Action, Counter, Observation, opened, serving

from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvLost
from megatron_fleet.envs.registry import no_answer

TASK = Task(key="k", prompt="p", env_key="e")


@pytest.mark.parametrize("interface", ["mcp", "action"])
async def test_a_server_on_this_host_is_played(monkeypatch, interface):
    with serving({"counter": create_app(Counter, Action, Observation)}) as urls, refusing_proxy() as asked:
        assert no_answer(urls["counter"], 10) is None
        environment, shown = await opened(urls["counter"], TASK, interface=interface)
        assert shown.tools
        await environment.close()
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")  # for which httpx lacks a package
        environment, _ = await opened(urls["counter"], TASK, interface=interface)
        await environment.close()
    assert asked == []


@pytest.mark.parametrize("status", [403, 502])
async def test_a_server_behind_the_proxy_names_it(status):
    url = "http://env.example.org:8000"
    with refusing_proxy(status) as asked:
        said = no_answer(url, 10)
        assert said.startswith(f"{url} answers {status} ") and " through the proxy http://127.0.0.1:" in said
        with pytest.raises(EnvLost, match=r"through the proxy http://127\.0\.0\.1:\d+ of the environment"):
            await opened(url, TASK)
        assert len(asked) == 2 and "secret" not in said
