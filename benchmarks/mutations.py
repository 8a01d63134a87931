"""Measure how many defects the fast tests find: change single expressions of the package at random and run the tests.

    git clone . ../clone && (cd ../clone && ./setup.sh --dev)
    python benchmarks/mutations.py ../clone [--count 60] [--seed 0] [--under loop trainer] [--out mutations.json]

The fast tests run once to record which test files execute which line (kept in ``.venv/mutations``). Then the clone is
changed, one line at a time, and restored. For each mutation the test files that execute the line run, those of the
same subject first, until a test fails: the mutation is *killed*. Tests that fail in the unchanged clone are left out.
Lines that run on import or in a child process run in no test in particular: all test files that can depend on the
source file are tried. A mutation under which the tests take longer than ``--limit-s`` is killed, too. Prints a line for
each mutation and one line of JSON; with ``--out`` results are kept, and the same command continues after an
interruption. Equal seeds and equal sources give equal mutations.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import describe

EPISODE = (
    "tests/data", "tests/envs", "tests/embedded_fleet", "tests/agents", "tests/models/chat",
    "tests/rollout/test_worker.py",
)  # fmt: skip
"""Tests that run in the episode environment; see ``./test``."""
VARIABLES = {"OMP_NUM_THREADS": "1"}
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}


@dataclass(frozen=True)
class Mutation:
    """One changed line. ``line``: from 1. ``before``, ``after``: the line without its indentation."""

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """``killed_by``: the first failing test, or the time limit; ``None``: the mutation survived."""

    mutation: Mutation
    killed_by: str | None
    seconds: float


Execution = dict[tuple[str, int], set[str]]
"""(file, line) → test files that execute it; ``""``: on import, or in a child process."""


def mutations(checkout: Path) -> list[Mutation]:
    """All mutations of the package, in the order of its files and lines."""
    found = []
    for path in sorted((checkout / "megatron_fleet").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for number, start, end, text in replacements(ast.parse(source)):
            line = lines[number - 1].encode()
            after = (line[:start] + text.encode() + line[end:]).decode()
            if compiles(lines, number, after):
                file = str(path.relative_to(checkout))
                found.append(Mutation(file, number, lines[number - 1].strip(), after.strip()))
    return sorted(set(found), key=lambda m: (m.file, m.line, m.after))


def replacements(tree: ast.AST) -> Iterator[tuple[int, int, int, str]]:
    """(line, first byte, last byte, new text) of each change; all within one line."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.AnnAssign):
            pending += [node.value] if node.value else []  # not the annotation
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += node.body
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.expr | ast.stmt) and node.lineno == node.end_lineno:
            for start, end, text in of_node(node):
                yield node.lineno, start, end, text


def of_node(node: ast.expr | ast.stmt) -> Iterator[tuple[int, int, str]]:
    """(first byte, last byte, new text) of each change of this node itself."""
    start, end = node.col_offset, node.end_col_offset or 0
    match node:
        case ast.Compare(left, [operator], [right]) if left.end_lineno == right.lineno:
            yield left.end_col_offset or 0, right.col_offset, f" {COMPARISONS[type(operator)]} "
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield left.end_col_offset or 0, right.col_offset, f" {OPERATORS[type(operator)]} "
        case ast.BoolOp(operator, [first, second, *_]) if first.end_lineno == second.lineno:
            yield first.end_col_offset or 0, second.col_offset, " or " if isinstance(operator, ast.And) else " and "
        case ast.Constant(bool(value)):
            yield start, end, str(not value)
        case ast.Constant(int(value)):
            yield start, end, str(value + 1)
        case ast.Constant(float(value)):
            yield start, end, str(value + 1.0)
        case ast.UnaryOp(ast.Not(), operand):
            yield start, operand.col_offset, ""
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield start, end, "return None"
        case ast.Expr(ast.Call() | ast.Await()):
            yield start, end, "pass"


