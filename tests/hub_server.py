"""A server with the part of the Hugging Face hub's HTTP API by which huggingface_hub downloads a model.

Routes and fields are those of huggingface.co/docs/hub/api: a model's description with its files, the tree of a commit,
and ``resolve``, which gives a file with the headers that name its commit, hash and size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "5f" * 20
TOKEN = "hf_" + "abcdefghijkl" * 3


@dataclass
class HubServer:
    """A hub with one model.

    Attributes:
        files: content by name; those with large suffixes are kept by LFS, as on the hub.
        private, gated: answers to clients without `TOKEN`.
        ranges: answers to requests for a part of a file.
        parts: name and number of bytes of each part that was served.
        damaged: names of files whose content is served with a wrong byte, and how often.
        asked: method and path of every request.
    """

    repo: str = "fleet/tiny"
    files: dict[str, bytes] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT})
    private: bool = False
    gated: bool = False
    ranges: bool = True
    parts: list[tuple[str, int]] = field(default_factory=list)
    damaged: dict[str, int] = field(default_factory=dict)
    status: int = 200
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [
            path.rsplit("/", 1)[1]
            for asked in self.asked
            if (path := asked.removeprefix("GET ")) and "/resolve/" in path and asked.startswith("GET")
        ]

    def entry(self, name: str) -> dict[str, Any]:
        """A file as the tree has it."""
        data = self.files[name]
        found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
        if is_large(name):
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return found


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", "tokenizer.json", ".bin"))


def git_hash(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextlib.contextmanager
def hub_server(folder: Path, **options: Any) -> Iterator[HubServer]:
    """Serve the files of a folder as a model."""
    hub = HubServer(files={path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def found_by_hub_client(folder: Path, home: Path) -> Iterator[HubServer]:
    """`hub_server`, which huggingface_hub asks meanwhile, in this process and its children. ``home``: its cache."""
    with hub_server(folder) as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_ENDPOINT", hub.url)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        part = hub.ranges and "Range" in self.headers
        hub.asked.append(f"{'PART' if part else self.command} {path}")
        if hub.status != 200:
            return self._send({"error": "the hub is ill"}, hub.status)
        model = re.fullmatch(rf"/api/models/{hub.repo}(/(revision|tree)/([^/]+))?/?", path)
        file = re.fullmatch(rf"/{hub.repo}/resolve/([^/]+)/(.+)", path)
        if model is None and file is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and (hub.private or hub.gated):
            if hub.private:
                return self._refuse(401, "RepoNotFound", "Repository not found")
            return self._refuse(403, "GatedRepo", "Access to model is restricted")
        revision = (model[3] or "main") if model else file[1] if file else ""
        if revision not in hub.revisions:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if model is None:
            assert file is not None
            return self._file(file[2], hub.revisions[revision])
        if model[2] == "tree":
            return self._send([hub.entry(name) for name in hub.files])
        siblings = [
            {"rfilename": name, "size": entry["size"], "blobId": entry["oid"]}
            | (
                {"lfs": {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 134}}
                if "lfs" in entry
                else {}
            )
            for name in hub.files
            if (entry := hub.entry(name))
        ]
        return self._send({"id": hub.repo, "modelId": hub.repo, "sha": hub.revisions[revision], "siblings": siblings})

    do_GET = do_HEAD = _answer

    def _file(self, name: str, commit: str) -> None:
        hub = self.hub
        if name not in hub.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        data, entry = hub.files[name], hub.entry(name)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
        if self.command == "GET" and hub.damaged.get(name, 0):
            hub.damaged[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        if hub.ranges and (wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            hub.parts.append((name, last + 1 - first))
            return self._write(data[first : last + 1], 206, headers)
        return self._write(data, 200, headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._write(json.dumps({"error": message}).encode(), status, {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, content: Any, status: int = 200) -> None:
        self._write(json.dumps(content).encode(), status, {"Content-Type": "application/json"})

    def _write(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
