"""Proxies of the environment: which servers are reached without them, and how they are named."""

import os

import pytest
from refusing_proxy import VARIABLES

from megatron_fleet.config.network import go_direct, proxy_of, through_proxy


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (*VARIABLES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "intranet.example.org, .example.com")
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "")


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.9.9.9", "[::1]", "10.2.3.4", "172.16.0.9", "192.168.1.2", "169.254.169.254",
     "[fd00::1]", "env-server", "env.default.svc", "a.b.svc.cluster.local", "metadata.google.internal", "x.localhost"],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_servers_nearby_need_no_proxy(host, scheme):
    url = f"{scheme}://{host}:8000/v1"
    assert go_direct(url) and go_direct(url)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    excepted = os.environ["no_proxy"].split(",")
    assert excepted[:2] == ["intranet.example.org", ".example.com"] and excepted.count(host.strip("[]")) == 1
    if ":" not in host:  # urllib compares addresses of IPv6 with their brackets, httpx without
        assert proxy_of(url) is None and through_proxy(url) == ""


@pytest.mark.parametrize("host", ["8.8.8.8", "env.example.org", "127.0.0.1.example.org", "[2606:4700::1]", ""])
def test_others_keep_the_proxy_which_is_named_without_its_password(host):
    url = f"http://{host}:8000"
    assert not go_direct(url) and os.environ["NO_PROXY"] == ""
    if host:
        assert proxy_of(url) == "http://proxy:3128"
        assert through_proxy(url).startswith(" through the proxy http://proxy:3128 of the environment; ")


def test_without_a_proxy_the_environment_stays_as_it_is(monkeypatch):
    assert proxy_of("https://env.example.org") is None and proxy_of("http://a.example.com") is None
    monkeypatch.delenv("http_proxy")
    before = dict(os.environ)
    assert go_direct("http://localhost:1") and os.environ == before
    monkeypatch.setenv("all_proxy", "socks5://proxy:1080")
    assert proxy_of("wss://env.example.org") == "socks5://proxy:1080"
