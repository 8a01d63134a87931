"""Draw the diagrams of the documentation, ``docs/**/*.svg``. Usage: python tools/diagrams.py

Boxes stand on a grid; arrows go straight from the edge of one to the edge of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEP_X, STEP_Y = 214, 104
WIDTH, HEIGHT = 176, 60
MARGIN = 24
LINE = 16
INK, FAINT = "#24292f", "#5b6470"
FILLS = {"ours": "#dde4fb", "data": "#fdf0d5", "other": "#e4f2e7", "plain": "#f2f3f5"}
"""Our processes and commands; files and tensors; what others made (vLLM, environments); the rest."""


@dataclass(frozen=True, slots=True)
class Box:
    """Text in a box. ``column`` and ``row`` are places on the grid and may be fractions; ``wide``, ``high``: cells."""

    text: str
    column: float
    row: float
    kind: str = "ours"
    wide: float = 1
    high: float = 1

    @property
    def size(self) -> tuple[float, float]:
        return WIDTH + (self.wide - 1) * STEP_X, HEIGHT + (self.high - 1) * STEP_Y

    @property
    def middle(self) -> tuple[float, float]:
        width, height = self.size
        return MARGIN + self.column * STEP_X + width / 2, MARGIN + self.row * STEP_Y + height / 2


@dataclass(frozen=True, slots=True)
class Frame(Box):
    """A box around others: its text stands at the top."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one box to another, by name. ``ways`` 2: in both directions. ``shift`` moves it sideways, in pixels."""

    start: str
    end: str
    label: str = ""
    ways: int = 1
    dashed: bool = False
    shift: float = 0


@dataclass(frozen=True, slots=True)
class Diagram:
    """Boxes by name and arrows between them; ``title`` is read out to those who cannot see it."""

    title: str
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...] = field(default=())


def draw(diagram: Diagram) -> str:
    """Return the diagram as SVG."""
    right = max(box.middle[0] + box.size[0] / 2 for box in diagram.boxes.values()) + MARGIN
    bottom = max(box.middle[1] + box.size[1] / 2 for box in diagram.boxes.values()) + MARGIN
    frames = [box for box in diagram.boxes.values() if isinstance(box, Frame)]
    boxes = [box for box in diagram.boxes.values() if not isinstance(box, Frame)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom:.0f}" width="{right:.0f}" '
            f'height="{bottom:.0f}" font-family="system-ui, sans-serif" font-size="13" text-anchor="middle">',
            f"<title>{escape(diagram.title)}</title>",
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker>',
            f'<rect width="{right:.0f}" height="{bottom:.0f}" rx="8" fill="#fff"/>',
            *(_box(box) for box in frames),
            *(_arrow(arrow, diagram.boxes) for arrow in diagram.arrows),
            *(_box(box) for box in boxes),
            "</svg>\n",
        ]
    )


def _box(box: Box) -> str:
    (x, y), (width, height) = box.middle, box.size
    lines = box.text.split("\n")
    framed = isinstance(box, Frame)
    first = y - height / 2 + 18 if framed else y - (len(lines) - 1) * LINE / 2 + 5
    fill = "none" if framed else FILLS[box.kind]
    dash = ' stroke-dasharray="5 4"' if framed else ""
    rectangle = (
        f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" '
        f'fill="{fill}" stroke="#8a93a3"{dash}/>'
    )
    return rectangle + _text(lines, x, first, INK, bold=True)


def _text(lines: list[str], x: float, y: float, colour: str, bold: bool) -> str:
    weights = ["600" if bold else "400"] + ["400"] * (len(lines) - 1)
    return "".join(
        f'<text x="{x:.0f}" y="{y + i * LINE:.0f}" fill="{colour}" font-weight="{weight}">{escape(line)}</text>'
        for i, (line, weight) in enumerate(zip(lines, weights, strict=True))
    )


