"""Verbs that all ranks execute alike: what the controller sends is what a rank's method takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

from megatron_fleet.trainer.base import AdamParams, OptimReport, Ranks, Trainer, as_message
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.messages import VERBS
from megatron_fleet.trainer.rank import RankServer
from megatron_fleet.trainer.verbs import RankVerbs

FILES = {"a": {"bytes": 1, "sha256": "00"}}
REPORT = {"grad_norm": 1.0, "lr": 0.1, "skipped": False}
CALLS = {
    "optim_step": ((AdamParams(0.1),), {}, [REPORT, REPORT], OptimReport(**REPORT)),
    "discard_gradients": ((), {}, [None], None),
    "keep_reference": ((), {}, [None], None),
    "save_state": ((Path("x"),), {}, [{"b": {}}, {"a": {}}], {"a": {}, "b": {}}),
    "fetch_state": (("s3://b", Path("x"), FILES), {}, [None], None),
    "clear_state": ((Path("x"),), {}, [None], None),
    "load_state": ((Path("x"),), {}, [None], None),
    "export_hf": ((Path("x"),), {}, [None], None),
    "prepare_weights": (("shm", {"address": "h"}), {}, [{"first": 1}, {}], {"first": 1}),
    "offload": ((), {}, [None], None),
    "onload": ((("parameters",),), {}, [None], None),
    "memory": (("end",), {"quiet": True}, [{"a": 1}, {}], [{"a": 1}, {}]),
}
"""Verb → arguments, named arguments, answers of the ranks, result."""


@pytest.mark.parametrize("verb", CALLS)
async def test_arguments_and_answers(verb):
    args, named, answers, result = CALLS[verb]
    group, sent = TrainerGroup.__new__(TrainerGroup), []

    async def call(name, arguments):
        sent.append((name, arguments))
        return answers

    group._call = call
    assert await getattr(group, verb)(*args, **named) == result
    ((name, arguments),) = sent
    assert name == verb
    inspect.signature(getattr(RankVerbs, verb)).bind(None, **arguments)
    given = inspect.signature(getattr(Ranks, verb, None) or getattr(Trainer, verb)).bind(None, *args, **named)
    given.apply_defaults()
    assert arguments == {name: as_message(value) for name, value in given.arguments.items() if name != "self"}


def test_every_verb_of_the_protocol_has_a_rank_s_half():
    assert [verb for verb in VERBS if not callable(getattr(RankVerbs, verb, None))] == []
    assert CALLS.keys() < VERBS and not {"start", "lost", "info"} & VERBS


def test_arguments_travel_as_plain_values():
    """A path is absolute: a rank may have another working folder."""
    assert as_message(Path("x")) == str(Path.cwd() / "x")
    assert as_message({"a": (Path("/y"), {"b": "text"})}) == {"a": ["/y", {"b": "text"}]}
    assert as_message(AdamParams(0.1))["lr"] == 0.1
    assert as_message(None) is None and as_message(3.5) == 3.5


@pytest.mark.parametrize("name", ["close", "_close_sender", "ready", "share_in_replica"])
def test_a_rank_serves_the_verbs_alone(name):
    server = RankServer.__new__(RankServer)
    server._verbs = object()
    with pytest.raises(ValueError, match=f"^{name} is not a verb of a trainer$"):
        server._run(0, name, {}, [])
