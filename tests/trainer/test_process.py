"""Settings of a trainer process before CUDA and Megatron start in it."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
from policy_fixtures import make_config

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.trainer import process
from megatron_fleet.trainer.process import CONNECTIONS, device_connections, prepare_process

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("layout", "capability", "expected"),
    [
        ({"data": 8}, HOPPER, None),
        ({"pipeline": 2}, HOPPER, None),
        ({"tensor": 2, "data": 4}, HOPPER, "1"),
        ({"context": 2}, HOPPER, "1"),
        ({"tensor": 2}, (8, 0), "1"),
        ({"tensor": 8}, BLACKWELL, None),
        ({"tensor": 2, "data": 4}, BLACKWELL, "32"),
        ({"context": 2, "pipeline": 2}, (12, 0), "32"),
        ({"data": 8}, BLACKWELL, None),
    ],
)
def test_hardware_queues_follow_the_layout_and_the_gpu(layout, capability, expected):
    assert device_connections(ParallelConfig(**layout), capability) == expected


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(process, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(process, "compute_capability", lambda environ: HOPPER)
    monkeypatch.setenv(CONNECTIONS, "7")  # so that the fixture's end restores the environment
    monkeypatch.delenv(CONNECTIONS)


def config(tmp_path, **policy):
    found = make_config(tmp_path, ParallelConfig(tensor=2))
    return found.model_copy(update={"policy": found.policy.model_copy(update=policy)})


def prepare(config):
    prepare_process(config.policy, config.parallel)


def test_the_environment_is_set_before_cuda_starts(tmp_path, hopper):
    prepare(config(tmp_path))
    assert os.environ[CONNECTIONS] == "1"


def test_what_the_user_has_set_stays(tmp_path, hopper, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "8")
    prepare(config(tmp_path))
    assert os.environ[CONNECTIONS] == "8"


def test_a_cpu_needs_no_setting(tmp_path, hopper, monkeypatch):
    monkeypatch.setattr(process, "cuda_is_installed", lambda: False)
    prepare(config(tmp_path))
    assert CONNECTIONS not in os.environ


def test_torchs_kernels_leave_transformer_engine_out_of_the_process(tmp_path, hopper, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)  # restored afterwards
    prepare(config(tmp_path))
    assert sys.modules["transformer_engine"] is sys
    prepare(config(tmp_path, kernels="torch"))
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