def _arrow(arrow: Arrow, boxes: dict[str, Box]) -> str:
    start, end = boxes[arrow.start], boxes[arrow.end]
    (x1, y1), (x2, y2) = start.middle, end.middle
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    right, down = (x2 - x1) / length, (y2 - y1) / length
    leave, arrive = _to_edge(start, right, down), _to_edge(end, right, down)
    aside, below = -down * arrow.shift, right * arrow.shift
    x1, y1 = x1 + right * leave + aside, y1 + down * leave + below
    x2, y2 = x2 - right * arrive + aside, y2 - down * arrive + below
    dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    both = ' marker-start="url(#tip)"' if arrow.ways == 2 else ""
    line = (
        f'<path d="M{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}" stroke="{FAINT}" stroke-width="1.5"{dash}{both} '
        'marker-end="url(#tip)"/>'
    )
    if not arrow.label:
        return line
    lines = arrow.label.split("\n")
    x, y = (x1 + x2) / 2, (y1 + y2) / 2 - (len(lines) - 1) * LINE / 2 + 4
    width = 6.4 * max(map(len, lines)) + 6
    paper = (
        f'<rect x="{x - width / 2:.0f}" y="{y - 13:.0f}" width="{width:.0f}" height="{len(lines) * LINE + 2}" '
        'fill="#fff"/>'
    )
    return line + paper + _text(lines, x, y, FAINT, bold=False)


def _to_edge(box: Box, right: float, down: float) -> float:
    """Return the way from the middle of ``box`` to its edge in the direction of a unit vector, with a gap."""
    width, height = box.size
    ways = [size / 2 / abs(part) for size, part in ((width, right), (height, down)) if abs(part) > 1e-9]
    return min(ways) + 3


