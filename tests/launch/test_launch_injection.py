"""Hostile values in every text that reaches a script or a manifest: refused by a sentence that names the key, or read
back exactly as they were given, with no line, command or field beside them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from turns import in_turn
from waiting import HANG_S

from megatron_fleet.config import keys
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import dump_resolved, load, load_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.job import Job, Launcher
from megatron_fleet.launch.kubernetes import Kubernetes
from megatron_fleet.launch.plan import plan_of
from megatron_fleet.launch.skypilot import SkyPilot
from megatron_fleet.launch.slurm import Slurm

MARK = "zq17x"
"""A harmless value: it shows where a value goes."""
NAME = "gcp"
"""A name in mappings that every key takes: a variable, a label, a place of SkyPilot."""
CONTROL = (
    *("\n", "\r", "\r\n", "\x00", "\x08", "\t", "\x0b", "\x0c", "\x1b[2J", "\x1b]0;", "\x7f", "\x85"),
    *("\u2028", "\u2029"),
)
AFTER_CONTROL = ("#SBATCH --uid=0", "touch pwned", "key: value", '"')
ODD = (
    *("'", '"', "''", '""', "'\"", "\\", "\\\\", "\\'", '\\"', "\\n", "\\x0a", "`", "``", "`touch pwned`"),
    *("$(touch pwned)", "${HOME}", "$HOME", "$$", "$$(HOME)", "$(HOME)", "$((1/0))", "${IFS}", "!x", "*", "?", "[a]"),
    *(";touch pwned", "&touch pwned", "|touch pwned", "||x", "&&x", ">pwned", "<pwned", ">(touch pwned)", "<<EOF"),
    *("#", " #SBATCH --uid=0", "#SBATCH --uid=0", "# hetjob", "%", "%j", "%%", "%a", "--next", "-x", "--uid=0", "="),
    *("a=b", ": ", "a: b", "{a: b}", "{", "}", "[", "]", "- a", "? a", "| ", "> ", "&a", "*a", "@a", "<<: *a", "!!x"),
    *("!!python/name:os.system", "!!binary x", "null", "~", "true", "no", "0", "1e3", "0x10", "1_000", "2020-01-01"),
    *(".inf", "{{ a }}", " ", "  a", "a  ", ",", "a,b", ":", "::", ":ro", "é", "中", "\U0001d54f", "\u202e", "\ufeff"),
    *("\u00a0", "\u200b"),
)
WITH_CONTROL = tuple(f"a{end}{after}" for end, after in product(CONTROL, AFTER_CONTROL))
WITHOUT_CONTROL = tuple(form.format(odd) for form, odd in product(("{}", "a{}b"), ODD))
FORMS = {"run.out": "/out/a{}a", "launch.kubernetes.volumes": "{}:/mnt/{}"}
"""Values of keys that take no others than of a certain form."""
COMMON = ("experiment=qwen3_8b_fleet", "model.path=/m", "env.fleet.package=/p", "run.id=a")
STORE = "checkpoint.store.url=s3://b/p"
SLURM = ["cluster=slurm", "launch.install=true", "rollout.engine.colocated=false", "launch.slurm.rollout_hosts=1"]
SKYPILOT = ["cluster=skypilot", f"launch.skypilot.infra=[{NAME}]", STORE]
JOBS: dict[str, tuple[Launcher, list[str]]] = {
    "slurm": (Slurm(), SLURM),
    "kubernetes": (Kubernetes(), ["cluster=kubernetes", "launch.image=a", STORE]),
    "skypilot": (SkyPilot(), SKYPILOT),
    "skypilot with an image": (SkyPilot(), [*SKYPILOT, "launch.image=a", "launch.install=false"]),
}
Place = tuple[str, str]
"""A key, and in which way it takes a text: alone, as an item, as a value or as a name in a mapping."""
ARGUMENT, VARIABLE = ("an override", "alone"), ("a variable of this shell", "alone")
SHOWN_NOWHERE = {
    *(("run.name", "alone"), ("run.project", "alone"), ("launch.secrets", "item"), ("launch.slurm.time", "alone")),
    *(("launch.skypilot.spot", "item"), ("launch.skypilot.images", "name")),
}
"""A name of letters and digits is made of the first, the second is for the run alone, the third names variables of this
shell, the others but for the time name what is in launch.skypilot.infra."""


def places() -> list[Place]:
    """Every place for a text in the sections `launch` and `run`, and what else the launchers read."""
    found: list[Place] = []
    for key in keys.leaves():
        if key.name.partition(".")[0] in ("launch", "run") or key.name == "env.fleet.package":
            kind = key.accepts.partition(" or null")[0]
            if kind == "text":
                found.append((key.name, "alone"))
            elif kind == "list of text":
                found.append((key.name, "item"))
            elif kind.startswith("{name: "):
                found += [(key.name, "value"), (key.name, "name")]
            else:
                assert "text" not in kind and "any value" not in kind, f"{key.name}: how does it take a text?"
    return found


def put(tree: dict[str, Any], place: Place, value: str) -> None:
    """Set a text in a resolved configuration."""
    key, way = place
    *sections, last = key.split(".")
    for section in sections:
        tree = tree[section]
    text = FORMS.get(key, "{}").replace("{}", value)
    if way in ("alone", "item"):
        tree[last] = text if way == "alone" else [*(tree[last] or ()), text]
    else:
        tree[last] = {**tree[last], **({NAME: text} if way == "value" else {text: "x"})}


class Launching:
    """Jobs of one kind with texts in several places."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._launcher, words = JOBS[kind]
        self._tree = json.loads(dump_resolved(load([*COMMON, *words])))
        self._file = folder / "config.json"
        self._harmless: dict[frozenset[Place], dict[tuple[Any, ...], Any]] = {}

    def config(self, texts: Mapping[Place, str]) -> Config:
        tree = deepcopy(self._tree)
        for place, text in sorted(texts.items()):
            if place not in (ARGUMENT, VARIABLE):
                put(tree, place, text)
        self._file.write_text(json.dumps(tree))
        return load_resolved(self._file)

    def job(self, texts: Mapping[Place, str]) -> Job:
        argument, variable = texts.get(ARGUMENT), texts.get(VARIABLE)
        words = ["experiment=x", *([] if argument is None else [f"model.path={argument}"])]
        job = plan_of([self.config(texts)], [words], {} if variable is None else {"HF_HOME": variable})
        self._launcher.check(job)
        return job

    def without_form(self) -> set[Place]:
        """Places that take other texts than those of letters, digits and a few marks."""
        free = set[Place]()
        for place in places():
            try:
                self.config({place: "a 'b"})
            except UserError:
                continue
            free.add(place)
        return free

    def refused(self, texts: Mapping[Place, str]) -> str | None:
        """The sentence with which a job is refused, or ``None``."""
        try:
            self.job(texts)
        except UserError as error:
            return str(error)
        return None

    def accepted(self, texts: Mapping[Place, str]) -> dict[Place, str]:
        """Leave out what is refused; each sentence names a key."""
        left = dict(texts)
        while (said := self.refused(left)) is not None:
            named = [place for place in left if re.search(rf"{re.escape(place[0])}\b", said)]
            assert named, said
            left = {place: text for place, text in left.items() if place not in named}
        return left

    def read_back(self, texts: Mapping[Place, str]) -> dict[tuple[Any, ...], Any]:
        """Render a job, and read its file as those do for whom it is made; all values by their paths."""
        rendered = self._launcher.render(self.job(texts))
        ((name, text),) = rendered.files.items()
        if name.endswith(".yaml"):
            read = read_task if isinstance(self._launcher, SkyPilot) else read_jobset
            return dict(flat(read(yaml.load(text, yaml.CSafeLoader))))
        return dict(flat({"script": read_script(text), "words": list(rendered.commands[0][3:])}))

    def expected(self, where: frozenset[Place], text: str) -> dict[tuple[Any, ...], Any]:
        """What `read_back` must say with one text in several places, from where a harmless one goes."""
        if where not in self._harmless:
            self._harmless[where] = self.read_back(dict.fromkeys(where, MARK))
        return {
            tuple(instead_of_mark(part, text) for part in path): instead_of_mark(value, text)
            for path, value in self._harmless[where].items()
        }


