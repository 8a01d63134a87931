"""Sinks for experiment trackers: Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.network import go_direct, through_proxy
from megatron_fleet.config.schema import DataConfig
from megatron_fleet.config.secrets import WANDB_KEY, only_secrets, wandb_key
from megatron_fleet.config.sections.logging import MlflowConfig, WandbConfig
from megatron_fleet.telemetry.samples import COLUMNS, choose, row

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group

STEP = "trainer/global_step"
"""Metric on the x axis of curves, because W&B's own step counts calls."""
FINISH_TIMEOUT_S = 120.0
"""Maximum wait at the end of a run for unsent data. W&B keeps the rest in its folder for `wandb sync`."""
ANSWER_S = 10.0
"""Time for a tracker to answer before a run."""
MLFLOW_BATCH = 1000
"""Limit of MLflow's REST API on metrics per request (100 for parameters). It truncates long values itself."""


log = logging.getLogger(__name__)


class WandbSink:
    """Sink for scalars, histograms and tables of episodes, with one W&B run per attempt; the attempts form a group.

    So nothing that a failed attempt logged is overwritten, and a resumed run's curves begin at its checkpoint.
    """

    def __init__(
        self,
        project: str,
        entity: str | None,
        mode: Literal["online", "offline"],
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        resumed_step: int | None,
        started: float,
        key: str | None = None,
        samples: int = 0,
    ) -> None:
        """Start a W&B run.

        Args:
            entity: team or user; ``None`` = owner of the API key.
            name: name of the run.
            folder: its files are written below ``folder/wandb``.
            config: configuration of the run, recorded together with the step from which the attempt resumed.
            started: unix time of this attempt.
            key: API key; ``None``: that of `wandb login`.
            samples: episodes in the table of a step or evaluation.

        Raises:
            UserError: the package is missing, or W&B refuses key, team or project.
        """
        try:
            import wandb
        except ImportError:
            raise UserError("logging.wandb.project needs the package wandb; pip install wandb, or remove it.") from None
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, finish_timeout=FINISH_TIMEOUT_S
        )
        try:
            if key is not None:
                os.environ[WANDB_KEY] = key
            # Its own process would send reports of errors, and tell on the terminal of those that it cannot send.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            os.environ.setdefault("WANDB_SILENT", "true")
            with only_secrets((), (WANDB_KEY,)):
                wandb.setup()  # starts W&B's own process, which lasts until this one ends
            self._run = wandb.init(
                project=project,
                entity=entity,
                mode=mode,
                name=_attempt_name(name, started),
                group=name,
                dir=str(folder),
                config={**config, "attempt": {"started": started, "resumed_step": resumed_step}},
                settings=settings,
                reinit="create_new",
            )
        except wandb.Error as error:
            raise UserError(
                f"logging.wandb.project={project}: W&B refuses ({error}); set WANDB_API_KEY, correct the project or "
                f"logging.wandb.entity, or use logging.wandb.mode=offline."
            ) from error
        self._samples = samples
        self._gone = False
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log({**metrics, STEP: step})

    def draw(self, step: int, distributions: Mapping[str, np.ndarray]) -> None:
        """Log a histogram of each array, float64 ``[N]``, N ≥ 1."""
        from wandb import Histogram

        self._log({**{name: Histogram(values.tolist()) for name, values in distributions.items()}, STEP: step})

    def samples(self, kind: str, step: int, groups: Sequence[Group]) -> None:
        """Log a table of a few episodes. A failure is logged and changes nothing else."""
        from wandb import Table

        rows = [row(t, step) for t in choose(groups, self._samples, step)]
        if rows and not self._gone:
            try:
                self._run.log({f"samples/{kind}": Table(columns=list(COLUMNS), data=rows), STEP: step})
            except Exception as error:  # of its files and formats; a table must not end a run
                log.warning("the table of episodes of step %d was not sent to W&B: %s", step, error)

    def close(self, complete: bool = True) -> None:
        self._unless_gone(lambda: self._run.finish(exit_code=0 if complete else 1))

    def _log(self, row: dict[str, Any]) -> None:
        self._unless_gone(lambda: self._run.log(row))

    def _unless_gone(self, call: Callable[[], Any]) -> None:
        """Call W&B, unless its process is gone, which must not end a run; an outage of its server is no error here."""
        if self._gone:
            return
        try:
            call()
        except Exception as error:
            self._gone = True
            log.warning(
                "W&B receives no further metrics of this run (%s: %s); metrics.jsonl has them",
                type(error).__name__,
                error,
            )


