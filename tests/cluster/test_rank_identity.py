"""A process reads which rank it is from whatever started it, and refuses what is ambiguous."""

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.cluster.rank_identity import (
    ListenAt,
    RankIdentity,
    controller_address,
    listen_at,
    rank_identity,
    rank_variables,
    without_rank_variables,
)
from megatron_fleet.config.errors import UserError

HERE = socket.gethostname()
FIELDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def mfleet(*values: int) -> dict[str, str]:
    return {f"MFLEET_{name}": str(value) for name, value in zip(FIELDS, values, strict=True)}


def plain(*values: int) -> dict[str, str]:
    return {name: str(value) for name, value in zip(FIELDS, values, strict=True)}


def torchrun(*values: int) -> dict[str, str]:
    return plain(*values) | {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "n1"}


def srun(rank: int, world: int, local: int, node: int, tasks: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURMD_NODENAME": f"n{node + 1}",
    }


BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (mfleet(3, 8, 1, 2), RankIdentity(3, 8, 1, 2, HERE, "mfleet")),
        (torchrun(3, 8, 1, 2), RankIdentity(3, 8, 1, 2, HERE, "torchrun")),
        (plain(0, 1, 0, 1), RankIdentity(0, 1, 0, 1, HERE, "variables")),
        (srun(5, 7, 1, 2, "2(x3),1"), RankIdentity(5, 7, 1, 2, "n3", "srun")),
        (srun(6, 7, 0, 3, "2(x3),1"), RankIdentity(6, 7, 0, 1, "n4", "srun")),
        # One agent of torchrun per srun task: Slurm counts agents.
        (srun(1, 2, 0, 1, "1(x2)") | torchrun(3, 4, 1, 2), RankIdentity(3, 4, 1, 2, "n2", "torchrun")),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"} | torchrun(3, 4, 1, 2),
            RankIdentity(3, 4, 1, 2, HERE, "torchrun"),
        ),
        # A wrapper that exports RANK=$SLURM_PROCID.
        (srun(1, 2, 0, 1, "1(x2)") | plain(1, 2, 0, 1), RankIdentity(1, 2, 0, 1, "n2", "variables")),
        # Our launcher sets what torch reads as well.
        (mfleet(1, 2, 1, 2) | plain(1, 2, 1, 2), RankIdentity(1, 2, 1, 2, HERE, "mfleet")),
        # The allocation has more tasks than this step.
        (srun(0, 1, 0, 0, "1") | {"SLURM_NTASKS": "4"}, RankIdentity(0, 1, 0, 1, "n1", "srun")),
        # Slurm's variables of the batch script say nothing of what it starts.
        (BATCH_SCRIPT | {"SLURM_NTASKS": "4"} | plain(1, 4, 1, 4), RankIdentity(1, 4, 1, 4, HERE, "variables")),
        # WORLD_SIZE alone is not about this process.
        (srun(0, 2, 0, 0, "1(x2)") | {"WORLD_SIZE": "9"}, RankIdentity(0, 2, 0, 1, "n1", "srun")),
    ],
)
def test_identity(environ, expected):
    assert rank_identity(environ) == expected


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["Nothing", "torchrun", "srun", "MFLEET_RANK"]),
        ({"WORLD_SIZE": "4", "SLURM_NTASKS": "4"}, ["Nothing"]),
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE and LOCAL_RANK and LOCAL_WORLD_SIZE"]),
        (without(torchrun(1, 2, 1, 2), "LOCAL_WORLD_SIZE"), ["RANK=1", "not LOCAL_WORLD_SIZE"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "not RANK"]),
        (without(mfleet(1, 2, 1, 2), "MFLEET_WORLD_SIZE"), ["MFLEET_RANK=1", "not MFLEET_WORLD_SIZE"]),
        (mfleet(2, 2, 0, 2), ["MFLEET_RANK=2", "MFLEET_WORLD_SIZE=2"]),
        (plain(0, 0, 0, 0), ["RANK=0", "WORLD_SIZE=0"]),
        (plain(0, 4, 2, 2), ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (plain(0, 2, 0, 4), ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"]),
        (plain(0, 2, 0, 2) | {"RANK": "one"}, ["RANK=one"]),
        (plain(0, 2, 0, 2) | {"RANK": "-1"}, ["RANK=-1"]),
        (plain(0, 2, 0, 2) | {"WORLD_SIZE": ""}, ["WORLD_SIZE="]),
        (plain(0, 2, 0, 2) | {"LOCAL_RANK": "0.0"}, ["LOCAL_RANK=0.0"]),
        (plain(0, 2, 0, 2) | {"LOCAL_RANK": "١"}, ["LOCAL_RANK=١"]),
        (mfleet(0, 2, 0, 2) | plain(1, 2, 1, 2), ["MFLEET_RANK=0", "RANK=1"]),
        (mfleet(0, 2, 0, 2) | torchrun(0, 4, 0, 4), ["MFLEET_WORLD_SIZE=2", "WORLD_SIZE=4"]),
        (mfleet(0, 2, 0, 2) | srun(1, 2, 0, 1, "1(x2)"), ["MFLEET_RANK=0", "SLURM_PROCID=1"]),
        (plain(0, 2, 0, 1) | srun(1, 2, 0, 1, "1(x2)"), ["RANK=0", "SLURM_PROCID=1", "one launcher"]),
        (plain(1, 4, 0, 1) | srun(1, 2, 0, 1, "1(x2)"), ["WORLD_SIZE=4", "SLURM_NTASKS=2"]),
        (BATCH_SCRIPT | {"SLURM_NTASKS": "4"}, ["script of Slurm job 7", "SLURM_NTASKS=4", "start it with srun"]),
        (BATCH_SCRIPT, ["start it with srun"]),
        (srun(2, 2, 0, 1, "1(x2)"), ["SLURM_PROCID=2", "=2"]),
        (srun(1, 2, 1, 1, "1(x2)"), ["SLURM_LOCALID=1"]),
        (srun(1, 2, 0, 2, "1(x2)"), ["SLURM_NODEID=2", "1(x2)"]),
        (srun(1, 2, 0, 1, "1(x3)"), ["1(x3)", "=2"]),
        (srun(1, 2, 0, 1, "two"), ["two"]),
        (without(srun(1, 2, 0, 1, "1(x2)"), "SLURM_LOCALID"), ["SLURM_PROCID=1", "not SLURM_LOCALID"]),
    ],
)
def test_refusal(environ, words):
    with pytest.raises(UserError) as caught:
        rank_identity(environ)
    for word in words:
        assert word in str(caught.value)