def instead_of_mark(value: Any, text: str) -> Any:
    return value.replace(MARK, text) if isinstance(value, str) else value


def flat(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all values of a tree with their paths."""
    if isinstance(tree, dict | list) and tree:
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(inner, (*path, key))
    else:
        yield path, tree


def read_script(text: str) -> dict[str, Any]:
    """Read a batch script as sbatch and bash do: options before the first command, and variables that it exports."""
    head, rest = text.split("\nset -euo pipefail\n", 1)
    options: list[str] = []
    for line in head.split("\n"):
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            lexer = shlex.shlex(line.removeprefix("#SBATCH"), posix=True, punctuation_chars=False)
            lexer.whitespace_split, lexer.commenters, lexer.escapedquotes = True, "#", "\"'"
            options += [re.sub(r"^--job-name=[\w.-]+$", "--job-name", word) for word in lexer]
    # As slurmd reads the name of a log.
    options = [word.replace("%%", "%") if word.startswith("--output=") else word for word in options]
    command = ["bash", "--norc", "-c", f"{head}\nenv -0"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=HANG_S, check=True)
    assert done.stderr == b""
    variables = dict(one.split("=", 1) for one in done.stdout.decode().split("\0") if one)
    return {
        "options": options,
        "variables": {n: v for n, v in variables.items() if n not in ("_", "PWD")},
        "rest": rest,
    }


def read_jobset(tree: dict[str, Any]) -> dict[str, Any]:
    """Read a JobSet as the kubelet does, which expands arguments and values of variables."""
    host = tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    host["args"] = [expanded(text) for text in host["args"]]
    for variable in host["env"]:
        if "value" in variable:
            variable["value"] = expanded(variable["value"])
    return tree


def expanded(text: str) -> str:
    """Replace ``$(NAME)`` where the variable is known; ``$$`` is a dollar sign: the API's rule for `args` and `env`."""
    return re.sub(r"\$\$|\$\(HOME\)", lambda match: "$" if match[0] == "$$" else "/root", text)


def read_task(tree: dict[str, Any]) -> dict[str, Any]:
    """Read a task of SkyPilot as its `run` section does."""
    tree["envs"]["MFLEET_ARGUMENTS"] = shlex.split(tree["envs"]["MFLEET_ARGUMENTS"])
    return tree


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "commit", lambda: "abc")