class MlflowSink:
    """Sink for scalars, with one MLflow run per attempt, sharing the tag ``run``; a thread sends without blocking."""

    def __init__(
        self, uri: str, experiment: str, name: str, config: Mapping[str, Any], resumed_step: int | None, started: float
    ) -> None:
        """Start an MLflow run.

        Args:
            uri: address of the tracking server, or ``sqlite:///FILE``.
            experiment: its name; created if missing.
            name: name of the run.
            config: configuration of the run, recorded as parameters with the step from which the attempt resumed.
            started: unix time of this attempt.

        Raises:
            UserError: the package is missing, or the server refuses.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import; otherwise it sends usage data
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError("logging.mlflow.uri needs the package mlflow-skinny; install it, or remove it.") from None
        own = {"attempt.started": started, "attempt.resumed_step": resumed_step}
        try:
            self._client = MlflowClient(uri)
            found = self._client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else self._client.create_experiment(experiment)
            run = self._client.create_run(place, run_name=_attempt_name(name, started), tags={"run": name})
            self._run = run.info.run_id
            self._describe({**_flat(config), **own})
        except Exception as error:  # each kind of store has its own exceptions
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"logging.mlflow.uri={uri}: MLflow refuses ({reason}); correct it or "
                f"logging.mlflow.experiment, or set MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN."
            ) from error
        self._unsent: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._written = self._sent = 0  # numbers of batches; `_sent` belongs to the sender thread
        self._status = "FAILED"
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_allowed(name), float(value), now, step) for name, value in metrics.items()]
        for at in range(0, len(rows), MLFLOW_BATCH):
            self._unsent.put(rows[at : at + MLFLOW_BATCH])
            self._written += 1

    def close(self, complete: bool = True) -> None:
        """Send remaining data, for at most ``FINISH_TIMEOUT_S``."""
        self._status = "FINISHED" if complete else "FAILED"
        self._unsent.put(None)
        self._sender.join(FINISH_TIMEOUT_S)
        if left := self._written - self._sent:
            print(f"mfleet: {left} batches of metrics did not reach MLflow; metrics.jsonl has them.", flush=True)

    def _describe(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_allowed(name), str(value)) for name, value in values.items()]
        for at in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[at : at + 100])

    def _send(self) -> None:
        while (rows := self._unsent.get()) is not None:
            # Any exception, as above, after the client's own retries: tracking must not end a run.
            with contextlib.suppress(Exception):
                self._client.log_batch(self._run, metrics=rows)
                self._sent += 1
        with contextlib.suppress(Exception):
            self._client.set_terminated(self._run, self._status)


def _attempt_name(name: str, started: float) -> str:
    return f"{name} {datetime.fromtimestamp(started, UTC).strftime('%m-%d %H:%M:%S')}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return out


def _allowed(name: str) -> str:
    """Sanitise a metric name: MLflow allows letters, digits, ``_ - . : /`` and spaces."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def check_wandb(wandb: WandbConfig, data: DataConfig) -> None:
    """Check that a W&B key exists, and that W&B knows it. That it does not answer is only a warning.

    Raises:
        UserError: there is no key, or W&B does not know it.
    """
    key = wandb_key(data.modality)
    if wandb.project is None or wandb.mode == "offline":
        return
    if key is None and not Path(os.environ.get("NETRC", "~/.netrc")).expanduser().is_file():
        raise UserError(
            f"logging.wandb.project={wandb.project}: there is no key; set WANDB_API_KEY, run `wandb login`, or set "
            f"logging.wandb.mode=offline."
        )
    if key is not None and not _is_known(key):
        raise UserError(
            f"logging.wandb.project={wandb.project}: W&B rejects the key; correct WANDB_API_KEY, or that of the "
            f"modality, or set logging.wandb.mode=offline."
        )


def _is_known(key: str) -> bool:
    """Whether W&B knows a key; true also if it does not answer, or answers something else."""
    import httpx

    url = f"{os.environ.get('WANDB_BASE_URL', 'https://api.wandb.ai').rstrip('/')}/graphql"
    try:
        asked = {"query": "query Viewer { viewer { id } }"}
        answer = httpx.post(url, json=asked, auth=("api", key), timeout=ANSWER_S)
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        log.warning("W&B at %s does not confirm the key (%s)", url, type(error).__name__)
        return True
    nobody = isinstance(found, dict) and isinstance(found.get("data"), dict) and found["data"].get("viewer") is None
    return answer.status_code != 401 and not (answer.status_code == 200 and nobody)


def check_mlflow(mlflow: MlflowConfig) -> None:
    """Check that the MLflow server answers; credentials are not validated before the run starts.

    Raises:
        UserError: MLflow is not installed, or the server does not answer.
    """
    uri = mlflow.uri
    if uri is None:
        return
    if find_spec("mlflow") is None:
        raise UserError(f"logging.mlflow.uri={uri}: MLflow is missing; pip install mlflow-skinny, or remove the key.")
    if uri.startswith("http"):
        import httpx

        try:
            httpx.get(uri, timeout=ANSWER_S, trust_env=not go_direct(uri))
        except (httpx.HTTPError, ImportError) as error:
            way = through_proxy(uri)
            raise UserError(
                f"logging.mlflow.uri={uri}: nothing answers there ({error}{way}); start the server, or correct it."
            ) from error
