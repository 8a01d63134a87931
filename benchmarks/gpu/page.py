"""Write the page of the battery's results, ``docs/understand/gpu.md``, with a picture for each device.

    python benchmarks/gpu/page.py [--results benchmarks/results/gpu]

The results of a machine are the JSON files that ``run.py`` has left in ``runs/gpu/DEVICE``; copy that folder here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from battery import checks  # noqa: E402
from battery.registry import COPY_TB_S, MATRIX_TFLOPS, PARTS, Part  # noqa: E402
from battery.results import ROOT, Result, read  # noqa: E402
from battery.show import goal_rows, short  # noqa: E402

from megatron_fleet.telemetry.charts import Chart, Series, write_svg  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "understand" / "gpu.md"
SMALL = ("torch", "pydantic", "numba", "safetensors", "msgpack")
"""Packages that the table of needs leaves out."""
HEAD = """# GPU measurements

*How close to the limits of the card does it run?*

Made by `python benchmarks/gpu/page.py` from the files in `benchmarks/results/gpu/`.
"""
NOTHING = """
**Nothing has been measured on a GPU yet.** The battery below has run on CPUs alone, at tiny sizes, as its tests do.
Every statement about speed on GPUs elsewhere in these pages is therefore an estimate.
"""
USE = f"""
## Measuring

```bash
python benchmarks/gpu/run.py --list       # the parts, and what speaks against each here
python benchmarks/gpu/run.py              # every part that can run here
cp -r runs/gpu/DEVICE benchmarks/results/gpu/ && python benchmarks/gpu/page.py    # this page
```

Each part runs in a process of its own with a time limit and writes `runs/gpu/DEVICE/PART.json` as it measures; its
output is in `logs/`, traces and the engines' output in `files/`. The same command continues where an interrupted one
stopped. What is missing (Transformer Engine, vLLM, a second GPU, memory, the episode environment) is skipped, with the
reason in the file. No part needs a network: models have random weights in the shape of Qwen3-8B.