DIAGRAMS = {
    "overview": Diagram(
        "Tasks become episodes, episodes become training data, and new weights go back to the engines.",
        {
            "tasks": Box("task file\nprompts and verifiers", 0, 0, "data"),
            "controller": Box("controller\nmfleet train", 1.4, 0),
            "trainer": Box("trainer\nMegatron-Core ranks", 3, 0),
            "environment": Box("environment\ntools and verdict", 0, 1.5, "other"),
            "worker": Box("episode workers\nRay", 1.4, 1.5),
            "engine": Box("engines\nvLLM", 3, 1.5, "other"),
        },
        (
            Arrow("tasks", "controller"),
            Arrow("controller", "trainer", "training data"),
            Arrow("controller", "worker", "tasks", shift=-40),
            Arrow("worker", "controller", "episodes\nand rewards", shift=-40),
            Arrow("worker", "environment", "tool calls", 2),
            Arrow("worker", "engine", "token ids", 2),
            Arrow("trainer", "engine", "new weights"),
        ),
    ),
    "learn/tasks": Diagram(
        "A task file is inspected, prepared and split before it is trained on.",
        {
            "file": Box("my_tasks.json\nprompt, verifier", 0, 0.5, "data"),
            "inspect": Box("mfleet data inspect\nevery problem, by row", 1.3, 0),
            "prepare": Box("mfleet data prepare\nfilter and split", 1.3, 1),
            "folder": Box("my_data/\ntasks and split.json", 2.6, 1, "data"),
            "train": Box("mfleet train\nthe training tasks", 3.9, 0.5),
            "evaluate": Box("mfleet eval\nthe held-out tasks", 3.9, 1.5),
        },
        (
            Arrow("file", "inspect"),
            Arrow("file", "prepare"),
            Arrow("prepare", "folder"),
            Arrow("folder", "train"),
            Arrow("folder", "evaluate"),
        ),
    ),
    "learn/environment": Diagram(
        "The four verbs of an environment in the order in which an episode calls them.",
        {
            "reset": Box("reset(task)\nfirst text, tools", 0, 0),
            "policy": Box("policy\na turn of the model", 1.3, 0, "other"),
            "step": Box("step(call)\nresult of a tool call", 1.3, 1.3),
            "verify": Box("verify(answer)\nreward, or unknown", 2.9, 0),
            "close": Box("close()", 4.1, 0),
        },
        (
            Arrow("reset", "policy"),
            Arrow("policy", "step", "tool call", shift=-40),
            Arrow("step", "policy", "observation", shift=-40),
            Arrow("policy", "verify", "final answer\nor a limit"),
            Arrow("verify", "close"),
        ),
    ),
    "learn/loss": Diagram(
        "Where a loss of your own stands between the model and the optimizer.",
        {
            "model": Box("Megatron\nforward", 0, 0),
            "inputs": Box("LossInputs\nlog-probs, advantages", 1.1, 0, "data"),
            "own": Box("your function\nvalue per token", 2.2, 0, "other"),
            "sum": Box("− sum\nplus entropy and KL", 3.3, 0),
            "step": Box("backward\noptimizer step", 4.4, 0),
        },
        tuple(Arrow(a, b) for a, b in (("model", "inputs"), ("inputs", "own"), ("own", "sum"), ("sum", "step"))),
    ),
    "run/one-gpu": Diagram(
        "On one GPU the trainer and the engine take turns.",
        {
            "gpu": Frame("GPU 0", 0.9, 0, wide=2.9, high=1.55),
            "controller": Box("controller\nCPU", 0, 2),
            "trainer": Box("rank 0\nweights and optimizer", 1.1, 0.4),
            "engine": Box("engine 0\nweights and KV cache", 2.4, 0.4, "other"),
            "host": Box("host memory\nthe trainer while it rests", 1.1, 2, "data"),
            "workers": Box("episode workers\nCPU", 2.4, 2),
        },
        (
            Arrow("trainer", "engine", "weights", shift=0),
            Arrow("trainer", "host", "offload, onload", 2),
            Arrow("controller", "trainer", "verbs"),
            Arrow("workers", "engine", "token ids", 2),
        ),
    ),
    "run/one-node": Diagram(
        "Two ways to share the GPUs of one node: side by side, or in turns.",
        {
            "a": Frame("separate: rollout.engine.colocated=false", 0, 0, wide=2.28, high=2.35),
            "a1": Box("GPUs 0 to 3\nranks of the trainer", 0.1, 0.4),
            "a2": Box("GPUs 4 to 7\nengines", 1.2, 0.4, "other"),
            "a3": Box("both work at the same time\nwith rollout.max_staleness=1", 0.1, 1.25, "plain", wide=2.07),
            "b": Frame("colocated: rollout.engine.colocated=true", 2.4, 0, wide=2.28, high=2.35),
            "b1": Box("GPUs 0 to 7\nranks and engines, in turns", 2.5, 0.4, wide=2.07),
            "b2": Box("the trainer rests in host memory\nwhile the engines play", 2.5, 1.25, "plain", wide=2.07),
        },
        (Arrow("a1", "a2"),),
    ),
    "run/cluster": Diagram(
        "One controller on the first host, ranks and engines on every host.",
        {
            "first": Frame("host 1", 0, 0, wide=2.28, high=3.6),
            "node1": Box("mfleet node\nor torchrun, srun", 0.1, 0.4),
            "train": Box("mfleet train\nthe controller", 1.2, 0.4),
            "ranks1": Box("ranks", 0.1, 2.4),
            "ray1": Box("Ray\nengines, workers", 1.2, 2.4, "other"),
            "second": Frame("host 2, and others", 3.1, 0, wide=2.28, high=3.6),
            "node2": Box("mfleet node\nor torchrun, srun", 3.2, 0.4),
            "ranks2": Box("ranks", 3.2, 2.4),
            "ray2": Box("Ray\nengines, workers", 4.3, 2.4, "other"),
        },
        (
            Arrow("node1", "ranks1", "starts"),
            Arrow("train", "ray1", "starts"),
            Arrow("train", "ranks1", "verbs", 2),
            Arrow("node2", "ranks2", "starts"),
            Arrow("node2", "ray2", "joins"),
            Arrow("node2", "train", "dials"),
        ),
    ),
    "run/conversion": Diagram(
        "Conversions between Hugging Face folders and Megatron checkpoints.",
        {
            "hf": Box("HF folder\nBF16, FP32, FP8, INT4", 0, 0, "data"),
            "td": Box("torch_dist\nrelease/ and hf/", 1.6, 0, "data"),
            "back": Box("HF folder\nthe same bytes", 3.3, 0, "data"),
            "ranks": Box("training\nin any layout", 1.6, 1.25),
            "td2": Box("torch_dist\ncheckpoint", 3.3, 1.25, "data"),
            "hf3": Box("HF folder\nthe template's layout", 4.9, 1.25, "data"),
        },
        (
            Arrow("hf", "td", "to-megatron"),
            Arrow("td", "back", "to-hf"),
            Arrow("td", "ranks", "load"),
            Arrow("hf", "ranks", "direct loading"),
            Arrow("ranks", "td2", "save"),
            Arrow("td2", "hf3", "to-hf --template"),
        ),
    ),
    "understand/processes": Diagram(
        "The processes of a run and what they exchange.",
        {
            "controller": Box("mfleet train\nthe controller: loop/", 0, 1.3),
            "rank": Box("mfleet rank\nranks 0 to n, Megatron", 2, 0),
            "engine": Box("EngineActor\nvLLM AsyncLLM", 4, 0, "other"),
            "worker": Box("EpisodeWorker × n\nepisode environment", 2.9, 1.3),
            "server": Box("environment server\nepisode environment", 2, 2.6, "other"),
            "verifier": Box("verifier host\na sandbox per verdict", 4, 2.6, "other"),
        },
        (
            Arrow("controller", "rank", "verbs over sockets", 2),
            Arrow("controller", "worker", "Ray: specs and trajectories", 2),
            Arrow("controller", "server", "starts, probes"),
            Arrow("worker", "engine", "token ids", 2),
            Arrow("worker", "server", "WebSocket", 2),
            Arrow("server", "verifier", "verdicts", 2),
            Arrow("rank", "engine", "weights: shm, cuda_ipc,\nnccl, gloo or disk", dashed=True),
        ),
    ),
    "understand/step": Diagram(
        "One step: collect, compute, train, send the weights, record.",
        {
            "collect": Box("1  collect\nprompts × samples", 0, 0, "other"),
            "advantages": Box("2  advantages\nfilter, packing plan", 1.15, 0),
            "train": Box("3  train\nforward_backward", 2.3, 0),
            "optimizer": Box("4  optim_step\ngradient norm, update", 3.45, 0),
            "send": Box("5  send_weights\nevery engine has them", 3.45, 1.2, "other"),
            "record": Box("6  records\nmetrics, trajectories", 2.3, 1.2),
            "due": Box("7  when due\nevaluation, checkpoint", 1.15, 1.2),
        },
        (
            Arrow("collect", "advantages"),
            Arrow("advantages", "train"),
            Arrow("train", "optimizer"),
            Arrow("optimizer", "send"),
            Arrow("send", "record"),
            Arrow("record", "due"),
            Arrow("due", "collect", "next step"),
        ),
    ),
    "understand/tiny-model": Diagram(
        "The courses in which the tiny model is made.",
        {
            "start": Box("initial weights\nthat copy readily", 0, 0, "data"),
            "tables": Box("course 1\ncopy rows of tables", 1.15, 0),
            "short": Box("course 2\nwithout tool definitions", 2.3, 0),
            "whole": Box("course 3\nwhole episodes", 3.45, 0),
            "tiny": Box("assets/tiny", 4.6, 0, "data"),
        },
        tuple(
            Arrow(a, b) for a, b in (("start", "tables"), ("tables", "short"), ("short", "whole"), ("whole", "tiny"))
        ),
    ),
    "understand/family": Diagram(
        "What is derived from the data of a model family.",
        {
            "config": Box("config.json", 0, 0.6, "data"),
            "model": Box("Model\nwhat it computes", 1.7, 0.6),
            "table": Box("WeightTable\nMegatron and HF rows", 3.3, 0),
            "arguments": Box("Megatron's arguments\nmegatron_config.py", 3.3, 1.2),
            "uses": Box("conversion, loading,\nlive export, coverage", 4.6, 0),
            "chat": Box("chat.py", 0, 1.8, "data"),
            "ids": Box("conversations\nas token ids", 1.7, 1.8),
        },
        (
            Arrow("config", "model", "weights.py"),
            Arrow("model", "table", "table.py"),
            Arrow("model", "arguments"),
            Arrow("table", "uses"),
            Arrow("chat", "ids"),
        ),
    ),
}


def main() -> None:
    """Write every diagram."""
    for name, diagram in DIAGRAMS.items():
        (DOCS / f"{name}.svg").write_text(draw(diagram), encoding="utf-8")


if __name__ == "__main__":
    main()
