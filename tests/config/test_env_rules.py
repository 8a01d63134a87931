"""Rules of environments, injected faults and starting: what cannot work is refused, and the edge is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.config.sections.env import ProvisioningConfig

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
        ([*OPENENV, "env.faults.hang_rate=0.1"], ["env.faults.hang_rate=0.1", "env.kind=openenv"]),
        (["env.faults.slow_rate=0.1", "env.faults.slow_s=30"], ["env.faults.slow_s=30", "env.step_timeout_s=30"]),
        (["env.provisioning.starts_at_once=300"], ["starts_at_once=300", "max_starts_at_once=256"]),
        (
            ["env.provisioning.starts_at_once=2", "rollout.workers=3"],
            ["starts_at_once=2 ", "rollout.workers=3 processes"],
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
        OPENENV,
        [*OPENENV, "env.faults.slow_s=99"],
        ["env.faults.slow_s=99"],
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


def test_the_experiment_with_faults_is_sound():
    faults = load(["experiment=faults"]).env.faults
    assert (faults.slow_rate, faults.hang_rate, faults.malformed_rate) == (0.10, 0.05, 0.05)
    assert (faults.dead_session_rate, faults.verifier_failure_rate) == (0.02, 0.05)
    validate.check(load(["experiment=faults"]))


@pytest.mark.parametrize(
    "wrong",
    [{"faults": {"hang_rate": 1.1}}, {"faults": {"slow_rate": -0.1}}, {"provisioning": {"breaker_threshold": 0}}],
)
def test_numbers_out_of_range(wrong):
    with pytest.raises(ValidationError):
        EnvConfig(**wrong)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300), st.integers(1, 40))
def test_shares_of_workers_add_up_to_what_was_asked_for(lookahead, starts, more, workers):
    whole = ProvisioningConfig(lookahead=lookahead, starts_at_once=starts, max_starts_at_once=starts + more, quick_s=3)
    shares = [whole.share(worker, workers) for worker in range(workers)]
    for name in ("lookahead", "starts_at_once", "max_starts_at_once"):
        parts = [getattr(share, name) for share in shares]
        assert sum(parts) == getattr(whole, name) and max(parts) - min(parts) <= 1
    assert all(share.starts_at_once <= share.max_starts_at_once and share.quick_s == 3 for share in shares)
    if starts >= workers:
        assert [ProvisioningConfig.model_validate(share.model_dump()) for share in shares] == shares
