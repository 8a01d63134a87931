"""Proxies of the environment (``http_proxy``, ``all_proxy``…); servers nearby are reached directly."""

from __future__ import annotations

import ipaddress
import os
import urllib.request
from urllib.parse import urlsplit

NEAR_SUFFIXES = (".localhost", ".local", ".internal", ".svc")
"""Ends of names that only this host or its network knows: RFC 6761 and 6762, clouds, Kubernetes."""


def go_direct(url: str) -> bool:
    """Return whether the server at ``url`` is on this host or in its network, and keep it out of all proxies.

    That is a private or loopback address, a name without a dot, or one with an end of ``NEAR_SUFFIXES``. Such a host is
    added to this process's ``no_proxy``, which HTTP, WebSocket and object store clients read when they connect.
    """
    host = urlsplit(url).hostname or ""
    if not _is_near(host):
        return False
    proxies = urllib.request.getproxies_environment()
    excepted = [name.strip() for name in proxies.pop("no", "").split(",") if name.strip()]
    if proxies and host not in excepted and "*" not in excepted:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*excepted, host])
    return True


def proxy_of(url: str) -> str | None:
    """Return the address of the environment's proxy for ``url``, without credentials; ``None`` if it has none."""
    asked = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(asked.scheme, asked.scheme)
    proxies = urllib.request.getproxies_environment()
    address = proxies.get(scheme) or proxies.get("all")
    if not address or not asked.hostname or urllib.request.proxy_bypass(asked.netloc):
        return None
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    try:
        port = proxy.port
    except ValueError:
        port = None
    return f"{proxy.scheme}://{proxy.hostname}" + (f":{port}" if port else "")


def through_proxy(url: str) -> str:
    """Return the end of a sentence about a failure at ``url`` that names the proxy on the way; empty without one."""
    proxy = proxy_of(url)
    if proxy is None:
        return ""
    host = urlsplit(url).hostname
    return f" through the proxy {proxy} of the environment; if it needs none, add {host} to no_proxy"


def _is_near(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.rstrip(".").lower()
        return bool(name) and ("." not in name or name.endswith(NEAR_SUFFIXES))
