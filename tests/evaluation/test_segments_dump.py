"""The dump of an episode whose history was rewritten: the first prompt, and what was said and shown since."""

import numpy as np

from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.evaluation.dumps import dump_record
from megatron_fleet.telemetry.episodes import response_tokens


def test_prompts_of_later_segments_are_no_response():
    spans = [
        ("prompt", 0, 3, 0),
        ("action", 3, 5, 0),
        ("observation", 5, 6, 0),
        ("prompt", 6, 9, 1),
        ("action", 9, 10, 1),
    ]
    mask = np.zeros(10, bool)
    mask[[3, 4, 9]] = True
    ids, logprobs = np.arange(10, dtype=np.int32), np.where(mask, -1.0, 0.0).astype(np.float32)
    placed = tuple(Span(*span) for span in spans)
    t = Trajectory("t", "e", 0, 0, ids, mask, logprobs, placed, 1.0, "", Outcome.COMPLETED, segment_starts=(0, 6))
    t.check()
    assert response_tokens(t) == 4
    record = dump_record(t, lambda token_ids: " ".join(map(str, token_ids)), max_turns=5)
    assert (record["input_prompt"], record["output_response"]) == ("0 1 2", "3 4 5 9")
    assert record["score"] == [0.0, 0.0, 0.0, 1.0]
