"""The command line: fast, and every bad end is one line."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("hydra")

from megatron_fleet import __version__, cli
from megatron_fleet.config.errors import UserError


def mfleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_fleet.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | environment,
    )


def test_help_is_fast():
    """It imports a few modules, and no other package."""
    program = """
import sys
before = set(sys.modules)
from megatron_fleet import cli
try:
    cli.main(["--help"])
except SystemExit as end:
    assert not end.code
imported = sys.modules.keys() - before
assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"megatron_fleet"}, imported
assert len(imported) < 80, imported
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_version():
    assert mfleet("--version").stdout.strip() == f"megatron_fleet {__version__}"


def test_user_error_is_one_line_and_status_2():
    done = mfleet("train", "experiment=quickstart", "run.stps=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: Override 'run.stps=1': there is no key run.stps; did you mean run.steps?\n"


def test_unknown_option_is_refused():
    done = mfleet("train", "--fast")
    assert done.returncode == 2
    assert "unknown argument --fast" in done.stderr


def test_config_prints_yaml_that_says_the_same(tmp_path):
    import yaml

    from megatron_fleet.config.load import load

    overrides = ["experiment=quickstart", "run.steps=7"]
    printed = yaml.safe_load(mfleet("config", *overrides).stdout)
    assert printed == load(overrides).model_dump(mode="json")


def test_overrides_may_follow_options(monkeypatch):
    seen = []
    monkeypatch.setattr("megatron_fleet.config.load.load", lambda overrides: seen.append(overrides))
    monkeypatch.setattr("megatron_fleet.preflight.checks.check_training", lambda config: None)
    cli._load(cli._parse(["train", "a=1", "--out", "x", "b=2"]))
    assert seen == [["a=1", "b=2", "run.out=x"]]


def test_resolved_excludes_overrides(capsys):
    assert cli.main(["train", "--resolved", "c.json", "run.steps=1"]) == 2
    assert "--resolved" in capsys.readouterr().err


def fail_with(monkeypatch, error: BaseException, out: Path) -> int:
    def load(_args):
        _args.out = out
        raise error

    monkeypatch.setattr(cli, "_load", load)
    return cli.main(["train"])


def test_ctrl_c_is_one_line_and_status_130(monkeypatch, capsys, tmp_path):
    assert fail_with(monkeypatch, KeyboardInterrupt(), tmp_path) == 130
    assert capsys.readouterr().err == "mfleet: stopped by Ctrl-C.\n"


def test_unexpected_error_leaves_its_traceback_in_the_outputs(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    assert fail_with(monkeypatch, RuntimeError("boom\nmore"), tmp_path / "new") == 1
    log = tmp_path / "new" / "error.log"
    assert capsys.readouterr().err == f"error: RuntimeError: boom (traceback in {log})\n"
    assert "Traceback" in log.read_text()
    assert "boom\nmore" in log.read_text()


def test_traceback_survives_outputs_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    assert fail_with(monkeypatch, RuntimeError("boom"), tmp_path / "file") == 1
    assert str(tmp_path / "temporary") in capsys.readouterr().err


COMMANDS = (
    *("train", "eval", "launch", "rank", "node", "plan", "config", "data inspect T", "data export T"),
    *("convert to-megatron A OUT", "convert to-hf A OUT", "convert inspect A", "convert verify A B", "report R"),
    *("convert check A C", "doctor --quick", "data prepare T --out OUT", "data from T --prompt q --out OUT.json"),
    *("top R", "runs list", "runs show R", "runs diff R S", "runs compare R S", "runs prune R", "trajectories R"),
    *("debug replay D", "tune precision", "tune trainer", "tune engine"),
    *("model extend A OUT --factor 2 --original 8", "model make-random OUT", "model fetch A"),
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("out", ["a", "s3://bucket/a"])
def test_no_command_ends_with_a_traceback(monkeypatch, capsys, tmp_path, command, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    args = cli._parse(command.replace("OUT", out).split())
    args.run = lambda _: (_ for _ in ()).throw(RuntimeError("boom"))
    monkeypatch.setattr(cli, "_parse", lambda argv: args)
    assert cli.main([]) == 1
    said = re.fullmatch(r"error: RuntimeError: boom \(traceback in (.*)\)\n", capsys.readouterr().err)
    assert "RuntimeError: boom" in Path(said[1]).read_text() and len(list(tmp_path.iterdir())) == 1


def test_these_are_all_commands():
    def leaves(parser, name=""):
        groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found = [leaf for g in groups for n, sub in g.choices.items() for leaf in leaves(sub, f"{name} {n}".strip())]
        return found or [name]

    assert {tuple(c.split()[:2]) for c in COMMANDS} >= {
        tuple(leaf.split()) for leaf in leaves(cli._parser()) if " " in leaf
    }
    assert {c.split()[0] for c in COMMANDS} == {leaf.split()[0] for leaf in leaves(cli._parser())}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\x1b[31mb\x07\r\nc\x00", r"a\x1b[31mb\x07\r\nc\x00"),
        ("\ud800 \u202e \u2028", r"\ud800 \u202e \u2028"),
        ("größer 中文 😀", "größer 中文 😀"),
    ],
)
def test_a_message_quotes_nothing_that_a_terminal_obeys(monkeypatch, capsys, tmp_path, said, shown):
    assert fail_with(monkeypatch, UserError(said), tmp_path) == 2
    assert capsys.readouterr().err == f"error: {shown}\n"


def test_a_message_is_short_whatever_it_quotes(monkeypatch, capsys, tmp_path):
    assert fail_with(monkeypatch, UserError(f"{'x' * 100_000} is not a name; choose another."), tmp_path) == 2
    printed = capsys.readouterr().err
    assert len(printed) < 2100 and "characters] x" in printed and printed.endswith("is not a name; choose another.\n")


@pytest.mark.parametrize("argument", ["\x1b[31m", "\ud800", "--\x07"])
def test_an_unknown_argument_is_quoted_escaped(capsys, argument):
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--no-such-option", argument] if argument[0] != "-" else ["config", argument])
    said = capsys.readouterr().err.removesuffix("\n")
    assert ended.value.code == 2 and all(line.isprintable() for line in said.splitlines())


def test_a_path_that_cannot_be_used_is_something_to_mend(capsys, tmp_path):
    for path, reason in ((f"/proc/x/{'y' * 5}.json", "No such file"), (str(tmp_path / ("x" * 300)), "too long")):
        assert cli.main(["data", "export", path]) == 2
        said = capsys.readouterr().err
        assert reason in said and "; name another path" in said and said.count("\n") == 1


def test_user_error_from_any_command(monkeypatch, capsys, tmp_path):
    assert fail_with(monkeypatch, UserError("do this instead."), tmp_path) == 2
    assert capsys.readouterr().err == "error: do this instead.\n"


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m megatron_fleet.cli config experiment=quickstart | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "run:\n"
    assert done.stderr == ""
