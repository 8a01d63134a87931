"""A service that speaks Tinker's protocol to the unmodified package, for tests: sessions, training in the order of
``seq_id``, samplers, checkpoints, faults on demand. What is trained is a `Policy`: a bigram table with
an adapter here, or, slow and real, the model of a folder (`lora_service_policy`).

    python tests/tinker_service.py --folder FOLDER [--cycle-s 0.5] [--model FOLDER [--threads 2]]

prints its address. Checkpoints survive in FOLDER when it is killed, nothing else does. Beside the protocol: ``GET
/test/requests`` lists what was asked, ``POST /test/faults`` sets what the next requests of a path get, and ``POST
/test/reset`` makes it forget everything, checkpoints included.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

KEY = "tml-test"
BASE_MODEL = "test/tiny"
SAMPLES = 256
"""Requests for samples that are executed at once."""
HOLD_S = 5.0
"""A request for an answer is held open for at most this long; the package waits 45 s."""


class Policy(Protocol):
    """Base model and adapters that the service trains. Per-token arrays have one entry for each target token.

    Attributes:
        context: tokens of the longest sequence.
    """

    context: int

    def make(self, rank: int, seed: int | None) -> Any:
        """New adapters."""

    def forward(self, adapters: Any, data: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Log-probs of (inputs, targets)."""

    def backward(
        self, adapters: Any, data: Sequence[tuple[np.ndarray, np.ndarray]], slopes: Sequence[np.ndarray]
    ) -> None:
        """Accumulate gradients. ``slopes``: derivative of the loss by each log-prob."""

    def step(self, adapters: Any, adam: Mapping[str, float]) -> float:
        """Take an AdamW step, and zero the gradients. Returns their norm."""

    def weights(self, adapters: Any | None) -> Any:
        """A copy to sample from; of ``None``: the base model."""

    def sample(self, weights: Any, prompt: list[int], wanted: Mapping[str, Any], seed: int) -> tuple[list, list, str]:
        """Tokens, log-probs, and why it ended."""

    def score(self, weights: Any, prompt: list[int]) -> np.ndarray:
        """Log-probs of the tokens of a prompt; the first is NaN."""

    def state(self, adapters: Any) -> Any:
        """What `load` needs to go on; can be pickled."""

    def load(self, state: Any, optimizer: bool) -> Any: ...

    def export(self, adapters: Any) -> dict[str, bytes]:
        """Files of a folder that others can load, by name."""


@dataclass
class Added:
    logits: np.ndarray
    gradient: np.ndarray
    m: np.ndarray
    v: np.ndarray
    steps: int = 0


