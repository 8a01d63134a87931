"""Options of batch scripts: requests for GPUs, texts in quotes, and what a real Slurm makes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import namespace_hosts
import pytest
import slurm_cluster
from namespace_hosts import ROOT, Hosts
from slurm_cluster import CONTROLLER

from megatron_fleet.config.errors import UserError
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.job import write_files
from megatron_fleet.launch.plan import plan
from megatron_fleet.launch.slurm import Slurm, quoted

reason = namespace_hosts.why_not() or slurm_cluster.why_not()
real_slurm = pytest.mark.skipif(bool(reason), reason=reason or "")
GPUS = 2
ODD_NAME = "my run %j #no 'a' \"b\" $HOME `c`;d"


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    monkeypatch.setattr(planning, "commit", lambda: "abc")


def submission(*overrides: str) -> tuple[str, ...]:
    """Write a job's files; the command that submits it."""
    job = plan([["experiment=quickstart", "cluster=slurm", *overrides]], {})
    Slurm().check(job)
    rendered = Slurm().render(job)
    write_files(job, rendered)
    return rendered.commands[0]


def options(folder: Path, *overrides: str) -> list[str]:
    submission(f"run.out={folder}/run", *overrides)
    return re.findall(r"^#SBATCH (.*)$", (folder / "run" / "launch" / "job.sbatch").read_text(), re.M)


def gpu_options(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match("--(gpu|gres|tres)", line)]


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("{}", ["--gpus-per-node=8"]),
        ('{gres: "gpu:h100:8"}', ["--gres=gpu:h100:8"]),
        ('{gres: "nvme:1,gpu:8"}', ["--gres=nvme:1,gpu:8"]),
        ('{gres: "nvme:1"}', ["--gpus-per-node=8", "--gres=nvme:1"]),
        ('{tres-per-node: "gres/gpu:8"}', ["--tres-per-node=gres/gpu:8"]),
        ('{gpus: "16"}', ["--gpus=16"]),
        ('{gpus-per-node: "h100:4"}', ["--gpus-per-node=h100:4"]),
        ('{gpus-per-node: ""}', []),
    ],
)
def test_gpus_are_asked_for_once(asked, lines, tmp_path):
    assert gpu_options(options(tmp_path, f"launch.slurm.options={asked}")) == lines


def test_options_of_the_user_replace_ours_and_those_without_a_value_are_flags(tmp_path):
    given = 'launch.slurm.options={time: "1:00:00", exclusive: user, contiguous: "", signal: "", comment: "a b"}'
    lines = options(tmp_path, given)
    assert {"--time=1:00:00", "--exclusive=user", "--contiguous", '--comment="a b"'} <= set(lines)
    names = [line.partition("=")[0] for line in lines]
    # The script has one of its own for those who submit it by hand.
    assert len(names) == len(set(names)) and "--signal=B:USR1@600" in lines
    assert "--exclusive" in options(tmp_path, 'launch.slurm.options={exclusive: ""}')


