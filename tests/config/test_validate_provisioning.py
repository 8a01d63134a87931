"""Faults on purpose and the starting of environments: combinations that cannot work are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.config.sections.provisioning import ProvisioningConfig
from megatron_fleet.config.validate import check

ELSEWHERE = ("env.kind=openenv", "env.url=http://somewhere", "data.tasks=tasks.json")


def test_the_experiment_with_faults_is_sound():
    faults = load(["experiment=faults"]).env.faults
    assert (faults.slow_rate, faults.hang_rate, faults.malformed_rate) == (0.10, 0.05, 0.05)
    assert (faults.dead_session_rate, faults.verifier_failure_rate) == (0.02, 0.05)
    check(load(["experiment=faults"]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((*ELSEWHERE, "env.faults.hang_rate=0.1"), r"env\.faults\.hang_rate=0\.1.*env\.kind=openenv"),
        (("env.faults.slow_rate=0.1", "env.faults.slow_s=30"), r"env\.faults\.slow_s=30.*env\.step_timeout_s=30"),
        (("env.provisioning.starts_at_once=300",), r"starts_at_once=300.*max_starts_at_once=256"),
        (
            ("env.provisioning.starts_at_once=2", "rollout.workers=3"),
            r"starts_at_once=2 .*rollout\.workers=3 processes",
        ),
    ],
)
def test_refused(overrides, told):
    with pytest.raises(UserError, match=told):
        check(load(["experiment=quickstart", *overrides]))


@pytest.mark.parametrize("overrides", [ELSEWHERE, (*ELSEWHERE, "env.faults.slow_s=99"), ("env.faults.slow_s=99",)])
def test_what_no_fault_depends_on_is_accepted(overrides):
    check(load(["experiment=quickstart", *overrides]))


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