def test_every_place_for_a_text_shows_in_some_file(tmp_path):
    """A key that is rendered nowhere would pass the checks below."""
    marks = {place: f"{MARK}{index:03}" for index, place in enumerate(places()) if place not in SHOWN_NOWHERE}
    shown: set[Place] = set()
    for kind in JOBS:
        launching = Launching(kind, tmp_path)
        told = str(launching.read_back(launching.accepted(marks)))
        shown |= {place for place, mark in marks.items() if mark in told}
    assert shown == marks.keys()


@pytest.mark.parametrize("texts", [WITH_CONTROL[:1], pytest.param(WITH_CONTROL, marks=pytest.mark.slow)])
def test_line_ends_and_control_characters_are_refused_by_their_key(texts, tmp_path):
    launching = Launching("slurm", tmp_path)
    for place, text in product(places(), texts):
        said = launching.refused({place: text})
        assert said is not None and place[0] in said and "\n" not in said, (place, text, said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_turn(JOBS))
def test_what_is_not_refused_is_read_back_exactly(kind, tmp_path):
    launching, accepted = Launching(kind, tmp_path), set[Place]()
    where = [*launching.without_form(), ARGUMENT, VARIABLE]
    for text in WITHOUT_CONTROL:
        texts = launching.accepted(dict.fromkeys(where, text))
        assert launching.read_back(texts) == launching.expected(frozenset(texts), text), text
        accepted |= texts.keys()
    assert not Path("pwned").exists()
    assert {ARGUMENT, VARIABLE, ("run.name", "alone"), ("launch.environment", "value")} <= accepted


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_turn(JOBS))
def test_arguments_and_variables_of_this_shell_keep_their_line_ends(kind, tmp_path):
    launching, where = Launching(kind, tmp_path), frozenset({ARGUMENT, VARIABLE})
    for end, after in product(CONTROL, AFTER_CONTROL[::2]):
        if end == "\0":
            continue
        text = f"a{end}{after}"
        assert launching.read_back(dict.fromkeys(where, text)) == launching.expected(where, text), text
