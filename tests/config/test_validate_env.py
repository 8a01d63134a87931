"""Of environments: what cannot work is refused, with the keys and the way out; the edge is accepted."""

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load

FLEET = ["env=fleet", "data=file", "data.tasks=x"]
OPENENV = ["env=openenv", "env.url=http://h", "data=file", "data.tasks=x"]
NEEDED = ["rollout.episode_timeout_s=300", "env.verify_timeout_s=100", "env.reset_timeout_s=40"]


def check(*overrides: str) -> None:
    validate.check(load(["experiment=quickstart", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([*FLEET, "env.url=http://h"], ["env.url=http://h", "env.kind=fleet"]),
        (["env=openenv", "env.url=http://me:secret@h"], ["env.url holds a user or a password"]),
        (["env=fleet"], ["data.tasks", "env.kind=fleet", "set data.tasks=FILE"]),
        ([*FLEET, *NEEDED, "env.fleet.ttl_s=799"], ["env.fleet.ttl_s=799", "are 800 s", "at least 800", "lookahead=4"]),
        ([*FLEET, *NEEDED, "env.fleet.ttl_s=499", "env.provisioning.lookahead=0"], ["at least 500"]),
        ([*FLEET, "env.step_timeout_s=62"], ["env.step_timeout_s=62"]),
        ([*OPENENV, "env.fleet.ttl_s=100"], ["env.fleet.ttl_s=100", "env.kind=openenv"]),
        (["env.openenv.finish_tool=done"], ["env.openenv.finish_tool=done", "env.kind=embedded"]),
        (
            [*OPENENV, "env.openenv.final_calls={verify: {mode: strict}}", "env.openenv.finish_tool=done"],
            ["env.openenv.final_calls=verify", "env.openenv.finish_tool=done", "env.openenv.verify_tool=None"],
        ),
        ([*OPENENV, "env.make_timeout_s=300"], ["env.make_timeout_s=300", "rollout.episode_timeout_s=300"]),
    ],
)
def test_impossible_environments_are_explained(overrides, keys):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert all(key in str(caught.value) for key in keys), str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        FLEET,
        [*FLEET, *NEEDED, "env.fleet.ttl_s=800"],
        [*FLEET, *NEEDED, "env.fleet.ttl_s=500", "env.provisioning.lookahead=0"],
        [*OPENENV, "env.openenv.finish_tool=done", "env.openenv.reset_kwargs={level: 3, of: 'task:data_key'}"],
        [
            *OPENENV,
            "env.openenv.shown_metadata=[question]",
            "env.openenv.verify_tool=verify",
            "env.openenv.final_calls={verify: {mode: strict, sure: true, text: 'episode:final_answer'}}",
        ],
    ],
)
def test_environments_at_the_edge_are_accepted(overrides):
    check(*overrides)
