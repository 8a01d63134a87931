"""Find episodes in the files of a run, print them, export them: ``mfleet trajectories``."""

from __future__ import annotations

import fnmatch
import html
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fleet.analysis import fleet_layout
from megatron_fleet.analysis.episodes import Episode, shown
from megatron_fleet.analysis.run_files import TRAJECTORIES, RunFiles
from megatron_fleet.analysis.transcripts import thumbnails
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.storage.local import os_errors_as_user_error, write_atomically
from megatron_fleet.storage.open import open_folder
from megatron_fleet.telemetry import shards
from megatron_fleet.telemetry.shards import RECORD, SCALARS, SUFFIX, Shard
from megatron_fleet.telemetry.trajectories import FILE_NAME

KINDS = {"train": "step", "eval": "eval", "greedy": "greedy"}
"""Kind as the user says it → as files are called."""
LINES = ".jsonl"
MAX_ON_PAGE = 2000
"""Episodes of an exported page; a browser is slow with more."""
IMAGE_BYTES = 16_000_000


@dataclass(frozen=True, slots=True)
class Query:
    """What an episode must be like; ``None`` and an empty text match everything.

    Attributes:
        kinds: ``step``, ``eval`` or ``greedy``.
        steps: first and last.
        env, task, outcome: patterns with ``*`` and ``?``.
        rewards: lowest and highest; an unknown reward is in no range.
        unknown: whether the reward must be unknown.
        text: in a message, the reason of the reward or the final answer, whatever the case of its letters.
        ids: the only ones, as ``step-12-3``.
    """

    kinds: tuple[str, ...] | None = None
    steps: tuple[int, int] | None = None
    env: str | None = None
    task: str | None = None
    outcome: str | None = None
    rewards: tuple[float, float] | None = None
    unknown: bool = False
    text: str = ""
    ids: tuple[str, ...] = ()

    def has(self, kind: str, step: int) -> bool:
        """Return whether episodes of this step may match."""
        if self.ids and not any(name.startswith(f"{kind}-{step}-") for name in self.ids):
            return False
        return (self.kinds is None or kind in self.kinds) and (
            self.steps is None or self.steps[0] <= step <= self.steps[1]
        )

    def matches(self, record: Mapping[str, Any], name: str) -> bool:
        """Return whether an episode matches, apart from its text. ``name``: its id."""
        if self.ids and name not in self.ids:
            return False
        patterns = ((self.env, record["env"]), (self.task, record["task"]), (self.outcome, record["outcome"]))
        if any(pattern is not None and not fnmatch.fnmatchcase(value, pattern) for pattern, value in patterns):
            return False
        reward = record["reward"]
        if self.unknown:
            return reward is None
        return self.rewards is None or (reward is not None and self.rewards[0] <= reward <= self.rewards[1])

    def says(self, record: Mapping[str, Any]) -> bool:
        """Return whether an episode has the text."""
        wanted = self.text.casefold()
        texts = [record["reason"], record["final_answer"] or "", *(m["content"] for m in record["messages"])]
        return any(wanted in text.casefold() for text in texts)


@dataclass(slots=True)
class StepFile:
    """Episodes of one step or evaluation. ``shard`` opens the file; in Fleet's layout the episodes are read already."""

    kind: str
    step: int
    shard: Callable[[], Shard] | None = None
    read: Callable[[], list[Episode]] | None = None


@dataclass(slots=True)
class Found:
    """Episodes of a step that match.

    Attributes:
        total: number of episodes in the file.
        matching: number of those that match.
        rows: rows in the file of those that are wanted.
        records: the same as objects, as `Shard.records` gives them.
    """

    file: StepFile
    total: int = 0
    matching: int = 0
    rows: list[int] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    shard: Shard | None = None

    def ids(self) -> list[str]:
        return [f"{self.file.kind}-{self.file.step}-{row}" for row in self.rows]

    def table(self) -> Any:
        """Return the rows with all columns, as an Arrow table."""
        import pyarrow as pa

        if self.shard is not None:
            return self.shard.table(self.rows)
        return pa.Table.from_pylist([_row(record) for record in self.records], schema=shards.schema())


