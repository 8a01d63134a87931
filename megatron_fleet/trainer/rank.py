"""One rank of the trainer: it connects to the controller and serves verbs, waiting for them without a time limit.

Between verbs no collective is pending, so nothing limits the duration of a rollout or an evaluation. The rank ends on
request, and at once when the controller is gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fleet.cluster import frames
from megatron_fleet.cluster.frames import FrameSocket
from megatron_fleet.cluster.handshake import Dialler, NotOfThisRun
from megatron_fleet.cluster.inventory import cuda_is_installed, nvidia_devices
from megatron_fleet.cluster.launcher import write_output_to
from megatron_fleet.cluster.rank_identity import controller_address, rank_identity
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.platform.processes import ONLY_OWNER, imports_uncollected, write_stacks_on_signal
from megatron_fleet.trainer.messages import OTHER, SYSTEM, USER, VERBS, Identity, datum_from_plain
from megatron_fleet.trainer.process import prepare_process
from megatron_fleet.weights.fetch.cache import fetch

if TYPE_CHECKING:
    from megatron_fleet.algorithms.datum import Datum
    from megatron_fleet.trainer.verbs import RankVerbs

CONNECT_DEADLINE_S = 300.0
"""Under srun or torchrun ranks may start before the controller listens."""
CONNECT_TIMEOUT_S, CONNECT_INTERVAL_S = 10.0, 0.2
CONTROLLER_GONE = 3
"""Exit status of a rank whose controller died."""


def main(environ: Mapping[str, str]) -> int:
    """Run as the rank that ``environ`` describes; returns the exit status.

    Raises:
        UserError: the environment lacks the rank or the controller's address, or the controller cannot be reached.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach all processes of a terminal or job
        signal.signal(number, signal.SIG_IGN)
    me = rank_identity(environ)
    address, token = controller_address(environ)
    # Our launchers assign the devices of the ranks that they start.
    device = None if me.source == "mfleet" else _take_device(me.local_rank, environ)
    connection = _dial(address)
    link = FrameSocket(connection)
    here = connection.getsockname()[0]
    place = me.rank, me.world_size, me.local_rank, socket.gethostname(), os.getpid()
    who = Identity(*place, me.source, here, device)
    _say_hello(link, token, who, address)
    answer = link.read()
    if answer is None or answer[0] != "config":
        raise UserError(
            f"MFLEET_CONTROLLER={address}: the controller refused rank {me.rank} of {me.world_size}; see its output "
            f"(another number of ranks, or this rank is already connected)."
        )
    os.environ["LOCAL_WORLD_SIZE"] = str(me.local_world_size)  # `platform.device` reads it
    if me.source != "mfleet":  # otherwise the process that started it has done this
        run = json.loads(answer[1])["run"]
        if not run["shared"]:
            os.umask(ONLY_OWNER)
        write_output_to(Path(run["out"], "logs", f"rank_{me.rank}.log"))
    write_stacks_on_signal()
    config = Config.model_validate_json(answer[1])
    fetch(config.model.path)  # where torchrun or srun starts the ranks, nobody else has done it on this host
    prepare_process(config.policy, config.parallel)
    return RankServer(link, who, answer[1], here).serve()


def _say_hello(link: FrameSocket, token: str, who: Identity, address: str) -> None:
    dialler = Dialler(token)
    try:
        link.write(*dialler.hello)
        link.write("rank", dialler.proof(link.read()), who.to_plain())
    except (NotOfThisRun, ValueError) as error:
        raise UserError(f"MFLEET_CONTROLLER={address}: {error}; give both sides the same MFLEET_TOKEN.") from None