def test_a_second_component_is_asked_for_in_the_same_way(tmp_path):
    lines = options(
        tmp_path,
        "rollout.engine.colocated=false",
        "launch.slurm.rollout_hosts=1",
        'launch.slurm.options={gres: "gpu:8"}',
        'launch.slurm.rollout_options={time: "", gres: "gpu:4"}',
    )
    second = lines[lines.index("hetjob") + 1 :]
    assert second == ["--nodes=1", "--ntasks-per-node=1", "--exclusive", "--gres=gpu:4"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.slurm.options={--gres: gpu}", r"^launch.slurm.options: '--gres' is not a long option name"),
        ("launch.slurm.rollout_options={G: '8'}", r"^launch.slurm.rollout_options: 'G' is not a long option name"),
        ("launch.slurm.options={a b: c}", r"'a b' is not a long option name of sbatch"),
        ("launch.slurm.partition=a b", r'^launch.slurm.partition="a b": it must have the form \^\[A-Za-z0-9\]'),
        ("launch.slurm.mounts=['/a:/a,/b:/b']", r"^launch.slurm.mounts: '/a:/a,/b:/b' has a comma"),
        ("run.out=a\\b", r"^run.out=.*: Slurm drops a backslash"),
        ("run.out=a\n#SBATCH --uid=0", r"^run.out: '.*a\\n#SBATCH --uid=0' has a line end"),
        (
            "launch.slurm.constraint=a\n#SBATCH --uid=0",
            r"^launch.slurm.constraint: 'a\\n#SBATCH --uid=0' has a line end",
        ),
    ],
)
def test_what_sbatch_would_not_read_is_refused(override, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        submission(override)


@pytest.fixture(scope="module", params=[0, GPUS])
def slurm(request, tmp_path_factory) -> Iterator[slurm_cluster.Slurm]:
    """A cluster that knows of no GPUs, and one with GRES."""
    with (
        Hosts([CONTROLLER, "n1"], visible=[tmp_path_factory.getbasetemp()]) as hosts,
        slurm_cluster.Slurm(hosts, gpus=request.param) as slurm,
    ):
        yield slurm


STUB = """#!/bin/sh
case $1 in
train)
  echo host:1 >"$MFLEET_CONTROLLER_FILE"
  until [ -e "$SEEN/0" ] && [ -e "$SEEN/1" ]; do sleep 0.1; done ;;
rank)
  printf '%s' "${CUDA_VISIBLE_DEVICES:-}" >"$SEEN/$SLURM_PROCID.new"
  mv "$SEEN/$SLURM_PROCID.new" "$SEEN/$SLURM_PROCID"
  exec sleep 1 ;;
esac
"""
"""mfleet: a rank writes which GPUs Slurm lets it see; the controller ends when both have."""


@pytest.fixture
def environ(slurm, tmp_path) -> dict[str, str]:
    programs, seen = tmp_path / "bin", tmp_path / "seen"
    programs.mkdir()
    seen.mkdir()
    (programs / "mfleet").write_text(STUB)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    ours = {"MFLEET_BIN": str(programs), "SEEN": str(seen), "PYTHONPATH": str(ROOT)}
    return os.environ | ours | {"SLURM_CONF": slurm.environ["SLURM_CONF"]}


def run(slurm: slurm_cluster.Slurm, environ: dict[str, str], command: tuple[str, ...]) -> tuple[int, str]:
    """Submit a job and wait for its end; status and what sbatch said."""
    sbatch, *rest = command
    process = slurm.hosts.run(
        CONTROLLER, [sbatch, "--wait", *rest], environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.slow
@real_slurm
@pytest.mark.parametrize(
    ("asked", "seen"),
    [("{}", "0,1"), ('{gres: "gpu:h100:2"}', "0,1"), ('{gres: "gpu:1"}', "0"), ('{gpus-per-node: ""}', "")],
)
def test_ranks_see_the_gpus_that_were_asked_for(slurm, environ, tmp_path, asked, seen):
    command = submission(
        f"run.out={tmp_path}/{ODD_NAME}",
        "parallel.data=2",
        f"launch.gpus={GPUS}",
        "launch.doctor=false",
        "launch.slurm.exclusive=false",
        f"launch.slurm.options={asked}",
    )
    status, said = run(slurm, environ, command)
    log = tmp_path / ODD_NAME / "launch" / "job.log"
    if slurm.gpus or not seen:
        assert status == 0 and log.exists(), said
        assert [(tmp_path / "seen" / rank).read_text() for rank in ("0", "1")] == [seen] * 2
    else:
        assert status == 1 and "Invalid generic resource (gres) specification" in said and not log.exists()


@pytest.mark.slow
@real_slurm
@pytest.mark.parametrize("slurm", [0], indirect=True)
@pytest.mark.parametrize(
    "text", ["plain", "a b", "a#b", " #", "'", '"', "\\", "\\\\", "a\\\"'b", "$(id)`id`", ":", "é"]
)
def test_sbatch_reads_an_option_as_it_was_given(slurm, tmp_path, text):
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\n#SBATCH --hold\n#SBATCH --comment=a{quoted(text)}b\n")
    id_ = slurm.output(["sbatch", "--parsable", script]).strip()
    try:
        shown = slurm.output(["scontrol", "show", "job", id_])
    finally:
        slurm.output(["scancel", id_])
    assert re.search(r"Comment=(.*)\n", shown)[1].removesuffix(" ") == f"a{text}b"
