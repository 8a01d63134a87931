"""`mfleet tune precision`: time and compare every precision supported by this machine on a few layers of the model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_fleet.config.errors import say_lines
from megatron_fleet.config.schema import Config, ParallelConfig, PrecisionConfig
from megatron_fleet.trainer.precision import Machine, machine_problem, this_machine
from megatron_fleet.tuning.override_file import write_overrides
from megatron_fleet.tuning.search import Candidate, fastest, run_trial

ROUNDS = 2
"""Rounds per candidate, alternately in forward and reverse order, so that a busy machine affects all alike."""
RECIPES = ("fp8_tensorwise", "fp8_blockwise", "fp8_delayed")
MICRO_BATCH_UNIT = 128
"""Micro-batches are widened to the alignment of the most demanding recipe, so that all compute the same."""


@dataclass(slots=True)
class PrecisionCandidate(Candidate):
    """Precision and its measurements.

    Attributes:
        mean, most: mean and largest absolute difference of log-probs from the reference, nats.
        kl: mean of exp(d) − 1 − d over the tokens, d = log-prob − that of the reference (k3; Schulman 2020).
    """

    mean: float | None = None
    most: float | None = None
    kl: float | None = None


@dataclass(slots=True)
class PrecisionReport:
    """Results of all candidates.

    Attributes:
        weights: whether the weights were the checkpoint's; random ones say nothing about log-probs.
        tokens: of one step.
    """

    device: str
    layers: int
    tokens: int
    weights: bool
    rows: list[PrecisionCandidate]

    @property
    def reference(self) -> PrecisionCandidate:
        return self.rows[0]

    @property
    def choice(self) -> PrecisionCandidate | None:
        """Candidate to choose, see `fastest`; ``None``: none ran."""
        return fastest(self.rows)

    def recommendation(self) -> str:
        """Name the fastest candidate, its speed-up and its effect on log-probs."""
        ran = [row for row in self.rows if row.problem is None]
        if self.reference not in ran:
            return f"{self.reference.name} itself did not run, so there is nothing to compare with."
        if len(ran) == 1:
            return f"Only {self.reference.name} can run here."
        best = self.choice
        assert best is not None  # the reference ran
        gain = self.reference.median / best.median
        if best is self.reference:
            return f"Stay with {self.reference.name}: nothing else is faster beyond the spread of the steps."
        speed = f"{best.name} is {gain:.2f} times as fast as {self.reference.name} ({' '.join(best.settings)})"
        if not self.weights:
            return f"{speed}; measure its effect on log-probs with a model.path that has weights, as these are random."
        return f"{speed} and moves log-probs by {best.mean:.4f} nats on average in {self.layers} layers."


def candidates(config: Config, machine: Machine) -> list[tuple[PrecisionCandidate, Config]]:
    """List all candidates, the reference first: float32 on a CPU, bfloat16 on a GPU. Unsupported ones have a reason."""
    plain = ["float32"] if machine.capability is None else []
    out = [_candidate(config, dtype, "model_dtype") for dtype in (*plain, "bfloat16")]
    out += [_candidate(config, "bfloat16", recipe) for recipe in RECIPES]
    for row, its in out:
        row.problem = machine_problem(its.policy, its.precision, machine)
    return out


def _candidate(config: Config, dtype: str, recipe: str) -> tuple[PrecisionCandidate, Config]:
    fp8 = recipe != "model_dtype"
    settings = (f"model.dtype={dtype}", f"precision.recipe={recipe}")
    tree = config.model_dump()
    tree["model"]["dtype"] = dtype
    tree["precision"] = PrecisionConfig.model_validate({"recipe": recipe}).model_dump()
    tree["parallel"] = ParallelConfig().model_dump()
    tree["policy"]["optimizer"] |= {"moments": "float32", "offload_fraction": 0.0}
    tree["policy"]["micro_batch_tokens"] = -(-config.policy.micro_batch_tokens // MICRO_BATCH_UNIT) * MICRO_BATCH_UNIT
    return PrecisionCandidate(recipe if fp8 else dtype, settings), Config.model_validate(tree)


def tune(config: Config, layers: int, repeats: int, advance: Callable[[], None]) -> PrecisionReport:
    """Measure all candidates, one process after the other on one device.

    Args:
        layers: number of the model's first layers to use, at their real widths.
        repeats: timed steps of a candidate in each of ``ROUNDS``.
        advance: called `trials` times.

    Raises:
        UserError: the model cannot be read.
    """
    from megatron_fleet.models.hf_config import read_model
    from megatron_fleet.models.registry import use_family
    from megatron_fleet.tuning.truncate import truncate
    from megatron_fleet.weights.hf_folder import read_config

    use_family(config.model.family)
    found = candidates(config, this_machine())
    report = PrecisionReport("", layers, found[0][1].policy.micro_batch_tokens, False, [row for row, _ in found])
    with tempfile.TemporaryDirectory(prefix="mfleet-tune-") as scratch:
        model = Path(scratch, "model")
        model.mkdir()
        report.weights = truncate(config.model.folder, layers, model)
        report.layers = read_model(read_config(model)).layers
        logprobs: dict[str, np.ndarray] = {}
        for turn in range(ROUNDS):
            for row, its in found if turn % 2 == 0 else reversed(found):
                if row.problem is None:
                    its = its.model_copy(update={"model": its.model.model_copy(update={"path": str(model)})})
                    _trial(Path(scratch), row, its, report, repeats, logprobs)
                advance()
    for row in report.rows:
        if row.name in logprobs and report.reference.name in logprobs:
            _compare(row, logprobs[row.name], logprobs[report.reference.name])
    return report


def trials(config: Config) -> int:
    """Number of times that `tune` calls ``advance``."""
    return ROUNDS * len(candidates(config, this_machine()))


def _trial(
    scratch: Path,
    row: PrecisionCandidate,
    config: Config,
    report: PrecisionReport,
    repeats: int,
    logprobs: dict[str, np.ndarray],
) -> None:
    init = "hf" if report.weights else "random"
    request = {"config": config.model_dump(mode="json"), "init": init, "repeats": repeats}
    folder, result = run_trial("megatron_fleet.tuning.trial", request, scratch)
    row.problem = result.get("problem")
    if row.problem is None:
        row.seconds += result["seconds"]
        row.peak_bytes = max(row.peak_bytes, result["peak_bytes"])
        report.device = result["device"]
        logprobs.setdefault(row.name, np.load(folder / "logprobs.npy"))


def _compare(row: PrecisionCandidate, values: np.ndarray, reference: np.ndarray) -> None:
    difference = values.astype(np.float64) - reference
    row.mean, row.most = float(np.abs(difference).mean()), float(np.abs(difference).max())
    row.kl = float((np.expm1(difference) - difference).mean())


def to_json(report: PrecisionReport) -> str:
    """Return the report as one JSON object."""
    rows = [asdict(row) | {"median": row.median if row.seconds else None} for row in report.rows]
    content = asdict(report) | {"rows": rows, "reference": report.reference.name}
    return json.dumps(content | {"recommendation": report.recommendation()}, indent=2)


def to_text(report: PrecisionReport) -> str:
    """Return the report as a table of the candidates, with explanatory sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.layers} layers, {report.tokens} tokens a step, {report.device}")
    for column in ("", "step ms", "range", "speed", "peak GiB", "mean |Δ|", "max |Δ|", "KL"):
        table.add_column(column, justify="right" if column else "left")
    for row in report.rows:
        if row.problem is None:
            table.add_row(*_cells(row, report))
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = [captured.get().rstrip()] if any(row.seconds for row in report.rows) else []
    lines += [f"{row.name}: {row.problem}" for row in report.rows if row.problem]
    source = "the model's own" if report.weights else "random, so differences of log-probs mean nothing"
    return "\n".join(
        [*lines, f"Weights are {source}; Δ are nats from {report.reference.name}.", report.recommendation()]
    )


def _cells(row: PrecisionCandidate, report: PrecisionReport) -> Sequence[str]:
    def nats(value: float | None) -> str:
        return "" if value is None else f"{value:.2g}"

    speed = f"{report.reference.median / row.median:.2f}" if report.reference.seconds else ""
    span = f"{1e3 * min(row.seconds):.1f}-{1e3 * max(row.seconds):.1f}"
    figures = (f"{1e3 * row.median:.1f}", span, speed, f"{row.peak_bytes / 2**30:.2f}")
    return (row.name, *figures, nats(row.mean), nats(row.most), nats(row.kl))


def main(config: Config, layers: int, repeats: int, as_json: bool, write: Path | None = None) -> int:
    """Measure with a progress bar on stderr, print the report, and write the choice to the file ``write``."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("precision", total=trials(config))
        report = tune(config, layers, repeats, lambda: progress.advance(bar))
    say_lines(to_json(report) if as_json else to_text(report))
    # What a faster precision does to log-probs is not known with random weights.
    chosen = report.choice if report.weights else report.reference
    if write is not None and chosen is not None and chosen.problem is None:
        write_overrides(write, chosen.settings)
    return 0