def _take_device(local_rank: int, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the device of a rank, in the form of `Identity`, and make it CUDA's device ``local_rank``.

    Devices are named explicitly, because CUDA by itself numbers faster ones first and nvidia-smi does not.
    """
    devices = nvidia_devices(environ) if cuda_is_installed() else ()
    if not devices:
        return None
    if local_rank >= len(devices):
        raise UserError(
            f"Host {socket.gethostname()} has {len(devices)} GPUs for its ranks, and this is its local rank "
            f"{local_rank}; start fewer ranks there, or give them more GPUs."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in devices)  # before torch is imported
    return asdict(devices[local_rank])


def _dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            connection.settimeout(None)  # from here on a rank waits without a time limit
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"MFLEET_CONTROLLER={address}: nobody answered within {CONNECT_DEADLINE_S:.0f} s ({error}); start "
                    f"`mfleet train` there first."
                ) from None
            time.sleep(CONNECT_INTERVAL_S)


class RankServer:
    """Server that reads frames in a thread and runs verbs in the main thread, in order of arrival."""

    def __init__(self, link: FrameSocket, who: Identity, config: str, address: str) -> None:
        """Args: ``config``: resolved, as JSON. ``address``: at which the controller, and so others, reach this host."""
        self._link, self._who, self._config, self._address = link, who, config, address
        self._frames: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._receipts: dict[tuple[int, int], queue.SimpleQueue[str | None]] = {}
        self._verbs: RankVerbs | None = None
        self._listener: socket.socket | None = None
        self._quitting = False

    def serve(self) -> int:
        """Serve verbs until the controller sends ``quit``; returns the exit status."""
        reading = threading.Thread(target=self._read, name="controller", daemon=True)
        reading.start()
        _import_trainer()
        while (frame := self._frames.get())[0] != "quit":
            _, call, verb, arguments, following = frame
            self._answer(call, verb, arguments, following)
        if self._verbs is not None:
            self._verbs.close()
        self._link.close()
        reading.join()
        return 0

    def _read(self) -> None:
        with suppress(ValueError):  # a protocol violation is treated as a disconnect
            while (frame := self._link.read()) is not None:
                if frame[0] == "delivered":
                    _, call, number, error = frame
                    self._receipts.pop((call, number)).put(error)
                    continue
                self._quitting = self._quitting or frame[0] == "quit"
                self._frames.put(frame)
        if not self._quitting:
            print("the controller is gone", file=sys.stderr, flush=True)
            os._exit(CONTROLLER_GONE)  # the main thread may be in a collective that never ends

    def _answer(self, call: int, verb: str, arguments: dict[str, Any], following: int) -> None:
        """Run a verb and answer; a result that comes later is sent when it is there, and other verbs run meanwhile."""
        clock = time.time(), time.monotonic()
        try:
            bodies = [self._frames.get()[2] for _ in range(following)]
            found = self._run(call, verb, arguments, bodies)
        except Exception as error:
            self._fail(call, error)
            return
        if isinstance(found, Future):
            found.add_done_callback(lambda done: self._answer_late(call, done, clock))
        else:
            self._done(call, found, clock)

    def _answer_late(self, call: int, done: Future[Any], clock: tuple[float, float]) -> None:
        with suppress(OSError):  # the controller is gone, which `_read` notices
            if (error := done.exception()) is not None:
                self._fail(call, error)
            else:
                self._done(call, done.result(), clock)

    def _done(self, call: int, value: Any, clock: tuple[float, float]) -> None:
        """Send an answer and its times. ``clock``: unix and monotonic time when the verb began."""
        began, since = clock
        self._link.write("done", call, value, began, time.monotonic() - since)

    def _fail(self, call: int, error: BaseException) -> None:
        traceback.print_exception(error)
        message = str(error) or type(error).__name__
        kind = USER if isinstance(error, UserError) else SYSTEM if _is_system(error) else OTHER
        self._link.write("failed", call, kind, message, type(error).__name__)

    def _run(self, call: int, verb: str, arguments: dict[str, Any], bodies: list[bytes]) -> Any:
        if verb == "bind":
            return self._bind()
        if verb == "build":
            return self._build(**arguments)
        assert self._verbs is not None, "build comes first"
        if verb == "send_weights":
            return self._verbs.send_weights(**arguments, outbox=_Outbox(self._link, self._receipts, call))
        if verb not in VERBS:
            raise ValueError(f"{verb} is not a verb of a trainer")
        if "micro_batches" in arguments:  # their number
            count = arguments.pop("micro_batches")
            arguments["micro_batches"] = [_data(body) for body in self._verbs.share_in_replica(bodies, count)]
        return getattr(self._verbs, verb)(**arguments)

    def _bind(self) -> str:
        """Bind the rendezvous socket on rank 0, and keep it until it is used."""
        self._listener = socket.create_server((self._address, 0), backlog=1024)
        return f"{self._address}:{self._listener.getsockname()[1]}"

    def _build(self, rendezvous: str, init: Literal["hf", "random", "none"], probe: str) -> dict[str, Any]:
        from megatron_fleet.trainer.verbs import RankVerbs, join

        join(self._config, self._who, rendezvous, self._address, self._listener)
        self._listener = None
        self._verbs = RankVerbs(self._config, init, sees_folder=Path(probe).exists())
        return self._verbs.ready()


class _Outbox:
    """`weight_sync.base.Outbox` over the controller's socket."""

    def __init__(
        self, link: FrameSocket, receipts: dict[tuple[int, int], queue.SimpleQueue[str | None]], call: int
    ) -> None:
        self._link, self._receipts, self._call, self._next = link, receipts, call, 0

    def post(self, message: Mapping[str, Any]) -> _Receipt:
        key = self._call, self._next
        self._next += 1
        answer = self._receipts[key] = queue.SimpleQueue()
        self._link.write("post", *key, dict(message))
        return _Receipt(answer)


class _Receipt:
    def __init__(self, answer: queue.SimpleQueue[str | None]) -> None:
        self._answer = answer

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Receipt.wait`. Raises TimeoutError, or RuntimeError when the message could not be delivered."""
        try:
            error = self._answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"engines did not take a message within {timeout_s:g} s") from None
        if error is not None:
            raise RuntimeError(error)


def _data(body: bytes) -> list[Datum]:
    return [datum_from_plain(values) for values in frames.unpack(body)[1:]]


def _is_system(error: BaseException) -> bool:
    """Whether this is a failure of the file system."""
    return isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)


def _import_trainer() -> None:
    """Import Megatron, which takes seconds, while the controller waits for other things."""
    with imports_uncollected():
        import megatron_fleet.trainer.verbs  # noqa: F401