class Place:
    """Files of episodes at an address: a run, a folder of shards, a single file, each local or in a store."""

    def __init__(self, address: str) -> None:
        """List the files.

        Raises:
            UserError: there are no files of episodes, or the store refuses.
        """
        self.address = address
        self.images: Path | None = None
        self._fetch: Callable[[Sequence[str]], None] = lambda names: None
        if address.endswith((SUFFIX, LINES)):
            self.files = [self._single(address)]
        else:
            self.files = self._shards(address) or self._run(address)
        if not self.files:
            raise UserError(f"{address} holds no trajectories; name a run's folder, its address in a store, or a file.")
        self.files.sort(key=lambda f: (f.step, f.kind))

    def image_folder(self, names: Sequence[str]) -> Path | None:
        """Return the folder of a run with these images, as far as they exist there."""
        if self.images is not None:
            self._fetch(names)
        return self.images

    def _single(self, address: str) -> StepFile:
        parent, _, name = address.rpartition("/")
        folder = open_folder(parent or ".")
        size = folder.sizes().get(name)
        if size is None:
            raise UserError(f"{address}: there is no such file; check the address.")
        if name.endswith(SUFFIX):
            found = FILE_NAME.fullmatch(name)
            kind, step = (found[1], int(found[2])) if found else ("step", 0)
            return StepFile(kind, step, shard=lambda: Shard(folder, name, size))
        content = folder.read(name)
        kind = "eval" if b'"input_prompt"' in content[:1_000_000].partition(b"\n")[0] else "step"
        return StepFile(kind, 0, read=lambda: _lines(content, name, kind))

    def _shards(self, address: str) -> list[StepFile]:
        """List shards that are directly in a folder."""
        folder = open_folder(address)
        local = Path(address)
        if "://" not in address and not local.is_dir():
            raise UserError(f"{address}: there is no such folder or file; check the address.")
        names = [path.name for path in local.iterdir()] if "://" not in address else [*folder.sizes()]
        found = [(m, name) for name in names if (m := FILE_NAME.fullmatch(name))]
        if not found:
            return []
        sizes = folder.sizes()
        if "://" not in address:
            self.images = local.parent / shards.IMAGES
        return [
            StepFile(m[1], int(m[2]), shard=lambda name=name: Shard(folder, name, sizes[name]))  # type: ignore[misc]
            for m, name in found
        ]

    def _run(self, address: str) -> list[StepFile]:
        files = RunFiles(address)
        self.images = files.folder / shards.IMAGES

        def fetch_images(names: Sequence[str]) -> None:
            wanted = set(names)
            files.fetch(n for n in files.names if n.startswith("images/") and Path(n).stem in wanted)

        def open_shard(name: str) -> Shard:
            files.fetch([name])
            return Shard.open(files.folder / name)

        def read_lines(names: Sequence[str], kind: str, step: int) -> list[Episode]:
            files.fetch(names)
            return fleet_layout.read_files([files.folder / name for name in names], kind, step, 1.0)[0]

        self._fetch = fetch_images
        found = []
        for name in files.names:
            if m := FILE_NAME.fullmatch(name.removeprefix(f"{TRAJECTORIES}/")):
                found.append(StepFile(m[1], int(m[2]), shard=lambda name=name: open_shard(name)))  # type: ignore[misc]
        ours = {(f.kind, f.step) for f in found}
        for (kind, step), names in fleet_layout.files_of_sets(files.names).items():
            if (kind, step) not in ours:
                read = lambda names=names, kind=kind, step=step: read_lines(names, kind, step)  # noqa: E731
                found.append(StepFile(kind, step, read=read))
        return found


def _lines(content: bytes, name: str, kind: str) -> list[Episode]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        return fleet_layout.read_files([path], kind, 0, 1.0)[0]


def find(place: Place, query: Query, limit: float) -> Iterator[Found]:
    """Yield what matches, step by step; a file that is damaged is named on stderr and left out.

    Args:
        limit: episodes that are wanted; further ones are only counted.
    """
    for file in place.files:
        if query.has(file.kind, file.step):
            try:
                found = _of_shard(file, query, limit) if file.shard is not None else _of_lines(file, query)
            except (UserError, OSError) as error:
                say(str(error), sys.stderr)
                continue
            wanted = int(min(limit, len(found.rows)))
            found.rows, found.records = found.rows[:wanted], found.records[:wanted]
            limit -= wanted
            yield found


def _of_shard(file: StepFile, query: Query, limit: float) -> Found:
    assert file.shard is not None
    shard = file.shard()
    light = enumerate(shard.records(SCALARS))
    rows = [row for row, record in light if query.matches(record, f"{file.kind}-{file.step}-{row}")]
    found = Found(file, shard.rows, len(rows), rows if query.text else rows[: int(min(limit, len(rows)))], shard=shard)
    found.records = shard.records(RECORD, found.rows) if found.rows else []
    if query.text:
        kept = [i for i, record in enumerate(found.records) if query.says(record)]
        found.rows, found.records = [found.rows[i] for i in kept], [found.records[i] for i in kept]
        found.matching = len(kept)
    return found


def _of_lines(file: StepFile, query: Query) -> Found:
    assert file.read is not None
    found = Found(file)
    for episode in file.read():
        found.total += 1
        record = _record(episode)
        name = f"{file.kind}-{file.step}-{episode.line}"
        if query.matches(record, name) and (not query.text or query.says(record)):
            found.rows.append(episode.line)
            found.records.append(record)
    found.matching = len(found.rows)
    return found