def compiles(lines: list[str], number: int, after: str) -> bool:
    """Return whether the file is still Python; a replaced operator may have stood beside a parenthesis."""
    try:
        ast.parse("\n".join([*lines[: number - 1], after, *lines[number:]]))
    except SyntaxError:
        return False
    return after != lines[number - 1]


def record_execution(checkout: Path) -> Execution:
    """Run the fast tests of both environments with coverage, unless an earlier call has.

    Raises ``RuntimeError`` if nothing was recorded.
    """
    folder = checkout / ".venv" / "mutations"
    folder.mkdir(exist_ok=True)
    # patch = subprocess: child processes record, too; what they execute belongs to no test.
    (folder / "coveragerc").write_text("[run]\nsource = megatron_fleet\npatch = subprocess\n", encoding="utf-8")
    execution: Execution = defaultdict(set)
    for environment in ("engine", "episode"):
        python = checkout / ".venv" / environment / "bin" / "python"
        report, data = folder / f"{environment}.json", folder / f"{environment}.coverage"
        if not python.exists():
            continue
        if not report.exists():
            cover = ["--cov", "--cov-context=test", "--cov-report=", f"--cov-config={folder / 'coveragerc'}"]
            variables = os.environ | VARIABLES | {"PYTHONPATH": str(checkout), "COVERAGE_FILE": str(data)}
            tests = [test for test in EPISODE if (checkout / test).exists()] if environment == "episode" else ["tests"]
            command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *cover, *tests]
            with (folder / f"{environment}.log").open("w", encoding="utf-8") as log:
                subprocess.run(command, cwd=checkout, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
            command = [str(python), "-m", "coverage", "json", "-q", "--show-contexts", "-o", str(report)]
            subprocess.run(command, cwd=checkout, env=variables, check=True)
        for file, found in json.loads(report.read_text(encoding="utf-8"))["files"].items():
            for line, contexts in found["contexts"].items():
                execution[file, int(line)].update(context.partition("::")[0] for context in contexts)
    if not execution:
        raise RuntimeError(f"no line of megatron_fleet was executed by the tests; see the logs in {folder}")
    return execution


def failing(checkout: Path) -> set[str]:
    """Tests that failed in `record_execution`, without any mutation."""
    logs = [checkout / ".venv" / "mutations" / f"{environment}.log" for environment in ("engine", "episode")]
    lines = [line for log in logs if log.exists() for line in log.read_text(encoding="utf-8").splitlines()]
    return {line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))}


def try_one(checkout: Path, mutation: Mutation, tests: list[str], limit_s: float) -> Verdict:
    """Change the line, run the tests and restore the file."""
    path, began = checkout / mutation.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    lines[mutation.line - 1] = lines[mutation.line - 1].replace(mutation.before, mutation.after, 1)
    path.write_text("".join(lines), encoding="utf-8")
    try:
        killed_by = run_tests(checkout, mutation.file, tests, began + limit_s)
    finally:
        path.write_text(source, encoding="utf-8")
    return Verdict(mutation, killed_by, round(time.monotonic() - began, 1))


def run_tests(checkout: Path, file: str, tests: list[str], end: float) -> str | None:
    """The first failing test of ``tests``, those of the subject of ``file`` first; ``None``: all pass."""
    near = Path("tests", *Path(file).parts[1:-1])
    first = [test for test in tests if near != Path("tests") and Path(test).is_relative_to(near)]
    for part in (first, [test for test in tests if test not in first]):
        for environment in ("engine", "episode"):
            chosen = [test for test in part if environment == "engine" or is_episode(checkout, test)]
            if chosen and (failed := first_failure(checkout, environment, chosen, end)):
                return failed
    return None


def statement(tree: ast.AST, line: int) -> range:
    """Lines of the smallest statement that ``line`` is part of, without the statements inside it."""
    found = range(line, line + 1)
    for node in ast.walk(tree):  # the outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            inner = [child.lineno for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            found = range(node.lineno, min([number for number in inner if number > line], default=node.end_lineno + 1))
    return found


