"""RunProgress: plain lines without a terminal, a live image with one."""

import io

import pytest

from megatron_fleet.telemetry.console import RunProgress, duration, step_text

pytest.importorskip("rich")

METRICS = {"reward/avg_raw_reward": 0.4125, "reward/pass_at_1": 0.4, "generate/tokens_per_second": 12345.6, "x/y": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_a_plain_line_for_the_start_and_each_step():
    stream = io.StringIO()
    with RunProgress("run", steps=3, done=1, stream=stream) as progress:
        progress.evaluated(1, {"eval/all/pass_at_1": 0.125})
        for _ in range(2):
            progress.phase("generate", total=64)
            progress.advance(64)
            progress.step_done(METRICS)
    begin, *lines = stream.getvalue().splitlines()
    assert begin == "run: resuming after step 1 of 3 steps"
    assert lines[0] == "evaluation after step 1 · held-out pass@1 0.125"
    assert lines[1].startswith("step 2/3 · reward 0.412 · pass@1 0.400 · tokens/s 12,346 · ")
    assert lines[2].startswith("step 3/3 · ") and lines[2].endswith("ETA 0 s")
    assert len(lines) == 3
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "run: starting a run of 1 step"), (2, "run: starting a run of 2 steps")]
)
def test_the_first_line_says_how_long_the_run_is(steps, said):
    stream = io.StringIO()
    with RunProgress("run", steps=steps, stream=stream):
        pass
    assert stream.getvalue().splitlines() == [said]


def test_an_evaluation_stays_on_the_terminal_and_a_step_does_not():
    stream = Terminal()
    progress = RunProgress("my-run", steps=5, stream=stream)
    progress.evaluated(0, {"eval/all/pass_at_1": 0.125})
    progress.step_done({"reward/pass_at_1": 0.75})
    progress.step_done({"reward/avg_raw_reward": 0.5})
    stream.truncate(0)
    progress._live.refresh()
    shown = stream.getvalue()
    progress.close()
    assert "held-out pass@1 0.125" in shown and "reward 0.500" in shown and "0.750" not in shown


def test_with_a_terminal_it_shows_phase_counts_and_rewards():
    stream = Terminal()
    progress = RunProgress("my-run", steps=5, stream=stream)
    progress.step_done({"reward/avg_raw_reward": 0.0})
    progress.step_done({"reward/avg_raw_reward": 1.0})
    progress.phase("generate", total=64)
    progress.advance(7)
    progress._live.refresh()
    shown = stream.getvalue()
    for text in ("my-run", "step 2/5", "generate", "7/64", "▁█", "reward 1.000", "ETA"):
        assert text in shown, text
    progress.close()
    progress.close()
    assert "done" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42, "42 s"), (187, "3 min 7 s"), (3599.7, "1 h 0 min"), (7500, "2 h 5 min"), (187200, "2 d 4 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_absent_metrics_are_left_out():
    assert step_text({"policy/grad_norm": 0.123456, "unknown": 3}) == "grad norm 0.123"
