"""The computed memory of runs that others published is near to what they measured."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import memory_points

LARGEST_ERROR = 0.16


def test_the_error_is_bounded():
    points = memory_points.POINTS
    errors = {f"{p.model} {memory_points.layout(p)}": memory_points.predicted(p) / p.measured - 1 for p in points}
    assert len(errors) == len(points) >= 6
    assert {name: error for name, error in errors.items() if abs(error) > LARGEST_ERROR} == {}
    assert sum(abs(error) for error in errors.values()) / len(errors) < 0.09


def test_host_memory_of_a_rank():
    assert abs(memory_points.host_predicted() / memory_points.HOST_MEASURED - 1) < 0.05


def test_layouts_of_one_model_are_ranked_as_they_were_measured():
    for model in ("Llama-3-70B", "Moonlight-16B-A3B"):
        several = [p for p in memory_points.POINTS if p.model == model]
        assert len(several) > 1
        assert sorted(several, key=memory_points.predicted) == sorted(several, key=lambda p: p.measured)
