"""Environment variables by which engines find the compiler for their kernels."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_fleet.rollout.engine_toolkit import toolkit_environment


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """nvcc among the packages of the environment."""
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": str(tmp_path)}.__getitem__)
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    return nvcc.parents[1]


def test_it_is_the_one_installed_with_torch_and_ninja_is_in_path(toolkit):
    variables = toolkit_environment({"PATH": "/usr/bin"})
    assert variables == {"CUDA_HOME": str(toolkit), "PATH": f"{sys.prefix}/bin:/usr/bin"}


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_the_user_names_is_kept(toolkit, name):
    assert toolkit_environment({name: "/usr/cuda", "PATH": "/bin"}).keys() == {"PATH"}


def test_without_a_compiler_among_the_packages_none_is_named(toolkit):
    (toolkit / "bin" / "nvcc").unlink()
    assert toolkit_environment({"CUDA_HOME": ""}) == {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.defpath}"}