class Bigrams:
    """Each token's distribution depends on the token before it; adapters add the same to all of them."""

    context = 4096

    def __init__(self, vocab_size: int = 1024) -> None:
        self._base = np.random.default_rng(7).normal(0, 0.3, (vocab_size, vocab_size))

    def make(self, rank: int, seed: int | None) -> Added:
        return Added(*(np.zeros(len(self._base)) for _ in range(4)))

    def forward(self, adapters: Added, data: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        return [self._rows(adapters.logits, inputs)[np.arange(len(targets)), targets] for inputs, targets in data]

    def backward(
        self, adapters: Added, data: Sequence[tuple[np.ndarray, np.ndarray]], slopes: Sequence[np.ndarray]
    ) -> None:
        for (inputs, targets), slope in zip(data, slopes, strict=True):
            adapters.gradient -= slope @ np.exp(self._rows(adapters.logits, inputs))
            np.add.at(adapters.gradient, targets, slope)

    def step(self, adapters: Added, adam: Mapping[str, float]) -> float:
        norm = float(np.linalg.norm(adapters.gradient))
        clip, beta1, beta2 = adam["grad_clip_norm"], adam["beta1"], adam["beta2"]
        gradient = adapters.gradient * (clip / norm if 0 < clip < norm else 1.0)
        adapters.steps += 1
        adapters.m = beta1 * adapters.m + (1 - beta1) * gradient
        adapters.v = beta2 * adapters.v + (1 - beta2) * gradient**2
        m, v = adapters.m / (1 - beta1**adapters.steps), adapters.v / (1 - beta2**adapters.steps)
        adapters.logits = adapters.logits * (1 - adam["learning_rate"] * adam["weight_decay"])
        adapters.logits -= adam["learning_rate"] * m / (np.sqrt(v) + adam["eps"])
        adapters.gradient = np.zeros_like(gradient)
        return norm

    def weights(self, adapters: Added | None) -> np.ndarray:
        return np.zeros(len(self._base)) if adapters is None else adapters.logits.copy()

    def sample(
        self, weights: np.ndarray, prompt: list[int], wanted: Mapping[str, Any], seed: int
    ) -> tuple[list[int], list[float], str]:
        generator, last, ids, logprobs = np.random.default_rng(seed), prompt[-1], [], []
        for _ in range(wanted["max_tokens"]):
            values = self._rows(weights, last, wanted["temperature"] or 1.0)
            greedy = wanted["temperature"] == 0
            last = int(values.argmax() if greedy else generator.choice(len(values), p=np.exp(values)))
            ids.append(last)
            logprobs.append(float(values[last]))
            if last in (wanted.get("stop") or ()):
                return ids, logprobs, "stop"
        return ids, logprobs, "length"

    def score(self, weights: np.ndarray, prompt: list[int]) -> np.ndarray:
        values = self._rows(weights, prompt[:-1])
        return np.concatenate([[np.nan], values[np.arange(len(prompt) - 1), prompt[1:]]])

    def state(self, adapters: Added) -> Added:
        a = adapters
        return Added(a.logits.copy(), np.zeros_like(a.m), a.m.copy(), a.v.copy(), a.steps)

    def load(self, state: Added, optimizer: bool) -> Added:
        loaded = self.state(state)
        return loaded if optimizer else Added(loaded.logits, *(np.zeros_like(loaded.m) for _ in range(3)))

    def export(self, adapters: Added) -> dict[str, bytes]:
        return {
            "adapter_config.json": b'{"r": 32, "base_model_name_or_path": null}',
            "adapter_model.safetensors": adapters.logits.tobytes(),
            "more/README.md": b"of a test",
        }

    def _rows(self, logits: np.ndarray, before: Any, temperature: float = 1.0) -> np.ndarray:
        return log_softmax((self._base[before] + logits) / temperature)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


class Refused(Exception):
    """The request is the user's mistake."""


def loss_of(
    name: str, config: Mapping[str, float], logprobs: np.ndarray, inputs: Mapping[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """A loss of the service's documentation, the SUM over tokens, and its derivative by each log-prob."""
    if name == "cross_entropy":
        return -float((inputs["weights"] * logprobs).sum()), -inputs["weights"]
    advantages, sampled = inputs["advantages"].astype(float), inputs["logprobs"].astype(float)
    ratio = np.exp(logprobs - sampled)
    if name == "importance_sampling":
        return -float((ratio * advantages).sum()), -ratio * advantages
    if name == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        clipped = (advantages > 0) & (ratio > high) | (advantages < 0) & (ratio < low)
        used = np.where(clipped, np.clip(ratio, low, high), ratio)
        return -float((used * advantages).sum()), -np.where(clipped, 0, ratio * advantages)
    if name == "cispo":
        used = np.clip(ratio, config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0))
        return -float((used * advantages * logprobs).sum()), -used * advantages
    raise Refused(f"loss_fn {name!r} is not known")


@dataclass
class Answer:
    """Result of a request, which may be asked for again and again."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b""
    kind: str = "application/json"

    def set(self, value: Any) -> None:
        if isinstance(value, dict):
            self.body = json.dumps(value).encode()
        else:
            self.body, self.kind = value.SerializeToString(), "application/x-protobuf"
        self.ready.set()


@dataclass
class Run:
    """Adapters of one client: its requests are executed in the order of their ``seq_id``."""

    id: str
    rank: int
    adapters: Any
    next: int = 1
    waiting: dict[int, tuple[Answer, Callable[[], Any]]] = field(default_factory=dict)


class Service:
    """State of the service. ``cycle_s``: requests of all runs are executed at multiples of it; 0: at once. ``config``:
    flags that the package asks for.
    """

    def __init__(self, policy: Policy, folder: Path, cycle_s: float, config: Mapping[str, Any]) -> None:
        self.policy, self.folder, self.cycle_s, self.config = policy, folder, cycle_s, dict(config)
        self.arrived = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.forget()

    def forget(self) -> None:
        """All but the checkpoints, as a restart does."""
        self.sessions: dict[str, bool] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, Any] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: list[dict[str, Any]] = []
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.cycles = 0

    async def work(self) -> None:
        """Execute what is due, for ever."""
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            if self.cycle_s:
                await asyncio.sleep(self.cycle_s - time.monotonic() % self.cycle_s)
            due = [run for run in self.runs.values() if run.next in run.waiting]
            self.cycles += bool(due)
            for run in due:
                while run.next in run.waiting:
                    answer, job = run.waiting.pop(run.next)
                    run.next += 1
                    answer.set(await asyncio.to_thread(attempted, job))

    def submit(self, run: Run, seq_id: int, job: Callable[[], Any]) -> dict[str, Any]:
        """A repeated request is answered as before, and not executed again."""
        name = f"{run.id}:{seq_id}"
        if name not in self.answers:
            self.answers[name] = Answer()
            run.waiting[seq_id] = self.answers[name], job
            self.arrived.set()
        return {"request_id": name, "model_id": run.id}

    def done(self, name: str, value: Any) -> dict[str, Any]:
        self.answers.setdefault(name, Answer()).set(value)
        return {"request_id": name}

    def file(self, address: str) -> Path:
        return self.folder / base64.urlsafe_b64encode(address.encode()).decode()

    def save(self, run: Run, kind: str, name: str) -> str:
        address = f"tinker://{run.id}/{kind}/{name}"
        if self.file(address).exists():
            raise Refused(f"{address} exists already")
        self.file(address).write_bytes(pickle.dumps((run.rank, self.policy.state(run.adapters))))
        return address

    def saved(self) -> list[str]:
        """Addresses of all checkpoints."""
        return sorted(base64.urlsafe_b64decode(path.name.encode()).decode() for path in self.folder.iterdir())

    def sampler(self, name: str, weights: Any) -> str:
        self.samplers[name] = weights
        return name


def attempted(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except Refused as error:
        return {"error": str(error), "category": "user"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}


def application(service: Service) -> Any:
    from tinker.proto import tinker_public_pb2 as pb

    @asynccontextmanager
    async def working(app: Any) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(SAMPLES))
        task = asyncio.create_task(service.work())
        yield
        task.cancel()

    app = FastAPI(lifespan=working)

    @app.middleware("http")
    async def record_and_fail(request: Request, follow: Any) -> Response:
        path = request.url.path.removeprefix("/api/v1/")
        if not path.startswith("/test/"):
            kind = request.headers.get("x-tinker-request-type", "")
            service.requests.append({"path": path, "at": time.monotonic(), "type": kind, "cycle": service.cycles})
            if request.headers.get("x-api-key") != KEY:
                return Response('{"detail": "invalid key"}', 401, media_type="application/json")
            for name in (f"{path} {kind}", path):
                if service.faults[name]:
                    return await faulty(service.faults[name].pop(0), request, follow)
        return await follow(request)

    async def faulty(fault: Any, request: Request, follow: Any) -> Response:
        """A status; ``lost``: executed, but answered with 503; ``half``: an answer cut short; seconds of waiting."""
        if fault is None:
            return await follow(request)
        if isinstance(fault, float):
            await asyncio.sleep(fault)
            return await follow(request)
        if isinstance(fault, int):
            return Response('{"detail": "a fault of the test"}', fault, media_type="application/json")
        if isinstance(fault, dict):
            return Response(json.dumps(fault), 200, media_type="application/json")
        answer = await follow(request)
        body = b"".join([part async for part in answer.body_iterator])
        if fault == "lost":
            return Response('{"detail": "a fault of the test"}', 503, media_type="application/json")
        return Response(body[: len(body) // 2], answer.status_code, media_type=answer.headers["content-type"])

    @app.get("/test/requests")
    async def requests() -> Any:
        return {
            "requests": service.requests,
            "cycles": service.cycles,
            "saved": service.saved(),
            "runs": len(service.runs),
        }

    @app.post("/test/faults")
    async def faults(body: dict[str, list[Any]]) -> Any:
        for path, all_of in body.items():
            service.faults[path] += all_of
        return {}

    @app.post("/test/reset")
    async def reset(body: dict[str, Any]) -> Any:
        service.forget()
        for file in service.folder.iterdir():
            file.unlink()
        return {}

    @app.post("/api/v1/client/config")
    async def client_config(body: dict[str, Any]) -> Any:
        return service.config

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config(body: dict[str, Any]) -> Any:
        return {"refresh_interval_sec": 300}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> Any:
        context = service.policy.context
        model = {"model_name": BASE_MODEL, "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @app.post("/api/v1/telemetry")
    async def telemetry(body: dict[str, Any]) -> Any:
        return {"status": "accepted"}

    @app.post("/api/v1/create_session")
    async def create_session(body: dict[str, Any]) -> Any:
        session = secrets.token_hex(8)
        service.sessions[session] = True
        return {"type": "create_session", "session_id": session}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(body: dict[str, Any]) -> Any:
        if not service.sessions.get(body["session_id"]):
            raise HTTPException(410, "the session is over")
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish", status_code=204)
    async def finish(session: str, body: dict[str, Any]) -> None:
        service.sessions[session] = False

    def run_of(name: str) -> Run:
        if name not in service.runs:
            raise HTTPException(404, f"no model {name}")
        return service.runs[name]

    @app.post("/api/v1/create_model")
    async def create_model(body: dict[str, Any]) -> Any:
        name, lora = f"{body['session_id']}:train:{body['model_seq_id']}", body["lora_config"]
        if body["base_model"] != BASE_MODEL:
            raise HTTPException(400, f"{body['base_model']} is not trained here")
        service.runs.setdefault(name, Run(name, lora["rank"], service.policy.make(lora["rank"], lora.get("seed"))))
        return service.done(f"{name}:0", {"type": "create_model", "model_id": name}) | {"model_id": name}

    @app.post("/api/v1/get_info")
    async def get_info(body: dict[str, Any]) -> Any:
        run = run_of(body["model_id"])
        data = {"model_name": BASE_MODEL, "tokenizer_id": BASE_MODEL}
        about = {
            "model_id": run.id,
            "model_name": BASE_MODEL,
            "model_data": data,
            "is_lora": True,
            "lora_rank": run.rank,
        }
        return {"type": "get_info", **about}

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Any:
        body = pb.ForwardBackwardRequest()
        body.ParseFromString(await request.body())
        run = run_of(body.model_id)
        config = {name: value.number for name, value in body.loss_fn_config_v2.items()} or dict(body.loss_fn_config)

        def job() -> Any:
            data, inputs = [], []
            for datum in body.data:
                tokens = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
                found = {name: array_of(pb, tensor) for name, tensor in datum.loss_fn_inputs.items()}
                data.append((np.concatenate(tokens), found["target_tokens"]))
                inputs.append(found)
            logprobs = service.policy.forward(run.adapters, data)
            losses = [
                loss_of(body.loss_fn, config, lp.astype(float), x) for lp, x in zip(logprobs, inputs, strict=True)
            ]
            if not body.forward_only:
                service.policy.backward(run.adapters, data, [slope for _, slope in losses])
            rows = [np.asarray(values, np.float32) for values in logprobs]
            output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
            output.metrics["loss:sum"] = sum(value for value, _ in losses)
            offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
            values = pb.BatchedTensor(
                data=b"".join(row.tobytes() for row in rows), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32
            )
            output.loss_fn_outputs.add(num_datums=len(rows)).fields["logprobs"].CopyFrom(values)
            return output

        return service.submit(run, body.seq_id, job)

    @app.post("/api/v1/optim_step")
    async def optim_step(body: dict[str, Any]) -> Any:
        run = run_of(body["model_id"])
        return service.submit(
            run,
            body["seq_id"],
            lambda: {"metrics": {"grad_norm": service.policy.step(run.adapters, body["adam_params"])}},
        )

    @app.post("/api/v1/save_weights")
    async def save_weights(body: dict[str, Any]) -> Any:
        run = run_of(body["model_id"])
        return service.submit(
            run, body["seq_id"], lambda: {"type": "save_weights", "path": service.save(run, "weights", body["path"])}
        )

    @app.get("/api/v1/training_runs/{run}/checkpoints")
    async def list_checkpoints(run: str) -> Any:
        kinds = {"weights": "training", "external_weights": "external"}
        found = []
        for address in service.saved():
            of, kind, name = address.removeprefix("tinker://").split("/")
            if of == run:
                about = {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": kinds[kind], "tinker_path": address}
                found.append(about | {"time": datetime.now(UTC).isoformat()})
        return {"checkpoints": found}

    @app.post("/api/v1/save_weights_external")
    async def save_weights_external(body: dict[str, Any]) -> Any:
        run = run_of(body["model_id"])
        address = f"tinker://{run.id}/external_weights/{body['path']}"

        def job() -> Any:
            files = service.policy.export(run.adapters) | service.config.get("exported", {})
            service.file(address).write_bytes(pickle.dumps({name: data for name, data in files.items() if data}))
            return {"type": "save_weights_external", "path": address}

        return service.submit(run, body["seq_id"], job)

    @app.get("/api/v1/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls")
    async def external_weights_urls(run: str, name: str, request: Request) -> Any:
        file = service.file(f"tinker://{run}/external_weights/{name}")
        base = f"{request.base_url}test/files/{file.name}"
        urls = {inner: f"{base}?name={quote(inner)}" for inner in pickle.loads(file.read_bytes())}
        return {"urls": urls, "expires": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    @app.get("/test/files/{file}")
    async def exported(file: str, name: str) -> Response:
        return Response(pickle.loads((service.folder / file).read_bytes())[name])

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(body: dict[str, Any]) -> Any:
        run = run_of(body["model_id"])
        name = f"{run.id.partition(':')[0]}:sample:{body['sampling_session_seq_id']}"

        def job() -> Any:
            sampler = service.sampler(name, service.policy.weights(run.adapters))
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return service.submit(run, body["seq_id"], job)

    @app.post("/api/v1/load_weights")
    async def load_weights(body: dict[str, Any]) -> Any:
        file, name = service.file(body["path"]), f"{body['session_id']}:train:{body['model_seq_id']}"
        if not file.exists():
            raise HTTPException(404, f"no checkpoint {body['path']}")
        if name not in service.runs:
            rank, state = pickle.loads(file.read_bytes())  # this server's own file
            service.runs[name] = Run(name, rank, service.policy.load(state, body["optimizer"]))
        answer = {"type": "load_weights", "path": body["path"], "model_id": name}
        return service.done(f"{name}:0", answer) | {"model_id": name}

    @app.delete("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
    async def delete_checkpoint(run: str, kind: str, name: str) -> None:
        file = service.file(f"tinker://{run}/{kind}/{name}")
        if not file.exists():
            raise HTTPException(404, "no such checkpoint")
        file.unlink()

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(body: dict[str, Any]) -> Any:
        name = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        sampler = service.sampler(name, service.policy.weights(None))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @app.get("/api/v1/samplers/{name}")
    async def get_sampler(name: str) -> Any:
        if name not in service.samplers:
            raise HTTPException(404, f"no sampler {name}")
        return {"sampler_id": name, "base_model": BASE_MODEL, "model_path": None}

    @app.post("/api/v1/asample")
    async def asample(body: dict[str, Any]) -> Any:
        sampler, number, wanted = body["sampling_session_id"], body["seq_id"], body["sampling_params"]
        if sampler not in service.samplers:
            raise HTTPException(404, f"no sampler {sampler}")
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        if len(prompt) + wanted["max_tokens"] > (context := service.policy.context):
            raise HTTPException(400, f"{len(prompt)} + {wanted['max_tokens']} tokens are more than {context}")
        name, weights = f"{sampler}:{number}", service.samplers[sampler]

        def job() -> Any:
            answer = pb.SampleResponse()
            for index in range(body["num_samples"]):
                seed = secrets.randbits(32) if wanted.get("seed") is None else wanted["seed"] + index
                ids, logprobs, why = service.policy.sample(weights, prompt, wanted, seed)
                reason = pb.STOP_REASON_STOP if why == "stop" else pb.STOP_REASON_LENGTH
                sampled = {"tokens": np.array(ids, np.int32), "logprobs": np.array(logprobs, np.float32)}
                if spoilt := service.config.get("spoil"):
                    sampled = {} if spoilt == "empty" else {"tokens": sampled["tokens"]}
                answer.sequences.add(stop_reason=reason, **{name: values.tobytes() for name, values in sampled.items()})
            if body.get("prompt_logprobs"):
                answer.prompt_logprobs = service.policy.score(weights, prompt).astype(np.float32).tobytes()
            return answer

        async def play(answer: Answer) -> None:
            answer.set(await asyncio.to_thread(attempted, job))

        if name not in service.answers:
            service.answers[name] = Answer()
            task = asyncio.create_task(play(service.answers[name]))
            service.tasks.add(task)
            task.add_done_callback(service.tasks.discard)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(body["num_samples"])]}

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(body: dict[str, Any]) -> Response:
        answer = service.answers.get(body["request_id"])
        if answer is None:
            raise HTTPException(410, "no such request")
        try:
            await asyncio.wait_for(answer.ready.wait(), HOLD_S)
        except TimeoutError:
            again = {"type": "try_again", "request_id": body["request_id"], "queue_state": "active"}
            return Response(json.dumps(again), 408, media_type="application/json")
        return Response(answer.body, media_type=answer.kind)

    return app


def array_of(pb: Any, tensor: Any) -> np.ndarray:
    return np.frombuffer(tensor.dense, {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}[tensor.dtype])


class Client:
    """The service of a test, in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._command = [sys.executable, __file__, "--folder", str(folder), *options]
        self._process = self._start()
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def _start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._command, *options], stdout=subprocess.PIPE, text=True)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/test/{path}", data, {"content-type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return json.loads(opener.open(request, timeout=30).read())

    def fail(self, path: str, *faults: Any) -> None:
        """What the next requests of ``path`` get: a status, ``lost``, ``half``, seconds to wait; ``None``: nothing."""
        self.ask("faults", {path: faults})

    def usable(self) -> bool:
        """Whether it runs; if so, it forgets everything."""
        if self._process.poll() is None:
            self.ask("reset", {})
            return True
        return False

    def paths(self, *only: str) -> list[str]:
        return [r["path"] for r in self.ask("requests")["requests"] if r["path"] in only]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Kill it, and start it again at its address."""
        self.kill()
        self._process = self._start("--port", str(self.port))
        assert self._process.stdout is not None
        self._process.stdout.readline()


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Client]:
    client = Client(folder, *options)
    try:
        yield client
    finally:
        client.kill()


async def serve(args: argparse.Namespace) -> None:
    import uvicorn

    bound = socket.create_server(("127.0.0.1", args.port), reuse_port=False)
    with os.fdopen(os.dup(1), "w") as output:  # an engine takes stdout
        policy: Policy = Bigrams()
        if args.model is not None:
            from lora_service_policy import LoraPolicy

            policy = await LoraPolicy.start(args.model, args.folder.parent, args.threads)
        print(bound.getsockname()[1], file=output, flush=True)
    service = Service(policy, args.folder, args.cycle_s, args.config)
    config = uvicorn.Config(application(service), log_level="warning", timeout_keep_alive=75)
    await uvicorn.Server(config).serve(sockets=[bound])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cycle-s", type=float, default=0.0)
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
