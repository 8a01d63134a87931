"""`mfleet runs compare`: differences paired by task, what runs without common ground are, settings that differ."""

import json
from pathlib import Path

import numpy as np
import pytest
from run_maker import RunMaker, groups

from megatron_fleet.analysis.comparison import build, named, write_comparison
from megatron_fleet.analysis.document import Table
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.statistics import difference
from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError


def make(folder: Path, gain: float, lr: float, task: str = "t", last: int = 4) -> str:
    """Ten tasks of very different difficulty; each solved in ``gain`` more of its ten attempts after step 4 than 0."""
    maker = RunMaker(folder, name=folder.name)
    config = json.loads((folder / "config.json").read_text())
    config |= {"policy": {"optimizer": {"lr": lr}}}
    (folder / "config.json").write_text(json.dumps(config))

    def played(more: float) -> list:
        counts = [round(10 * min(1, i / 10 + more)) for i in range(10)]
        return groups({f"{task}{i}": [1.0] * n + [0.0] * (10 - n) for i, n in enumerate(counts)})

    maker.evaluate(0, played(0.0))
    maker.train(1, groups({"x": [0.0, 1.0]}))
    maker.evaluate(last, played(gain))
    return str(folder)


def tables(*places: str) -> dict[str, list[Table]]:
    document = build(named([read_run(place) for place in places]))
    return {s.id: [block for block in s.blocks if isinstance(block, Table)] for s in document.sections}


def row(table: Table, first: str) -> list[str]:
    return next([cell.text for cell in cells] for cells in table.rows if cells[0].text == first)


def test_a_paired_interval_is_as_narrow_as_the_differences_of_tasks():
    """Tasks differ much, runs little: only the paired interval shows that the difference is certain."""
    one = {f"t{i}": i / 10 for i in range(10)}
    found = difference(one, {task: value + 0.05 for task, value in one.items()})
    assert found.paired and found.estimate.tasks == 10
    assert np.allclose([found.estimate.value, found.estimate.low, found.estimate.high], 0.05)
    unpaired = difference(one, {f"other {task}": value + 0.05 for task, value in one.items()})
    assert not unpaired.paired and unpaired.estimate.value == pytest.approx(0.05)
    # Standard error of the difference of two means: 0.287 · √(2/10) = 0.128.
    assert unpaired.estimate.low == pytest.approx(0.05 - 1.96 * 0.128, abs=0.03)
    assert unpaired.estimate.high == pytest.approx(0.05 + 1.96 * 0.128, abs=0.03)
    # Only shared tasks count, where there are some.
    assert difference({"a": 0.0, "b": 0.0}, {"b": 1.0, "c": 0.0}).estimate.value == 1.0
    assert difference({}, one) is None


def test_runs_on_one_page(tmp_path, capsys):
    places = [make(tmp_path / "base", 0.1, 1.0), make(tmp_path / "better", 0.2, 2.0)]
    page = tmp_path / "new" / "page.html"
    assert main(["runs", "compare", *places, "--out", str(page)]) == 0
    printed = capsys.readouterr().out.splitlines()
    # 0.1 more in all tasks but the last, which both solve always.
    assert printed[0] == "base: pass@1, training temperature, step 4: 0.550 [0.370, 0.730]"
    assert "0.640" in printed[1] and "+0.090 [+0.070, +0.100] (10 shared tasks) against base" in printed[1]
    found = tables(*places)
    assert row(found["environments"][0], "shop")[-1] == "+0.090 [+0.070, +0.100]"
    assert found["environments"][0].rows[0][-1].tone == "good"
    assert [[cell.text for cell in cells] for cells in found["settings"][0].rows] == [
        ["policy.optimizer.lr", "1.0", "2.0"], ["run.name", "base", "better"],
    ]  # fmt: skip
    assert row(found["summary"][0], "better")[2:5] == ["+0.090 [+0.070, +0.100]", "10 shared tasks", "1"]
    content = page.read_text()
    assert content.count("<svg") >= 4 and 'id="tasks"' in content and "t8" in content


def test_runs_of_other_lengths_and_other_tasks(tmp_path):
    places = [
        make(tmp_path / "a", 0.1, 1.0),
        make(tmp_path / "b", 0.1, 1.0, last=8),
        make(tmp_path / "c", 0.1, 1.0, "o"),
    ]
    one = tables(*places)
    # a and b have step 0 in common only, and so has c, whose tasks are others.
    last, common = one["environments"]
    assert row(last, "shop")[2:4] == ["0.550 [0.370, 0.730]", "+0.000 [+0.000, +0.000]"]
    assert row(common, "shop")[1:3] == ["0.450 [0.270, 0.630]", "0.450 [0.270, 0.630]"]
    assert row(one["summary"][0], "c")[3] == "unpaired"
    low, high = (float(text) for text in row(last, "shop")[-1].split("[")[1][:-1].split(", "))
    assert low < -0.1 and high > 0.1


def test_what_cannot_be_compared_is_a_sentence(tmp_path):
    place = make(tmp_path / "a", 0.1, 1.0)
    for places, page, reason in (
        ([place], "page.html", "1 runs are named; name 2 to 8"),
        ([place] * 9, "page.html", "9 runs are named"),
        ([place, str(tmp_path / "none")], "page.html", "no such folder"),
        ([place, place], "tasks.json", "must end in .html"),
    ):
        with pytest.raises(UserError, match=reason):
            write_comparison(places, tmp_path / page)
    assert [one.label for one in named([read_run(place)] * 2)] == ["1 " + place, "2 " + place]
