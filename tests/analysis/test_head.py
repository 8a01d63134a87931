"""The figures at the head of a report, computed by hand, and which examples stand beside the errors."""

from pathlib import Path

from run_maker import episode

from megatron_fleet.analysis.document import Facts, Table
from megatron_fleet.analysis.run import Run
from megatron_fleet.analysis.sections import errors, head
from megatron_fleet.telemetry.charts import resumed_at
from megatron_fleet.telemetry.summary import seconds_total


def row(step: int, time: float, attempt: float) -> dict[str, float]:
    return {
        "step": step,
        "time": time,
        "attempt": attempt,
        "reward/avg_raw_reward": step / 10,
        "accounting/episodes": 10,
        "accounting/trained": 6,
        "accounting/unknown": 1,
        "generate/action_tokens": 50,
        "generate/tokens_per_second": 100.0 * step,
        "cost/step_usd": 0.2 * step,
        "cost/cumulative_usd": 1000.0 * step,
    }


ROWS = [row(1, 200, 100), row(2, 260, 100), *(row(step, 800.0 + 100 * step, 1000) for step in (3, 4, 5, 6))]


def test_the_figures_of_a_run_that_was_resumed():
    assert seconds_total(ROWS) == (260 - 100) + (1400 - 1000) and resumed_at(ROWS) == [3]
    run = Run(Path("folder"), {"run": {"steps": 8}, "model": {"path": "/models/tiny/"}}, rows=ROWS)
    (facts,) = [block.facts for block in head(run).blocks if isinstance(block, Facts)]
    found = {fact.label: (fact.value, fact.detail) for fact in facts}
    assert found == {
        "training reward": ("0.200 → 0.500", "mean of the first and of the last 3 steps"),
        "training steps": ("6 of 8", "in 9 min 20 s, 2 attempts"),
        "training episodes": ("60", "36 trained on, 6 with unknown reward"),
        "tokens sampled in training": ("300", "350 per second of generation"),
        "cost at the service": ("$6,000.00", "$0.70 per step on average"),
        "model": ("tiny", "/models/tiny/"),
        "tasks": ("–", "content hash not recorded"),
    }


def test_examples_of_errors_are_the_newest():
    def said(step: int, count: int) -> list:
        texts = (("tool", f"Error: HTTP 404 at {step}"),)
        return [episode(step=step, line=line, messages=texts) for line in range(count)]

    run = Run(Path("folder"), compared={("eval", 0): said(0, 5), ("eval", 7): said(7, 2)})
    table = next(block for block in errors(run).blocks if isinstance(block, Table))
    (cells,) = table.rows
    assert [cell.text for cell in cells] == ["not found", "5 (100 %)", "2 (100 %)", "HTTP 404 at 7"]
    assert cells[-1].links == ("eval-7-0", "eval-7-1", "eval-0-0")
