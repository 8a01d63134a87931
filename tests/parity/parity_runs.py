"""All parity runs, and how far each is from one process and from ``transformers``."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_layouts import CELLS, CELLS_FILE, LAYOUTS, MODELS, SEEDS, SINGLE, STEPS, Layout
from parity_reference import train_reference
from rank_processes import run_ranks
from tiny_models import make, stored_tensors, unstacked

TIMEOUT_S = 900


@dataclass(frozen=True)
class Difference:
    """Relative differences, the greatest over sequences or steps.

    Attributes:
        logprob: mean |Δ| ÷ mean |log-prob|, before the first step.
        loss, norm: of the first step.
        later_loss, later_norm: over all steps.
        parameters: greatest |Δ| after the last step (absolute).
        moved: how far the parameters came in these steps, greatest and mean (absolute): what ``parameters`` is seen
            against.
    """

    logprob: float
    loss: float
    norm: float
    later_loss: float
    later_norm: float
    parameters: float
    moved: tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One model in one layout; ``single`` is against one process, ``transformers`` against that library."""

    model: str
    layout: str
    single: Difference
    transformers: Difference


def run_all(folder: Path, steps: int = STEPS, cells: Collection[tuple[str, str]] = CELLS) -> list[Row]:
    """Train models in layouts, and by ``transformers``; files go into ``folder``.

    Args:
        cells: model and name of the layout. Each model is trained by one process, too, whose row comes first.
    """
    models = tuple(model for model in MODELS if model in {model for model, _ in cells})
    wanted = {*cells, *((model, SINGLE.name) for model in models)}
    (folder / CELLS_FILE).write_text(json.dumps(sorted(wanted)))
    started = {
        model: dict_of(make(model, folder / model, dtype=torch.float32, seed=SEEDS.get(model, 0))) for model in models
    }
    reference = {model: train_reference(folder / model, steps) for model in models}
    for world in sorted({layout.world for layout in LAYOUTS for model in models if (model, layout.name) in wanted}):
        run_ranks(Path(__file__).with_name("parity_ranks.py"), world, folder, str(steps), timeout_s=TIMEOUT_S)
    rows = []
    for model in models:
        single = gathered(folder, model, SINGLE)
        for layout in [x for x in LAYOUTS if (model, x.name) in wanted]:
            got = single if layout is SINGLE else gathered(folder, model, layout)
            against = [difference(got, other, started[model]) for other in (single, reference[model])]
            rows.append(Row(model, layout.name, *against))
    return rows


def dict_of(folder: Path) -> dict[str, torch.Tensor]:
    return unstacked(stored_tensors(folder))


def gathered(folder: Path, model: str, layout: Layout) -> dict[str, Any]:
    """The results of a layout's ranks as one; what several ranks know must agree to the bit."""
    ranks = [torch.load(folder / f"{model} {layout.name}.{r}.pt", weights_only=False) for r in range(layout.world)]
    first: dict[int, np.ndarray] = {}
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"] and rank["norms"] == ranks[0]["norms"], (model, layout.name)
        for micro_batch, values in zip(rank["micro_batches"], rank["first"], strict=True):
            for index, value in zip(micro_batch, values, strict=True):
                assert index not in first or np.array_equal(first[index], value), (model, layout.name, index)
                first[index] = value
        for name, value in rank["parameters"].items():
            assert torch.equal(value, ranks[0]["parameters"][name]), (model, layout.name, name)
    return ranks[0] | {"first": [first[i] for i in range(len(first))]}


def difference(got: dict[str, Any], other: dict[str, Any], started: dict[str, torch.Tensor]) -> Difference:
    a, b = np.concatenate(got["first"]), np.concatenate(other["first"])
    losses, norms = relative(got["losses"], other["losses"]), relative(got["norms"], other["norms"])
    assert got["parameters"].keys() <= other["parameters"].keys()
    apart = max(float((x - other["parameters"][k].float()).abs().max()) for k, x in got["parameters"].items())
    moves = [(x - started[k].float()).abs() for k, x in got["parameters"].items()]
    moved = max(float(m.max()) for m in moves), float(torch.cat([m.flatten() for m in moves]).mean())
    logprob = float(np.abs(a - b).mean() / np.abs(b).mean())
    return Difference(logprob, losses[0], norms[0], max(losses), max(norms), apart, moved)


def relative(got: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(got, other, strict=True)]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for row in run_all(out):
        print(json.dumps(asdict(row)))
