"""Train everything and write docs/understand/parity.md.

python tests/parity/parity_page.py [--folder SCRATCH]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "weights"), str(Path(__file__).parents[1])]
from parity_layouts import EPS, LR, MODELS, STEPS
from parity_runs import Difference, Row, run_all

PAGE = Path(__file__).parents[2] / "docs" / "understand" / "parity.md"
HEAD = f"""# Every layout trains like one process, and like transformers

Made by `python tests/parity/parity_page.py`; `./test` asserts it with four steps (`tests/parity`). Tiny models of each
family with all their parts (odd vocabulary, 4 layers, 8 experts), float32, on CPU: Megatron-Core's own layers over gloo
with our norm, attention and patches (`platform/megatron`), packed micro-batches, distributed optimizer. {STEPS} steps
of AdamW (learning rate {LR:g}, ε {EPS:g}, weight decay, clipping) of a policy gradient with an entropy term.

Each cell is against *one process* / against *transformers* with PyTorch's AdamW, one unpacked sequence at a time.
Relative differences: **log-prob** mean over all trained tokens, **loss** and **gradient norm** of the first step (bound
1e-5), then the greatest of either over all {STEPS} steps, and the greatest absolute difference of any **parameter**
after them (bound 1e-4, wider for Qwen3.5, whose gated norms scale rounding up; the parameters moved by
{{moved}}).

Megatron-Core 0.19.2, put in front of the installed release by hand, agrees with one process of 0.16.1 within 1e-6 at
the first step and 1e-5 later, in all of these but Qwen3.5 with up to four processes.
"""
RELEASES = ("megatron-core", "torch", "transformers")


def table(rows: Sequence[Row]) -> str:
    """One Markdown table per model."""
    out = []
    for model in dict.fromkeys(row.model for row in rows):
        out += [f"\n## {MODELS[model]}\n", "| layout | log-prob | loss | gradient norm | later | parameters |"]
        out.append("| --- | --- | --- | --- | --- | --- |")
        out += [_line(row) for row in rows if row.model == model]
    return "\n".join(out)


def _line(row: Row) -> str:
    def both(name: str) -> str:
        return " / ".join(f"{getattr(d, name):.0e}" for d in (row.single, row.transformers))

    def later(d: Difference) -> str:
        return f"{max(d.later_loss, d.later_norm):.0e}"

    cells = [both("logprob"), both("loss"), both("norm"), f"{later(row.single)} / {later(row.transformers)}"]
    return f"| {row.layout} | " + " | ".join([*cells, both("parameters")]) + " |"


def page(rows: Sequence[Row]) -> str:
    """docs/understand/parity.md."""
    moved = [row.single.moved for row in rows]
    said = f"{min(m[1] for m in moved):.4f} on average and at most {max(m[0] for m in moved):.4f}"
    made = (
        f"\nmegatron-core {version('megatron-core')}, torch {version('torch')}, transformers {version('transformers')}."
    )
    return HEAD.format(moved=said) + made + "\n" + table(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to keep the runs' files; default: a temporary folder")
    folder = parser.parse_args().folder
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(run_all(folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(run_all(Path(scratch))))


if __name__ == "__main__":
    main()
