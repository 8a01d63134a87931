"""Episode endings: the outcome, the verifier's score, and closing the environment in every case."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any

from megatron_fleet.agents.trajectory import CAUSES, Cause, Outcome
from megatron_fleet.envs.base import Environment, EnvLost

VERIFY_GRACE_S = 2.0
"""Margin above the environment's own deadline for verify, which should fire first because it knows the reason."""
CLOSE_GRACE_S = 5.0
"""The same margin for close."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an episode's turns. ``reason``: explanation of an unknown reward, or the verifier's own."""

    outcome: Outcome
    reason: str = ""
    final_answer: str | None = None


async def score(
    ending: Ending, env: Environment, conversation: list[dict[str, Any]], verify_timeout_s: float
) -> tuple[Ending, float | None]:
    """Run the verifier if there is anything to verify; an unknown reward comes with a reason."""
    if CAUSES[ending.outcome] is not Cause.POLICY:
        return ending, None
    limit = verify_timeout_s + VERIFY_GRACE_S
    try:
        async with asyncio.timeout(limit):
            reward = await env.verify(ending.final_answer, conversation)
        value, reason = reward.value, reward.reason
    except TimeoutError:
        value, reason = None, f"the verifier gave no answer within {limit:g} s"
    except EnvLost as e:
        value, reason = None, f"environment lost before it could verify: {e}"
    if value is not None and not math.isfinite(value):
        value, reason = None, f"the verifier returned {value}"
    timed_out = ending.outcome is Outcome.TIMEOUT
    outcome = Outcome.VERIFIER_FAILED if value is None and not timed_out else ending.outcome
    return Ending(outcome, reason, ending.final_answer), value


async def close(env: Environment, close_timeout_s: float) -> None:
    """Close within the deadline, even if cancelled (repeatedly); the cancellation is re-raised afterwards."""
    closing = asyncio.create_task(env.close())
    loop = asyncio.get_running_loop()
    limit = close_timeout_s + CLOSE_GRACE_S
    end = loop.time() + limit
    cancelled: asyncio.CancelledError | None = None
    while not closing.done() and loop.time() < end:
        try:
            await asyncio.wait({closing}, timeout=end - loop.time())
        except asyncio.CancelledError as e:
            cancelled = e
    if not closing.done():
        closing.cancel()
        log.warning("an environment did not close within %g s", limit)
    elif not closing.cancelled() and (error := closing.exception()):
        log.warning("an environment failed to close: %r", error)
    if cancelled is not None:
        raise cancelled
