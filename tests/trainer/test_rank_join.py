"""The process group of the ranks: what is in its store begins with what follows from the run's token."""

from __future__ import annotations

import os
import socket

import pytest

pytest.importorskip("megatron")

import torch.distributed as dist
from policy_fixtures import make_config, write_config

from megatron_fleet.trainer.messages import Identity
from megatron_fleet.trainer.verbs import join


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """Joins a group of one rank with a token; returns the keys in its store."""
    config = make_config(write_config(tmp_path / "model")).model_dump_json()
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as `join` sets them, and gone after the test
    monkeypatch.setenv("MFLEET_CONTROLLER", "127.0.0.1:1")

    def keys(token: str) -> list[str]:
        monkeypatch.setenv("MFLEET_TOKEN", token)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        who = Identity(0, 1, 0, "here", os.getpid(), "mfleet")
        join(config, who, f"127.0.0.1:{port}", "127.0.0.1", listener)
        try:
            return dist.TCPStore("127.0.0.1", port, is_master=False).list_keys()
        finally:
            dist.destroy_process_group()

    return keys


def test_keys_of_a_group_begin_with_what_follows_from_the_token(one_rank):
    first, second = one_rank("the run's token"), one_rank("another token")
    prefixes = [{key.partition("/")[0] for key in keys} for keys in (first, second)]
    assert [len(found) for found in prefixes] == [1, 1] and prefixes[0] != prefixes[1]
    assert "token" not in str(first)