@given(
    tasks=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    kinds=st.sets(st.sampled_from(["mfleet", "torchrun", "plain", "srun"]), min_size=1),
    liar=st.none() | st.sampled_from(["mfleet", "torchrun", "plain", "srun"]),
    seed=st.randoms(use_true_random=False),
)
def test_any_mixture_of_launchers_gives_the_rank_or_a_refusal(
    tasks: list[int], kinds: set[str], liar: str | None, seed: random.Random
):
    node = seed.randrange(len(tasks))
    local = seed.randrange(tasks[node])
    rank, world = sum(tasks[:node]) + local, sum(tasks)
    if {"plain", "torchrun"} <= kinds:
        kinds = kinds - {"plain"}  # the same variables
    environ: dict[str, str] = {}
    for kind in kinds:
        # A liar claims another world, with the same position in it.
        extra = [1] if kind == liar else []
        if kind == "srun":
            environ |= srun(rank, world + sum(extra), local, node, ",".join(map(str, [*tasks, *extra])))
        else:
            make = {"mfleet": mfleet, "torchrun": torchrun, "plain": plain}[kind]
            environ |= make(rank, world + sum(extra), local, tasks[node])
    judged = kinds - {"srun"} if "torchrun" in kinds else kinds
    if liar in judged and len(judged) > 1:
        with pytest.raises(UserError, match="contradicts itself"):
            rank_identity(environ)
        return
    found = rank_identity(environ)
    claimed = world + (1 if judged == {liar} else 0)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        rank,
        claimed,
        local,
        tasks[node],
    )


@given(
    st.dictionaries(st.sampled_from([*torchrun(0, 1, 0, 1), *srun(0, 1, 0, 0, "1"), *mfleet(0, 1, 0, 1)]), st.text())
)
def test_garbage_is_refused_and_nothing_else_is_raised(environ):
    try:
        found = rank_identity(environ)
    except UserError:
        return
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size


def test_children_that_are_no_ranks_inherit_nothing_of_them():
    kept = {"PATH": "/bin", "RANKING": "1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n2", "MFLEET_TOKEN": "x"}
    rank = torchrun(3, 4, 1, 2) | srun(1, 2, 0, 1, "1(x2)") | mfleet(3, 4, 1, 2) | kept
    assert without_rank_variables(rank | {"TORCHELASTIC_X": "1", "PET_NPROC": "2", "OMP_NUM_THREADS": "1"}) == kept
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_"} <= set(rank_variables())


def test_a_free_port_for_the_controller_needs_a_file_for_the_address(tmp_path):
    environ = {"MFLEET_CONTROLLER": "n1:0", "MFLEET_TOKEN": "s3cret"}
    file = {"MFLEET_CONTROLLER_FILE": str(tmp_path / "address")}
    assert listen_at(environ | file) == ListenAt("n1", 0, tmp_path / "address")
    assert listen_at(environ | {"MFLEET_CONTROLLER": "n1:4000"}) == ListenAt("n1", 4000, None)
    with pytest.raises(UserError, match="MFLEET_CONTROLLER_FILE"):
        listen_at(environ)
    with pytest.raises(UserError, match="MFLEET_TOKEN"):
        listen_at(file | {"MFLEET_CONTROLLER": "n1:0"})


def test_controller_address():
    assert controller_address({"MFLEET_CONTROLLER": "n1.cluster:4000", "MFLEET_TOKEN": " s3cret\n"}) == (
        "n1.cluster:4000",
        "s3cret",
    )


@pytest.mark.parametrize(
    ("controller", "token", "words"),
    [
        (None, "s3cret", "MFLEET_CONTROLLER is not set"),
        ("", "s3cret", "MFLEET_CONTROLLER is not set"),
        ("n1:4000", None, "MFLEET_TOKEN is not set"),
        ("n1:4000", " ", "MFLEET_TOKEN is not set"),
        ("n1", "s3cret", "MFLEET_CONTROLLER=n1 is not an address"),
        ("n1:", "s3cret", "MFLEET_CONTROLLER=n1: is not an address"),
        ("n1:65536", "s3cret", "host:port"),
        ("n1:0", "s3cret", "host:port"),
        ("http://n1:4000", "s3cret", "host:port"),
        (":4000", "s3cret", "host:port"),
    ],
)
def test_controller_refusals_do_not_show_the_token(controller, token, words):
    environ = {"MFLEET_CONTROLLER": controller, "MFLEET_TOKEN": token}
    with pytest.raises(UserError) as caught:
        controller_address({name: value for name, value in environ.items() if value is not None})
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)