def _record(e: Episode) -> dict[str, Any]:
    """Build the object of an episode of Fleet's layout, which has no tokens."""
    return {
        "task": e.task,
        "env": e.env,
        "group": 0,
        "sample": e.sample,
        "outcome": e.outcome,
        "reward": e.reward,
        "reason": e.reason,
        "final_answer": e.final_answer,
        "tokens": e.tokens,
        "action_tokens": e.action_tokens,
        "metrics": e.metrics,
        "segment_starts": [0],
        "spans": [],
        "image_spans": [],
        "messages": [{"role": role, "content": text} for role, text in e.messages],
    }


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "metrics": [{"name": name, "value": value} for name, value in record["metrics"].items()],
        "messages": [{"images": [], **message} for message in record["messages"]],
    }
    return {**record, **own, **{name: [] for name in (shards.IMAGES, *shards.TOKENS)}}


def line(name: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of an episode in a list."""
    turns = record["metrics"].get("turns", 0)
    where = f"{record['task']} #{record['sample']}"
    return name, record["env"], where, record["outcome"], reward_of(record), f"{turns:.0f}", str(record["tokens"])


HEADINGS = ("id", "environment", "task", "outcome", "reward", "turns", "tokens")


def reward_of(record: Mapping[str, Any]) -> str:
    """Return the reward as text."""
    return "unknown" if record["reward"] is None else f"{record['reward']:.3g}"


def conversation(name: str, record: Mapping[str, Any], colour: bool) -> str:
    """Return an episode as text for a terminal, without anything that a terminal obeys but the colours of roles."""

    def bold(text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if colour else text

    versions = sorted({span[4] for span in record["spans"] if span[0] == "action"})
    facts = [f"reward {reward_of(record)}", record["outcome"], f"{record['tokens']} tokens"]
    facts += [f"weights of version {', '.join(map(str, versions))}"] if versions else []
    title = f"{name} · {record['env']} · {record['task']} #{record['sample']}"
    lines = [bold("━━ " + shown(title)), shown(" · ".join(facts)), shown(f"reason: {record['reason']}")]
    for message in record["messages"]:
        lines += ["", bold(f"── {shown(message['role'])}"), *map(shown, message["content"].splitlines())]
        lines += [f"[image {digest}]" for digest in message.get("images", ())]
    if record["final_answer"] is not None:
        lines += ["", bold("── final answer"), *map(shown, record["final_answer"].splitlines())]
    return "\n".join(lines)


def export(place: Place, found: Sequence[Found], path: Path) -> int:
    """Write episodes to a file, of the kind that its name says; return how many.

    Raises:
        UserError: the name has no known ending, the file cannot be written, or a page would have too many episodes.
    """
    writers = {LINES: _as_lines, SUFFIX: _as_parquet, ".html": _as_page}
    if path.suffix not in writers:
        raise UserError(f"--out={path}: the name must end in {', '.join(writers)}.")
    data = writers[path.suffix](place, found)
    with os_errors_as_user_error(path, "written", len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return sum(len(f.rows) for f in found)


def _as_lines(place: Place, found: Sequence[Found]) -> bytes:
    rows = ({"id": name, "step": f.file.step, **r} for f in found for name, r in zip(f.ids(), f.records, strict=True))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace")


def _as_parquet(place: Place, found: Sequence[Found]) -> bytes:
    return shards.write([f.table() for f in found if f.rows])


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}summary{cursor:pointer;padding:.3rem 0}pre{white-space:pre-wrap;overflow-wrap:anywhere;
margin:.2rem 0 1rem;padding:.6rem;border:1px solid #8884;border-radius:6px}h4{margin:.8rem 0 .2rem}img{max-width:100%}
.bad{color:#c33}.good{color:#283}"""


def _as_page(place: Place, found: Sequence[Found]) -> bytes:
    if (count := sum(len(f.rows) for f in found)) > MAX_ON_PAGE:
        raise UserError(f"{count} episodes match and a page takes {MAX_ON_PAGE}; narrow the filters, or add --limit.")
    names = [d for f in found for r in f.records for m in r["messages"] for d in m.get("images", ())]
    folder = place.image_folder(names) if names else None
    pictures = thumbnails(folder.parent, names, IMAGE_BYTES) if folder is not None else {}
    body = [_article(name, r, pictures) for f in found for name, r in zip(f.ids(), f.records, strict=True)]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    title = html.escape(f"Trajectories of {shown(place.address)}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{count} episodes</p>{''.join(body)}</html>"
    )
    return page.encode("utf-8", "replace")


def _article(name: str, record: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    cells = " · ".join(html.escape(shown(cell)) for cell in line(name, record)[:4])
    tone = "" if record["reward"] is None else "good" if record["reward"] >= 1 else "bad"
    said = "".join(
        f"<h4>{html.escape(shown(m['role']))}</h4><pre>{html.escape(m['content'])}</pre>"
        + "".join(f'<img alt="" src="{pictures[d]}">' for d in m.get("images", ()) if d in pictures)
        for m in record["messages"]
    )
    result = f'reward <b class="{tone}">{reward_of(record)}</b>'
    return (
        f'<details id="{html.escape(name)}"><summary>{cells} · {result}</summary>'
        f"<p>{html.escape(record['reason'])}</p>{said}</details>"
    )