def candidates(checkout: Path, mutation: Mutation, execution: Execution) -> list[str]:
    """Test files that can notice the mutation; none if no fast test executes the line."""
    tree = ast.parse((checkout / mutation.file).read_text(encoding="utf-8"))
    found = {test for line in statement(tree, mutation.line) for test in execution.get((mutation.file, line), ())}
    if found - {""}:
        return sorted(found - {""})
    return affected(checkout, mutation.file) if found else []


def affected(checkout: Path, file: str) -> list[str]:
    """Test files that a change of ``file`` can affect; all of them if the checkout has no tests/changed.py."""
    if (checkout / "tests" / "changed.py").exists():
        code = f"import changed; print(*changed.affected([{file!r}]), sep='\\n')"
        command = [str(checkout / ".venv/engine/bin/python"), "-c", code]
        done = subprocess.run(command, cwd=checkout / "tests", capture_output=True, text=True, check=True)
        return done.stdout.split()
    return [str(path.relative_to(checkout)) for path in sorted((checkout / "tests").rglob("test_*.py"))]


def is_episode(checkout: Path, test: str) -> bool:
    return any(Path(test).is_relative_to(folder) for folder in EPISODE)


def first_failure(checkout: Path, environment: str, tests: list[str], end: float) -> str | None:
    """The first failing test, ``error`` if pytest names none, or ``time limit``; ``None``: all pass."""
    python = checkout / ".venv" / environment / "bin" / "python"
    command = [str(python), "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect={test}" for test in sorted(failing(checkout))]
    variables = os.environ | VARIABLES | {"PYTHONPATH": str(checkout)}
    running = subprocess.Popen(
        command, cwd=checkout, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        kill_session(running.pid)
        running.wait()
    if running.returncode in (0, 5):  # 5: no test was selected
        return None
    failed = [line.split()[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "error"


def kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Share of random single-line defects that the fast tests find.")
    parser.add_argument("checkout", type=Path, help="a clean clone with both environments; it is changed and restored")
    parser.add_argument("--count", type=int, default=60, help="mutations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--under", nargs="+", default=[], help="draw from these packages alone, such as loop")
    parser.add_argument("--limit-s", type=float, default=1800, help="seconds for one mutation (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write, and to go on from")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    git = ["git", "-C", str(checkout)]
    if subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, check=True).stdout:
        parser.error(f"{checkout} has changes; give a clean clone")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    possible = [
        mutation for mutation in mutations(checkout) if not args.under or Path(mutation.file).parts[1] in args.under
    ]
    drawn = random.Random(args.seed).sample(possible, min(args.count, len(possible)))
    result = {"machine": describe(), "commit": commit, "seed": args.seed, "possible": len(possible), "verdicts": []}
    if args.out and args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        if (earlier["commit"], earlier["seed"]) != (commit, args.seed):
            parser.error(f"{args.out} holds results of another commit or seed; choose another file")
        result["verdicts"] = earlier["verdicts"][: len(drawn)]
    execution = record_execution(checkout) if len(result["verdicts"]) < len(drawn) else {}
    for number, mutation in enumerate(drawn[len(result["verdicts"]) :], start=len(result["verdicts"]) + 1):
        verdict = try_one(checkout, mutation, candidates(checkout, mutation, execution), args.limit_s)
        result["verdicts"].append(asdict(verdict))
        where = f"{mutation.file}:{mutation.line}: {mutation.before} → {mutation.after}"
        print(
            f"{number}/{len(drawn)} {verdict.killed_by or 'SURVIVED'} ({verdict.seconds:g} s) {where}", file=sys.stderr
        )
        result["killed"] = sum(v["killed_by"] is not None for v in result["verdicts"])
        if args.out:
            args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps({**result, "verdicts": len(result["verdicts"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
