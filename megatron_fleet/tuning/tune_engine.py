"""`mfleet tune engine`: settings of an engine, one after the other, then the best of each together.

The engine is the run's own: the whole model on its devices, behind its socket. It answers random prompts, all at once.
Formats that change what is computed are measured with their effect on log-probs, and chosen only when asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import RolloutConfig
from megatron_fleet.rollout.engine_arguments import environment
from megatron_fleet.tuning.search import Candidate, Compose, fastest, run_trial
from megatron_fleet.tuning.show import Report, finish

SECTION = "rollout.engine."
TRIED = (
    *(f"{SECTION}max_num_seqs={n}" for n in (64, 128, 256, 512)),
    *(f"{SECTION}max_num_batched_tokens={n}" for n in (4096, 8192, 16384, 32768)),
    *(f"{SECTION}max_cuda_graph_size={n}" for n in (256, 1024)),
    f"{SECTION}enforce_eager=true",
)
FORMATS = (f"{SECTION}kv_cache_dtype=fp8", f"{SECTION}quantization=fp8")
"""Settings that change what the engine computes."""
DIFFERENCE = "mean |Δ|"
"""Column of the mean absolute difference of log-probs from the configuration's own engine, nats."""


@dataclass(frozen=True, slots=True)
class Load:
    """Throughput for ``sequences`` prompts of ``prompt`` tokens at once, each answered with ``answer`` tokens."""

    sequences: int
    prompt: int
    answer: int

    @classmethod
    def of(cls, rollout: RolloutConfig, sequences: int | None, prompt: int | None, answer: int | None) -> Load:
        """Make the load from what is given, and otherwise from the configuration.

        Raises:
            UserError: a sequence is longer than the context.
        """
        answer = answer or min(rollout.sampling.max_tokens_per_turn, rollout.max_context // 2)
        load = cls(
            sequences or max(1, rollout.most_in_flight() // rollout.engine.count),
            prompt or min(2048, rollout.max_context - answer),
            answer,
        )
        if load.prompt + load.answer > rollout.max_context:
            raise UserError(
                f"--prompt={load.prompt} and --answer={load.answer} together exceed rollout.max_context="
                f"{rollout.max_context}; lower one of them."
            )
        return load


def tune(compose: Compose, load: Load, asked: Sequence[str], repeats: int, advance: Callable[[], None]) -> Report:
    """Measure the configuration's engine, each setting by itself, and the best of each key together.

    Args:
        asked: settings to try instead of ``TRIED`` and ``FORMATS``; also formats may then be chosen.
        repeats: timed rounds of an engine.
        advance: called `trials` times.
    """
    own = Candidate("the configuration's own", ())
    rows = [own, *(Candidate(text.removeprefix(SECTION), (text,)) for text in asked or (*TRIED, *FORMATS))]
    report = Report(f"{load.sequences} × {load.prompt} + {load.answer} tokens, per 1,000 sampled", "", rows)
    with tempfile.TemporaryDirectory(prefix="mfleet-tune-") as scratch:
        bench = _Bench(compose, load, repeats, Path(scratch), report)
        for row in rows:
            bench.measure(row)
            advance()
        allowed = [row for row in rows if asked or not set(row.settings) & set(FORMATS)]
        together = _together(allowed)
        if len(together.settings) > 1:
            bench.measure(together)
            report.rows.append(together)
            allowed.append(together)
        advance()
    report.choice = fastest(allowed)
    return report


def trials(asked: Sequence[str]) -> int:
    """Number of times that `tune` calls ``advance``."""
    return 2 + len(asked or (*TRIED, *FORMATS))


def _together(rows: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fastest setting of each key that is faster than the first row."""
    own, best = rows[0], dict[str, Candidate]()
    for row in rows[1:] if own.problem is None else ():
        key = row.settings[0].partition("=")[0]
        if row.problem is None and row.clearly_below(own) and (key not in best or row.median < best[key].median):
            best[key] = row
    settings = tuple(row.settings[0] for row in best.values())
    return Candidate(", ".join(text.removeprefix(SECTION) for text in settings), settings)


@dataclass(slots=True)
class _Bench:
    """Settings that all candidates share."""

    compose: Compose
    load: Load
    repeats: int
    scratch: Path
    report: Report
    scores: np.ndarray | None = None

    def measure(self, row: Candidate) -> None:
        """Run a candidate, and note its figures or its problem."""
        try:
            config = self.compose(row.settings)
            validate.check(config)
        except UserError as error:
            row.problem = str(error)
            return
        load = self.load
        request = {
            "config": config.model_dump(mode="json"),
            "load": [load.sequences, load.prompt, load.answer],
            "repeats": self.repeats,
        }
        module = "megatron_fleet.tuning.engine_trial"
        folder, result = run_trial(module, request, self.scratch, environment(cuda=_cuda()))
        row.problem = result.get("problem")
        if row.problem is not None:
            return
        row.seconds = [seconds * 1000 / (load.sequences * load.answer) for seconds in result["seconds"]]
        row.peak_bytes, row.figures, self.report.device = result["peak_bytes"], result["figures"], result["device"]
        scores = np.load(folder / "scores.npy").astype(np.float64)
        if self.scores is None:
            self.scores = scores
        row.figures[DIFFERENCE] = float(np.abs(scores - self.scores).mean())


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def main(compose: Compose, load: Load, asked: Sequence[str], repeats: int, as_json: bool, write: Path | None) -> int:
    """Measure with a progress bar on stderr, print the report, and write the choice to the file ``write``."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("engine", total=trials(asked))
        report = tune(compose, load, asked, repeats, lambda: progress.advance(bar))
    return finish(report, as_json, write)
