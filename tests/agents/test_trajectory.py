"""Trajectories of several segments, and the cause of each outcome."""

import dataclasses

import numpy as np
import pytest
from agent_doubles import TASK, ScriptedEnvironment
from waiting import HANG_S

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.episode import Ending, score
from megatron_fleet.agents.token_engine import Generation
from megatron_fleet.agents.trajectory import CAUSES, Cause, Outcome, Trajectory, environment_failed, will_recur
from megatron_fleet.telemetry.episodes import INFRASTRUCTURE_OUTCOMES


def said(*ids: int, routing: np.ndarray | None = None) -> Generation:
    n = len(ids)
    return Generation(np.array(ids, np.int32), np.full(n, -1.0, np.float32), "stop", ((3, 0, n),), routing)


def two_segments() -> Trajectory:
    builder = TrajectoryBuilder()
    builder.begin([1, 2, 3])
    builder.add_action(said(4, 5))
    builder.add_observation([6])
    builder.add_action(said(7))
    builder.begin([1, 2, 8])
    assert builder.ids == [1, 2, 8]
    builder.add_action(said(9))
    return builder.build(TASK, Outcome.COMPLETED, 1.0, "", None)


def test_segments_follow_each_other():
    t = two_segments()
    t.check()
    assert [t.token_ids[part].tolist() for part in t.segments()] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9]]
    assert [(s.kind, s.start, s.end, s.turn) for s in t.spans] == [
        ("prompt", 0, 3, 0), ("action", 3, 5, 0), ("observation", 5, 6, 0), ("action", 6, 7, 1),
        ("prompt", 7, 10, 2), ("action", 10, 11, 2),
    ]  # fmt: skip
    assert t.token_ids[t.action_mask].tolist() == [4, 5, 7, 9] and t.metrics["segments"] == 2


def test_experts_are_told_anew_in_every_segment():
    def experts(first: int, n: int) -> np.ndarray:
        return np.arange(first, first + 2 * n, dtype=np.uint8).reshape(n, 1, 2)

    builder = TrajectoryBuilder()
    builder.begin([1, 2, 3])
    builder.add_action(said(4, 5, routing=experts(10, 4)))
    assert builder.routed == 4
    builder.begin([1, 2])
    assert builder.routed == 0
    builder.add_action(said(6, routing=experts(50, 2)))
    t = builder.build(TASK, Outcome.COMPLETED, 1.0, "", None)
    assert t.routing is not None
    assert t.routing[:, 0, 0].tolist() == [10, 12, 14, 16, 0, 50, 52, 0]  # the last of a segment was no input
    with pytest.raises(ValueError, match="experts of 3 tokens, but only 2"):
        builder.begin([1, 2])
        builder.add_action(said(6, routing=experts(50, 3)))


def test_an_episode_that_never_began_has_no_tokens():
    t = TrajectoryBuilder().build(TASK, Outcome.ENV_FAILED, None, "no image", None)
    t.check()
    assert len(t.token_ids) == 0 and t.segment_starts == (0,) and t.metrics["segments"] == 0


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 7, 7), (7, 0), (0, 6), (0, 11), (0, 3)])
def test_segments_that_do_not_begin_with_their_prompt_are_refused(starts):
    t = dataclasses.replace(two_segments(), segment_starts=starts)
    with pytest.raises(ValueError, match="segments do not begin"):
        t.check()


@pytest.mark.parametrize("outcome", Outcome)
async def test_what_an_outcome_means_is_in_one_table(outcome):
    cause = CAUSES[outcome]
    env = ScriptedEnvironment()
    ended, reward = await score(Ending(outcome), env, [], HANG_S)
    assert (len(env.verified) == 1) == (reward is not None) == (cause is Cause.POLICY) and ended.outcome is outcome
    assert (outcome in INFRASTRUCTURE_OUTCOMES) == (cause in (Cause.ENVIRONMENT, Cause.REQUEST, Cause.RUN))
    unknown = {Cause.RUN: None, Cause.REQUEST: None, Cause.TASK: False}
    assert environment_failed(outcome, None) is unknown.get(cause, True)
    assert not environment_failed(outcome, 0.0)


def test_what_the_policy_is_not_to_blame_for():
    assert set(CAUSES) == set(Outcome)
    others = {outcome for outcome, cause in CAUSES.items() if cause is not Cause.POLICY}
    infrastructure = {Outcome.ENV_FAILED, Outcome.REFUSED, Outcome.ABORTED}
    assert others == {Outcome.PROMPT_TOO_LONG, Outcome.VERIFIER_FAILED} | infrastructure
    assert set(INFRASTRUCTURE_OUTCOMES) == infrastructure
    assert {outcome for outcome in Outcome if will_recur(outcome)} == {Outcome.PROMPT_TOO_LONG, Outcome.REFUSED}
