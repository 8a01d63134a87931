"""The first minutes on a GPU machine: every check leaves a line, whatever becomes of it."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import pytest


@pytest.fixture
def first():
    import first

    return first


def lines(folder):
    return {line["step"]: line for line in map(json.loads, (folder / "first.jsonl").read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
def test_a_tiny_policy_is_that_of_the_cpu_and_comes_back_from_host_and_disk(first, tmp_path, capsys):
    options = ["--device", "cpu", "--minutes", "60", "--jobs", "1", "--out", str(tmp_path)]
    assert first.main(["policy", "addmm", "fp8_delayed", *options]) == 0
    found = lines(tmp_path / "cpu")
    assert found["policy"]["status"] == found["addmm"]["status"] == "ok"
    figures = found["policy"]["figures"]
    assert {figures[f"float32: {name}"] for name in ("logprobs", "loss", "grad_norm", "logprobs_after")} == {0}
    assert 0 < figures["bfloat16: logprobs"] < 0.05
    assert figures["bfloat16: offload and onload"] and figures["bfloat16: save and load"]
    assert (found["fp8_delayed"]["status"], found["fp8_delayed"]["says"]) == ("skipped", "there is no GPU")
    assert "3 of 3 checks are ok or skipped." in capsys.readouterr().out
    assert "in policy" in (tmp_path / "cpu" / "logs" / "first-policy.log").read_text(), "where its time went"


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_checks_that_die_or_hang_leave_a_line_and_the_next_one_is_made(first, tmp_path):
    from battery.checks import BY_NAME, Step

    dies = Step("none of these", lambda *_: None, "")
    hangs = dataclasses.replace(BY_NAME["machine"], limit_s=0.01)
    with first.First(tmp_path, "cuda", "", time.monotonic() + 3600) as made:
        said = [*made.run([dies, hangs, dataclasses.replace(BY_NAME["fp8_delayed"], limit_s=3600)], 1)]
    assert [line["status"] for line in said][:2] == ["failed", "failed"]
    assert "its process ended with status 1: KeyError: 'none of these'" in said[0]["says"]
    assert said[1]["says"] == "not over after 0 s"
    assert lines(tmp_path).keys() == {"none of these", "machine", "fp8_delayed"}


def test_after_the_minutes_nothing_is_begun(first, tmp_path):
    from battery.checks import STEPS

    with first.First(tmp_path, "cpu", "", time.monotonic()) as made:
        assert {line["status"] for line in made.run(STEPS[:2], 1)} == {"not run"}


@pytest.mark.parametrize(("difference", "status"), [(0.5, "ok"), (0.6, "wrong"), (math.nan, "wrong")])
def test_differences_beyond_their_tolerance_are_wrong(difference, status, tmp_path, monkeypatch, capsys):
    from battery import checks

    step = checks.Step("mine", lambda finding, folder: finding.compare("it", difference, 0.5), "")
    monkeypatch.setitem(checks.BY_NAME, "mine", step)
    assert checks.main("mine", tmp_path) == (status != "ok")
    line = json.loads(capsys.readouterr().out)
    assert line["status"] == status and (status == "ok" or line["says"].startswith("it: "))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["speed"], "there is no check speed; choose from machine, attention"),
        (["--jobs", "0"], "--jobs 0 is not above"),
    ],
)
def test_wrong_options_are_refused(first, options, message, capsys):
    with pytest.raises(SystemExit):
        first.main(options)
    assert message in capsys.readouterr().err
