"""Charts: which curves a log has, how they are drawn, the file of the learning curve."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry import charts as charts_module
from megatron_fleet.telemetry.charts import Chart, Series, charts, sparkline, thin, write_learning_curve
from megatron_fleet.telemetry.sinks import MetricsLog

SVG = "{http://www.w3.org/2000/svg}"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_are_evenly_spaced(low, width):
    width = max(width, 1e-8 * abs(low))  # floats have no steps much finer than these ticks
    found = charts_module.ticks(low, low + width)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-6 * width <= t <= low + width * (1 + 1e-6) for t in found)
    gaps = np.diff(found)
    assert np.allclose(gaps, gaps[0], rtol=1e-6, atol=1e-9 * max(abs(low), width))


def test_a_chart_of_hostile_names_is_well_formed():
    evil = '"><script>alert(1)</script>'
    chart = Chart(evil, (Series(evil, ((0.0, 1.0), (1.0, float(2)))), Series("one", ((3.0, 0.0),))), marks=(1,))
    root = ElementTree.fromstring(charts_module.draw(chart))
    assert root.get("aria-label") == evil and not list(root.iter("script"))
    assert json.loads(root.get("data-chart"))["labels"] == [evil, "one"]
    assert len(root.findall(".//circle")) == 1


def test_shares_are_drawn_on_the_whole_scale():
    series = (Series("a", ((0.0, 0.1), (1.0, 0.2))),)
    ends = []
    for share in (True, False):
        (line,) = ElementTree.fromstring(charts_module.draw(Chart("c", series, share))).iter("polyline")
        ends.append(float(line.get("points").split(",")[-1]))
    height = charts_module.HEIGHT - charts_module.TOP - charts_module.BOTTOM
    assert ends == pytest.approx([charts_module.TOP + 0.8 * height, charts_module.TOP], abs=0.1)


def test_curves_have_the_values_of_the_log_and_the_resumes():
    rows = [
        {"step": i, "attempt": i // 2, "reward/avg_raw_reward": i / 4, "reward/shop/avg_raw_reward": None}
        for i in range(4)
    ]
    rows[0]["eval/all/pass_at_1"] = 0.5
    rows[0]["eval/shop/pass_at_1"] = 0.75
    drawn = {chart.title: chart for chart in charts(rows)}
    reward = drawn["Reward and pass@1"]
    assert [s.points for s in reward.series] == [((0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)), ((0, 0.5),)]
    assert reward.marks == (2,)
    assert [s.label for s in drawn["Evaluation pass@1 per environment"].series] == ["shop"]
    assert "Training reward per environment" not in drawn
    assert charts([]) == ()


def test_of_many_environments_those_that_changed_are_drawn_and_the_title_says_so():
    gains = {f"e{i:02d}": 0.9 if i % 3 == 0 else 0.01 * i for i in range(20)}
    rows = [{"step": s, **{f"eval/{e}/pass_at_1": g * s for e, g in gains.items()}} for s in (0, 1)]
    (chart,) = charts(rows)
    assert chart.title == "Evaluation pass@1 per environment: 8 of 20 lines"
    assert [s.label for s in chart.series] == sorted(sorted(gains, key=lambda e: -gains[e])[:8])
    (few,) = charts([{"step": 0, "eval/e/pass_at_1": 0.5}])
    assert few.title == "Evaluation pass@1 per environment"


def test_thinned_points_keep_the_mean():
    points = [(float(i), float(i % 7)) for i in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100 and np.mean([y for _, y in few]) == pytest.approx(np.mean([y for _, y in points]))
    assert thin(points[:5], 100) == tuple(points[:5])


@pytest.mark.parametrize(
    ("values", "line"), [([0.5, 0.5], "▁▁"), (range(64), "▁▂▃▄▅▆▇█"), ([0, 0.5, 1], "▁▅█"), ([-1, -3, -2], "█▁▅")]
)
def test_sparkline(values, line):
    assert sparkline(values, 8) == line


@pytest.mark.parametrize(
    ("drawn", "rows"),
    [
        (1, [{"eval/all/pass_at_1": 0.1}]),
        (0, [{"other": 1.0}]),
        (1, [{"other": 1.0}, {"reward/avg_raw_reward": 0.3}]),
        (
            3,
            [{"eval/all/pass_at_1": 0.1, "eval/all/greedy_pass_at_1": 0.2}]
            + [
                {"reward/avg_raw_reward": i - 3.0, "policy/policy_entropy": 0.5, "policy/grad_norm": 1.0}
                for i in range(9)
            ],
        ),
    ],
)
def test_it_draws_partial_logs(tmp_path, drawn, rows):
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    for step, row in enumerate(rows):
        log.write(step, row)
    log.close()
    file = tmp_path / "plots" / "curve.svg"
    write_learning_curve(tmp_path / "metrics.jsonl", file, "run <1>")
    root = ElementTree.fromstring(file.read_text())
    assert len(root.findall(f"{SVG}svg")) == drawn
    assert "run <1>" in [text.text for text in root.iter(f"{SVG}text")]
    assert not re.search("href|url|import|script", file.read_text())


def test_an_empty_log_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl holds no step"):
        write_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.svg", "run")
