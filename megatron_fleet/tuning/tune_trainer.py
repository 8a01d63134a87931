"""`mfleet tune trainer`: micro-batch size, recomputation and chunk of log-probs, on the first layers of the model.

The device computes the layers without parallelism, so what fits there may not fit in the run, and the other way round.
Where the device is a GPU, a candidate must also fit in the run's own layout, by the memory model (`planning.memory`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config, ParallelConfig, Recompute
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import longest_chunk, token_alignment
from megatron_fleet.models.layout import validate as validate_layout
from megatron_fleet.trainer.precision import check_machine
from megatron_fleet.tuning.search import OUT_OF_MEMORY, Candidate, Compose, fastest, run_trial
from megatron_fleet.tuning.show import Report, finish
from megatron_fleet.weights.hf_folder import read_config

SIZES = (1, 2, 4)
"""Micro-batches tried, as multiples of the longest sequence."""
RECOMPUTE = ("none", "full")
CHUNKS = (1024, 4096, 16384)
"""Positions whose logits exist at one time."""


@dataclass(slots=True)
class Choices:
    """Values to try; the configuration's own are always among them.

    Attributes:
        micro_batches: tokens.
        recompute: values of `policy.recompute`, as they are written on the command line.
        chunks: values of `policy.logprob_chunk`.
    """

    micro_batches: list[int]
    recompute: list[str]
    chunks: list[int]

    @classmethod
    def of(
        cls, config: Config, micro_batches: Sequence[int], recompute: Sequence[str], chunks: Sequence[int]
    ) -> Choices:
        """Make the values to try from those asked for; where none are, from the configuration."""
        policy, unit = config.policy, token_alignment(config.precision)
        longest = -(-max(config.rollout.max_context, 64) // unit) * unit
        return cls(
            list(dict.fromkeys((policy.micro_batch_tokens, *(micro_batches or (longest * n for n in SIZES))))),
            list(dict.fromkeys((spelt(policy.recompute), *(recompute or RECOMPUTE)))),
            list(chunks or CHUNKS),
        )

    @property
    def trials(self) -> int:
        """Number of candidates."""
        return len(self.micro_batches) * len(self.recompute) + len(self.chunks)


def spelt(recompute: Recompute) -> str:
    """Return a value of `policy.recompute` as it is written on the command line."""
    return f"[{','.join(recompute)}]" if isinstance(recompute, tuple) else str(recompute)


def tune(compose: Compose, choices: Choices, layers: int, repeats: int, advance: Callable[[], None]) -> Report:
    """Measure all micro-batches with each recomputation, then the chunks with the fastest of them.

    Args:
        layers: number of the model's first layers to use, at their real widths.
        repeats: timed steps of a candidate.
        advance: called `Choices.trials` times.

    Raises:
        UserError: the model cannot be read.
    """
    from megatron_fleet.models.registry import use_family
    from megatron_fleet.tuning.truncate import truncate

    config = compose(())
    use_family(config.model.family)
    report = Report(f"{layers} layers, per 1,000 tokens", "", [])
    with tempfile.TemporaryDirectory(prefix="mfleet-tune-") as scratch:
        model = Path(scratch, "model")
        model.mkdir()
        init = "hf" if truncate(config.model.folder, layers, model) else "random"
        bench = _Bench(compose, model, layers, init, repeats, Path(scratch), report, advance)
        for recompute in choices.recompute:
            short = False
            for tokens in sorted(choices.micro_batches):
                row = bench.row(f"policy.recompute={recompute}", f"policy.micro_batch_tokens={tokens}")
                if short:
                    row.problem = f"{OUT_OF_MEMORY}: a smaller micro-batch did not fit"
                bench.measure(row)
                short = row.out_of_memory
        own = bench.row(
            f"policy.recompute={spelt(config.policy.recompute)}",
            f"policy.micro_batch_tokens={config.policy.micro_batch_tokens}",
        )
        report.rows.sort(key=lambda row: row.settings != own.settings)
        best = fastest(report.rows)
        chunks = [bench.row(*(best or own).settings, f"policy.logprob_chunk={chunk}") for chunk in choices.chunks]
        for row in chunks:
            row.problem = None if best is not None else "nothing ran before it"
            bench.measure(row)
    report.choice = None if best is None else fastest([best, *chunks])
    return report


@dataclass(slots=True)
class _Bench:
    """Settings that all candidates share."""

    compose: Compose
    model: Path
    layers: int
    init: str
    repeats: int
    scratch: Path
    report: Report
    advance: Callable[[], None]

    @staticmethod
    def row(*settings: str) -> Candidate:
        return Candidate(", ".join(text.removeprefix("policy.") for text in settings), settings)

    def measure(self, row: Candidate) -> None:
        """Add a candidate to the report, and run it unless it has a problem."""
        self.report.rows.append(row)
        if row.problem is None:
            try:
                self._run(row, self.compose(row.settings))
            except UserError as error:
                row.problem = str(error)
        self.advance()

    def _run(self, row: Candidate, config: Config) -> None:
        """Raises UserError where the configuration cannot be run, here or in its own layout."""
        validate.check(config)
        check_machine(config.policy, config.precision)
        _check_memory(config)
        optimizer = config.policy.optimizer.model_copy(update={"moments": "float32", "offload_fraction": 0.0})
        alone = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": str(self.model)}),
                "parallel": ParallelConfig(),
                "policy": config.policy.model_copy(
                    update={"optimizer": optimizer, "recompute": _same_share(config, self.layers)}
                ),
            }
        )
        request = {"config": alone.model_dump(mode="json"), "init": self.init, "repeats": self.repeats}
        _, result = run_trial("megatron_fleet.tuning.trial", request, self.scratch)
        row.problem = result.get("problem")
        if row.problem is None:
            per_thousand = 1000 / config.policy.micro_batch_tokens
            row.seconds = [seconds * per_thousand for seconds in result["micro_batch_seconds"]]
            row.peak_bytes, self.report.device = result["peak_bytes"], result["device"]


def _same_share(config: Config, layers: int) -> Recompute:
    """Value of `policy.recompute` for the model's first ``layers`` layers: of a number of layers, the same share.

    Raises:
        UserError: the model does not have as many.
    """
    recompute = config.policy.recompute
    if not isinstance(recompute, int):
        return recompute
    hf_config = read_config(config.model.folder)
    validate_layout(hf_config, config.parallel, recompute)
    return round(recompute * layers / longest_chunk(read_model(hf_config).layers, config.parallel)) or "none"


def _check_memory(config: Config) -> None:
    """Refuse what would not fit into GPUs like this machine's in the run's layout. Raises UserError."""
    import torch

    if not torch.cuda.is_available():
        return
    from megatron_fleet.planning.memory.check import check_memory, host_bytes

    device_bytes = torch.cuda.get_device_properties(0).total_memory
    check_memory(config, read_config(config.model.folder), device_bytes, host_bytes())


def main(compose: Compose, choices: Choices, layers: int, repeats: int, as_json: bool, write: Path | None) -> int:
    """Measure with a progress bar on stderr, print the report, and write the choice to the file ``write``."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("trainer", total=choices.trials)
        report = tune(compose, choices, layers, repeats, lambda: progress.advance(bar))
    return finish(report, as_json, write)
