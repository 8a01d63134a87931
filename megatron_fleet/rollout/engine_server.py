"""Server of one engine's ``generate`` over persistent TCP connections, in frames of ``cluster.frames``.

Frames are lists whose first item is the kind. Client to engine, after the hello of ``cluster.handshake``::

    ["client", proof]
    ["image", media type, file]     later requests refer to it by its digest
    ["generate", id, session, prompt ids, temperature, max_tokens, stop ids, seed, routing_start,
     [[start, end, digest], ...]]   the last: the images in the prompt, each over its placeholders
    ["cancel", id]
    ["health"]                  are you there?

Engine to client, in any order of ``id``::

    ["done", id, token ids, logprobs, finish_reason, [[version, start, end], ...], routing]
    ["missing", id]             the engine does not hold all images of the request: send images and request again
    ["refused", id, reason]     the request can never be served
    ["lost", id, reason]        the engine cannot serve any more
    ["healthy"]                 the answer to ["health"], whatever else is under way
    ["asleep", whether]         whether requests wait until the engine is awake; sent to every client at each change

Prompt and token ids are int32 ``[N]``, log-probs float32 ``[N]``, routing uint8 or int16 ``[R, layers, k]`` or nil; all
are arrays of a frame. Every later prompt of an episode contains its images, so each file is sent once.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from megatron_fleet.agents.token_engine import EngineLost, Generation, SamplingParams
from megatron_fleet.cluster import frames, handshake
from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import PlacedImage, digest

Request = tuple[list[int], SamplingParams, str, Sequence[PlacedImage]]
Generate = Callable[[list[int], SamplingParams, str, Sequence[PlacedImage]], Awaitable[Generation]]

MAX_IMAGE_BYTES = 512 << 20
"""Most bytes of image files that an engine keeps; the least recently used are evicted first."""


class ImageStore:
    """LRU cache of images by the digest of their file, limited to ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_IMAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: OrderedDict[str, Image] = OrderedDict()

    def put(self, image: Image) -> None:
        """Store ``image``, evicting others as needed."""
        name = digest(image)
        if name in self._images:
            return
        self._images[name] = image
        self._bytes += len(image.data)
        while self._bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self._bytes -= len(dropped.data)

    def placed(self, places: Sequence[Sequence[Any]]) -> list[PlacedImage] | None:
        """Return the images of a request, given as (start, end, digest); ``None`` when one is missing."""
        if any(name not in self._images for _, _, name in places):
            return None
        for _, _, name in places:
            self._images.move_to_end(name)
        return [PlacedImage(start, end, self._images[name], name) for start, end, name in places]


class EngineServer:
    """Server that listens before its engine is up, so clients can learn its address; requests wait for ``open``."""

    def __init__(self, generate: Generate, token: str):
        self._generate = generate
        self._token = token
        self._images = ImageStore()
        self._open = asyncio.Event()
        self._asleep = False
        self._running: dict[asyncio.StreamWriter, dict[int, asyncio.Task[None]]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> str:
        """Bind a free port and return ``host:port``."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=1 << 20)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def open(self) -> None:
        self._open.set()

    def tell(self, *, asleep: bool) -> None:
        """Tell all clients that the engine sleeps, or is awake again."""
        self._asleep = asleep
        for writer in self._running:
            writer.write(frames.pack("asleep", asleep))

    async def finish(self) -> None:
        """Wait until all requests are answered, and close the connections once the answers are sent."""
        while running := [task for tasks in self._running.values() for task in tasks.values()]:
            await asyncio.wait(running)
        clients = list(self._running)
        for writer in clients:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in clients), return_exceptions=True)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await handshake.admit(reader, writer, self._token) == ["client"]:
                await self._obey(reader, writer)
        except (TimeoutError, ValueError):
            pass  # a peer that violates the protocol gets no answer
        except asyncio.CancelledError:
            pass  # the event loop is closing; asyncio's stream callback would print a traceback
        finally:
            writer.close()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        self._running[writer] = running
        if self._asleep:
            writer.write(frames.pack("asleep", True))
        try:
            while (frame := await frames.read(reader)) is not None:
                self._dispatch(frame, writer, running)
        except (TypeError, LookupError, OverflowError) as error:
            raise ValueError("a frame that is not a request") from error
        finally:
            del self._running[writer]
            # The client is gone: cancelling aborts its requests in vLLM.
            for task in running.values():
                task.cancel()

    def _dispatch(self, frame: list[Any], writer: asyncio.StreamWriter, running: dict[int, asyncio.Task]) -> None:
        match frame:
            case ["image", str(media_type), bytes(data)]:
                self._images.put(Image(media_type, data))
            case ["generate", int(number), str(session), prompt, temperature, max_tokens, stop, seed, start, at]:
                images = self._images.placed(at)
                if images is None:
                    writer.write(frames.pack("missing", number))
                    return
                params = SamplingParams(temperature, max_tokens, tuple(stop), seed, start)
                request = (frames.vector_from_plain(prompt, np.int32).tolist(), params, session, images)
                task = asyncio.create_task(self._answer(number, request, writer))
                running[number] = task
                task.add_done_callback(lambda _: running.pop(number, None))
            case ["cancel", int(number)]:
                if number in running:
                    running[number].cancel()
            case ["health"]:
                writer.write(frames.pack("healthy"))
            case _:
                raise ValueError(f"unknown frame {frame[0]!r}")

    async def _answer(self, number: int, request: Request, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            result = await self._generate(*request)
            end = (result.finish_reason, result.versions, result.routing)
            writer.write(frames.pack("done", number, result.token_ids, result.logprobs, *end))
        except ValueError as error:
            writer.write(frames.pack("refused", number, str(error)))
        except Exception as error:  # any error must reach the client, which would otherwise wait for its deadline
            if not isinstance(error, EngineLost):
                traceback.print_exc()
            writer.write(frames.pack("lost", number, str(error) or type(error).__name__))
