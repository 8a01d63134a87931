"""`mfleet report` as a whole: what it says of a run, what it does when pieces are missing, how large a page gets."""

import json
import re

import pytest
from run_maker import RunMaker, groups

from megatron_fleet.analysis.render import html
from megatron_fleet.analysis.report import PAGE_LIMIT, build, write_report
from megatron_fleet.analysis.run import read_run
from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError


def table_row(text: str, *start: str) -> list[str]:
    """The cells of the first Markdown row that begins with these cells."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    return next(row for row in rows if row[: len(start)] == list(start))


def test_the_report_of_a_run(simple_run, capsys):
    assert main(["report", str(simple_run)]) == 0
    printed = capsys.readouterr().out
    assert "0.000 → 0.500" in printed and "bank: Too hard" in printed and str(simple_run / "report.html") in printed
    assert len(printed.splitlines()) <= 12
    page, text = ((simple_run / f"report.{kind}").read_text() for kind in ("html", "md"))
    rates = [r"+1.000 \[+1.000, +1.000\]", r"0.000 \[0.000, 0.000\]", r"1.000 \[1.000, 1.000\]"]
    assert table_row(text, "shop") == ["shop", "improved", *rates, "6", "0 → 0"]
    # The unknown rewards of `bank` are counted as such and lower nothing: its known ones are all 0.
    bank = table_row(text, "bank")
    assert (bank[1], bank[-1]) == ("failing", "6 → 0")
    assert table_row(text, "verifier unknown")[1:3] == ["6 (25 %)", "0 (0 %)"]
    assert table_row(text, "false completion")[1:3] == ["18 (75 %)", "12 (50 %)"]
    assert "1 train, 2 eval" in text and "abababababababab" in text and "**shop s0**" in text
    for section in (
        "summary",
        "environments",
        "curves",
        "signal",
        "behaviour",
        "errors",
        "differences",
        "trajectories",
    ):
        assert f'<section id="{section}">' in page
    assert page.count("<svg") >= 4 and "http://" not in page.replace("http://www.w3.org/", "")


def test_the_terminal_tells_first_of_environments_that_need_a_look(make_run: RunMaker, capsys):
    def collected(last: bool) -> list:
        rewards = {f"a{i}": 1.0 for i in range(9)} | {"worse": 0.0 if last else 1.0, "better": float(last)}
        return [g for env, r in rewards.items() for g in groups({f"{env}-{i}": [r] for i in range(6)}, env)]

    make_run.evaluate(0, collected(False)).evaluate(3, collected(True))
    assert main(["report", str(make_run.folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0] for line in printed if " → " in line][1:]
    assert len(printed) == 12 and names[:2] == ["worse", "better"] and names[2:] == sorted(names[2:])


@pytest.mark.parametrize(
    ("section", "rate", "rule"),
    [(None, "0.000 → 0.500", "at least 1 "), ({"pass_threshold": 0.5}, "0.500 → 1.000", "at least 0.5 ")],
)
def test_solved_is_what_the_runs_own_configuration_says(make_run: RunMaker, capsys, section, rate, rule):
    """Old configurations have no such key."""
    config = json.loads((make_run.folder / "config.json").read_text())
    (make_run.folder / "config.json").write_text(json.dumps(config | {"eval": section}))
    make_run.evaluate(0, groups({"a": [0.5], "b": [0.25]})).evaluate(4, groups({"a": [0.5], "b": [1.0]}))
    assert main(["report", str(make_run.folder)]) == 0
    assert rate in capsys.readouterr().out
    page = (make_run.folder / "report.html").read_text()
    assert f"its reward is {rule}" in page
    index = json.loads(re.search(r'<script[^>]*id="index"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    results = {(row[1], row[3]): row[7] for row in index}
    assert results["eval 0", "a"] == ("not solved" if section is None else "solved")
    assert (results["eval 0", "b"], results["eval 4", "b"]) == ("not solved", "solved")


def test_files_go_where_the_arguments_say(simple_run, tmp_path, capsys):
    page, text = tmp_path / "new" / "page.html", tmp_path / "text.md"
    assert main(["report", str(simple_run), "--out", str(page), "--markdown", str(text)]) == 0
    assert page.stat().st_size and text.stat().st_size and not (simple_run / "report.html").exists()


def test_bad_folders_are_one_sentence(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("{not json}\n{}\n")
    for name, reason in (("none", "no such folder"), ("empty", "holds neither"), ("broken", "line 1")):
        assert main(["report", str(tmp_path / name)]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be written"):
        (tmp_path / "run" / "trajectories").mkdir(parents=True)
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
        (tmp_path / "empty.html").mkdir()
        write_report(tmp_path / "run", tmp_path / "empty.html")


def test_a_report_replaces_nothing_but_reports(simple_run, tmp_path, capsys):
    """Found by fuzzing: ``--out`` with the name of a task file."""
    tasks = tmp_path / "tasks.json"
    tasks.write_text("[]")
    for option in ("--out", "--markdown"):
        assert main(["report", str(simple_run), option, str(tasks)]) == 2
        assert f"{option}={tasks}: the name must end in" in capsys.readouterr().err
    assert tasks.read_text() == "[]"


def remove(*patterns):
    return lambda run: [path.unlink() for pattern in patterns for path in run.glob(pattern)]


def cut_ends(run):
    for path in (run / "metrics.jsonl", run / "trajectories" / "eval_000004.parquet"):
        path.write_bytes(path.read_bytes()[:-40])


def damage(name, content=b"PK\x03\x04 nonsense"):
    return lambda run: (run / name).write_bytes(content)


def resume(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["attempt"] += 500 * (row["step"] >= 3)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (remove("trajectories/eval*", "trajectories/greedy*"), "no trajectories of an evaluation"),
        (remove("trajectories/eval_000004*", "trajectories/greedy_000004*"), "one evaluation only (step 0)"),
        (remove("trajectories/eval_000000*"), "one evaluation only (step 4)"),
        (remove("trajectories/*"), "no trajectories of an evaluation"),
        (remove("metrics.jsonl"), "there are no curves"),
        (remove("config.json"), "config.json: missing or unreadable"),
        (remove("split.json"), "split.json: missing or unreadable"),
        (cut_ends, "eval_000004.parquet cannot be read and was left out"),
        (damage("config.json", b"[1]"), "config.json: missing or unreadable"),
        (damage("trajectories/step_000002.parquet"), "step_000002.parquet cannot be read and was left out"),
        (resume, "resumed before step 3"),
    ],
)
def test_a_missing_piece_is_a_note_and_no_crash(simple_run, harm, note):
    harm(simple_run)
    write_report(simple_run)
    text = (simple_run / "report.md").read_text()
    assert note in text.replace("\\", "")
    assert note in (simple_run / "report.html").read_text()


def test_a_run_of_one_step_and_unknown_rewards_only(make_run: RunMaker):
    make_run.train(1, groups({"t": [None, None]}))
    write_report(make_run.folder)
    text = (make_run.folder / "report.md").read_text()
    assert "Only one training step was finished" in text and "no gradient" not in text


def test_evaluations_of_unknown_rewards_only_have_no_figures(make_run: RunMaker):
    for step in (0, 3):
        make_run.evaluate(step, groups({"t": [None, None]}))
    write_report(make_run.folder)
    text = (make_run.folder / "report.md").read_text()
    assert table_row(text, "pass@1, training temperature")[1:] == ["– → –", "step 0, step 3"]
    assert table_row(text, "shop") == ["shop", "unknown", "–", "–", "–", "0", "2 → 2"]


def test_without_an_evaluation_training_tells_of_turns_tools_and_errors(make_run: RunMaker, capsys):
    for step, calls, said in ((1, 1.0, "HTTP 404"), (2, 3.0, "fine"), (4, 2.0, "database is locked")):
        said = [("user", "do it"), ("tool", f"Error: {said}")]
        make_run.train(step, groups({"t": [0.0, 1.0]}, messages=said, metrics={"tool_calls": calls}))
    assert main(["report", str(make_run.folder)]) == 0
    assert "shop:" not in capsys.readouterr().out  # rewards of different tasks say nothing of a change
    text = (make_run.folder / "report.md").read_text()
    assert "Per episode of training." in text and "Episodes of training;" in text
    assert [row[:4] for row in (table_row(text, "shop", step) for step in "14")] == [
        ["shop", "1", "1.00", "1.00"],
        ["shop", "4", "1.00", "2.00"],
    ]
    assert table_row(text, "not found")[1:3] == ["2 (100 %)", "0 (0 %)"]
    assert table_row(text, "server errors")[1:3] == ["0 (0 %)", "2 (100 %)"]
    assert "There are no trajectories of an evaluation" in text and "pass@1," not in text


def test_one_evaluation_has_no_change(make_run: RunMaker):
    make_run.evaluate(0, groups({f"t{i}": [1.0, None] for i in range(3)}))
    write_report(make_run.folder)
    text = (make_run.folder / "report.md").read_text()
    assert table_row(text, "shop") == ["shop", "saturated", r"1.000 \[1.000, 1.000\]", "3", "3"]
    assert "No training step was finished" in text


def test_a_large_run_keeps_within_the_limit(make_run: RunMaker):
    said = [("system", "r" * 3000), ("user", "<&>" * 500), ("assistant", "é" * 30_000)]
    make_run.evaluate(0, groups({f"t{i}": [0.0] * 4 for i in range(30)}, messages=said, ids=list(range(3000))))
    make_run.evaluate(3, groups({f"t{i}": [1.0] * 4 for i in range(30)}, messages=said, ids=list(range(3000))))
    document, transcripts = build(read_run(make_run.folder), 1_000_000)
    page = html(document, transcripts)
    assert len(page) < 1_000_000 and len(transcripts.blobs) >= 5
    assert "did not fit into the page." in page.decode()
    assert PAGE_LIMIT == 20_000_000
    # Only trajectories that are on the page are linked.
    for link in re.findall(r'href="#trajectory=([^"]+)"', page.decode()):
        assert link in transcripts.blobs