Times are medians of several repetitions after a warm-up, taken by the clock around work that the device has finished.
Matrix products, copies and plain transfers that they are compared with are measured in the same process. The limits are
those of one H200, measured through PyTorch: {MATRIX_TFLOPS} TFLOP/s in BF16 (a product of 8192 x 8192 matrices of
random numbers) and {COPY_TB_S} TB/s (a copy within the device's memory, bytes read and written).

## The first ten minutes on a machine

Nothing is worth measuring before it is right. `first.py` checks in four minutes, each check in a process of its own,
what a GPU alone can show: packed attention with grouped heads, the log-prob kernels, tiny policies of four families
against the same step on the CPU, offload and onload, save and load, FP8 recipes. It adds a line to
`runs/gpu/DEVICE/first.jsonl` as each check ends; `--list` says what they are.

```bash
python benchmarks/gpu/first.py && python benchmarks/gpu/run.py --parts device tests --minutes 2.5 --archive gpu.tar.gz
python benchmarks/gpu/run.py --parts layers logprobs --minutes 5 --archive gpu.tar.gz
python benchmarks/gpu/run.py --parts checkpoint offload optimizer traces --minutes 4.3 --archive gpu.tar.gz
```

A check that is wrong or fails is worth more time than a figure: correct it and repeat the check by its name
(`first.py policy`). Both commands take `--device cpu`, which runs the same code at tiny sizes.

**A machine that has PyTorch with CUDA, but neither a network nor this project's packages**, takes a parcel. On a
machine with a network:

```bash
python tools/gpu_parcel.py parcel --have packages.txt --python PYTHON                          # the trainer's half
python tools/gpu_parcel.py parcel --have packages.txt --python PYTHON --with transformer-engine
python tools/gpu_parcel.py parcel --have packages.txt --python PYTHON --with vllm --parcels 2
python tools/gpu_parcel.py parcel --have packages.txt --python PYTHON --with transformer-engine --with vllm --parcels 2
```

`packages.txt` is what `python3 -m pip list --format=freeze` prints there, PYTHON an interpreter with its versions of
Python and PyTorch. Each parcel is at most 64 MiB, the work tree of 14 MiB included (18 MiB; 42 with Transformer Engine,
whose PyTorch half is compiled here in an hour on two cores; 62 and 36 with vLLM; 62 and 61 with
both, of which the second has all but vLLM itself); its `MANIFEST.txt` has the command that installs it, in about 8
seconds.
Training needs PyTorch 2.11 or newer; without Transformer Engine it uses PyTorch's own kernels and has no FP8.

## Half an hour on one machine

Parts run in the order below, most informative first. The minutes are limits; most parts should need half of theirs (an
estimate), and a part begins only while so much is left. Before the machine is there, put onto it what it lacks: an
unpacked bundle (`./setup.sh --gpu --bundle DIR`), or a parcel. Without Transformer Engine, vLLM and Ray the parts
`device`, `tests`, `layers`, `logprobs`, `offload`, `optimizer`, `checkpoint` and `traces` run.

```bash
python benchmarks/gpu/run.py --minutes 28 --archive gpu.tar.gz
```

Where a command may take ten minutes only, run it three times with `--minutes 9`: each continues where the last one
stopped. A part that reached its limit keeps the figures that it had. `gpu.tar.gz` is written again after each part.
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |\n" for line in lines)


def parts_table() -> str:
    """The parts with their limits and needs."""
    rows = []
    for part in PARTS:
        sizes = (("GPU", part.gpu_gib), ("host", part.host_gib), ("disk", part.disk_gib))
        needs = [f"{part.gpus} GPUs"] if part.gpus > 1 else []
        needs += [name for name in part.packages if name not in SMALL]
        needs += ["the episode environment"] if part.episode else []
        needs += [f"{gib:g} GiB {what}" for what, gib in sizes if gib]
        rows.append((f"`{part.name}`", f"{part.minutes:g}", part.about, ", ".join(needs)))
    return table(("part", "minutes", "measures", "needs"), rows)


def results_of(folder: Path) -> dict[str, Result]:
    """Part → its result, of one device; results at tiny sizes are left out."""
    found = {part.name: read(folder / f"{part.name}.json") for part in PARTS}
    return {name: result for name, result in found.items() if result is not None and result.size == "full"}


def limits(results: Mapping[str, Result]) -> list[tuple[str, str, str, str]]:
    """Figures beside what limits them: what, measured, limit, share."""
    figures = {(name, key): value for name, result in results.items() for key, value in result.figures.items()}

    def row(what: str, measured: object, limit: object, of: str) -> tuple[str, str, str, str]:
        share = f"{measured / limit:.2f}" if isinstance(measured, float) and isinstance(limit, float) else ""
        return what, short(measured), f"{short(limit)} ({of})", share

    h200 = "one H200"
    wanted = [
        ("BF16 matrix product, TFLOP/s", ("device", "matrix_tflops"), float(MATRIX_TFLOPS), h200),
        ("copy, TB/s", ("device", "copy_tb_s"), COPY_TB_S, h200),
        ("offload, GB/s", ("offload", "offload_gb_s"), figures.get(("offload", "plain_out_gb_s")), "plain copy"),
        ("onload, GB/s", ("offload", "onload_gb_s"), figures.get(("offload", "plain_back_gb_s")), "plain copy"),
    ]
    found = [row(what, figures[key], limit, of) for what, key, limit, of in wanted if key in figures and limit]
    shares = [
        ("BF16 layers", ("layers", "bf16_share"), "matrix product"),
        ("log-probs and their gradients", ("logprobs", "head_share"), "matrix product"),
        ("optimizer step", ("optimizer", "step_share"), "copy"),
    ]
    return found + [(what, "", of, f"{figures[key]:.2f}") for what, key, of in shares if key in figures]


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Charts of a device, each with the lines of what limits it."""

    def rows(part: str, name: str) -> list[dict]:
        return results[part].tables.get(name, []) if part in results else []

    def lines(found: Sequence[dict], by: str, x: str, y: str, scale: float = 1.0) -> list[Series]:
        names = dict.fromkeys(row[by] for row in found)
        each = {name: sorted((row[x] / scale, float(row[y])) for row in found if row[by] == name) for name in names}
        return [Series(f"{name}", tuple(points)) for name, points in each.items()]

    def level(label: str, value: float | None, beside: Sequence[Series]) -> list[Series]:
        xs = sorted({x for series in beside for x, _ in series.points})
        return [Series(label, tuple((x, float(value)) for x in xs))] if value and xs else []

    most = max((row["longest"] for row in rows("layers", "speed") if row["longest"] < row["tokens"]), default=0)
    packed = [row for row in rows("layers", "speed") if row["longest"] == min(row["tokens"], most)]
    drawn = []
    for title, part, of_part in (
        ("Layers: TFLOP/s by thousands of packed tokens", "layers", lines(packed, "variant", "tokens", "tflops", 1024)),
        ("Log-probs: TFLOP/s by chunk", "logprobs", lines(rows("logprobs", "chunks"), "dtype", "chunk", "tflops")),
    ):
        product = results[part].figures.get("matrix_tflops") if part in results else None
        beside = level("BF16 matrix product here", product, of_part)
        drawn.append((title, [*of_part, *beside, *level("BF16 matrix product, one H200", MATRIX_TFLOPS, of_part)]))
    sampled = [{**row, "line": f"graphs: {row['graphs']}"} for row in rows("engine", "throughput")]
    drawn.append(("vLLM: sampled tokens/s by sequences", lines(sampled, "line", "sequences", "tokens_per_s")))
    return [Chart(title, tuple(series)) for title, series in drawn if series]


def part_section(part: Part, result: Result) -> Iterator[str]:
    """Result of one part."""
    yield f"\n### {part.name}: {part.about}\n\n{result.status}, {result.seconds:.0f} s"
    yield f": {result.reason}\n" if result.reason else ".\n"
    if known := [name for name in part.figures if name in result.figures]:
        yield "\n" + table(("figure", ""), [(part.figures[name], short(result.figures[name])) for name in known])
    for key, described in part.tables.items():
        if rows := result.tables.get(key):
            cells = [[short("" if row.get(c) is None else row[c]) for c in described.columns] for row in rows]
            yield f"\n{described.title}:\n\n{table([*described.columns.values()], cells)}"
    if result.left_out:
        yield "\nLeft out:\n\n" + "".join(f"* {what}: {why}\n" for what, why in result.left_out.items())


def newest_checks(path: Path) -> list[tuple[str, str, str]]:
    """Each check of `first.py` with what it is about and what its newest line says."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    newest = {line["step"]: line for line in lines}
    said = {
        name: f"{line['status']}: {line['says']}" if line["says"] else line["status"] for name, line in newest.items()
    }
    return [(f"`{name}`", step.about, said[name]) for name, step in checks.BY_NAME.items() if name in said]


def device_section(folder: Path, results: Mapping[str, Result], picture: Path) -> Iterator[str]:
    """All results of a device; draws its picture."""
    newest = max(results.values(), key=lambda result: result.started)
    machine = newest.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield f"\n## {machine['device']}\n\n{machine['cpu']}, {machine['cores']} cores, {machine['host_gib']:.0f} GiB; "
    yield f"CUDA {machine['cuda']}; {packages}. Commit {newest.commit or 'unknown'}, {newest.started[:10]}.\n\n"
    yield table(("goal", "measured", "asked", ""), goal_rows(results, PARTS))
    if rows := limits(results):
        yield "\n" + table(("", "measured", "limit", "share"), rows)
    if made := newest_checks(folder / checks.RESULTS):
        yield f"\nChecks of `first.py`:\n\n{table(('check', 'what', 'result'), made)}"
    if left := [f"`{part.name}`" for part in PARTS if part.name not in results]:
        yield f"\nNot run on it: {', '.join(left)}.\n"
    if drawn := charts(results):
        write_svg(picture, machine["device"], drawn)
        yield f"\n![measured speeds of {folder.name} and the limits]({picture.name})\n"
    for part in PARTS:
        if part.name in results:
            yield from part_section(part, results[part.name])


def page(results: Path, target: Path) -> str:
    """Text of the page ``target``; pictures are written beside it."""
    folders = sorted(path for path in results.glob("*") if path.is_dir()) if results.is_dir() else []
    found = {folder: results_of(folder) for folder in folders}
    sections = [
        text
        for folder, parts in found.items()
        if parts
        for text in device_section(folder, parts, target.with_name(f"gpu-{folder.name}.svg"))
    ]
    return "".join([HEAD, *(sections or [NOTHING]), USE, "\n", parts_table(), *([] if sections else [_goals()])])


def _goals() -> str:
    rows = [row[:3:2] for row in goal_rows({}, PARTS)]
    return f"\nGoals, of one H200:\n\n{table(('goal', 'asked'), rows)}"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    args.page.write_text(page(args.results, args.page), encoding="utf-8")


if __name__ == "__main__":
    main()
