"""A Hugging Face hub on loopback: commits, listings, ranged reads and gated models; counts what it serves.

`hub` points `huggingface_hub` in this process to it. Ranks get the address with the driver's access.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_loopbackSecret"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Repo:
    """One model."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_redirected: bool = False
    """Reads of weights go to a signed address of another host, as with large files."""


@dataclass
class Served:
    """One answer."""

    method: str
    path: str
    range: str | None
    num_bytes: int
    has_token: bool


class HubServer:
    """The server's models and its log.

    Args:
        port: Where it listens.
    """

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.other_host = f"http://localhost:{port}"
        self.repos: dict[str, Repo] = {}
        self.log: list[Served] = []
        self.short_answers = 0
        """How many of the next ranged answers end early."""
        self.expired: set[str] = set()
        """Signatures that are refused."""
        self.signature = "first"

    def push(self, repo: str, directory: Path, revision: str = "main") -> str:
        """Make a commit of a directory's files, and move the branch there; return the commit."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        held = self.repos.setdefault(repo, Repo())
        held.commits[commit] = files
        held.refs[revision] = commit
        return commit

    def num_bytes(self, suffix: str) -> int:
        """Bytes served of the files with this ending."""
        return sum(one.num_bytes for one in list(self.log) if one.path.endswith(suffix))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "cdn":
            if self.headers["Authorization"] or url.query.removeprefix("signature=") in self.hub.expired:
                return self._send(403, b"signature")
            return self._file(self.hub.repos["/".join(parts[1:3])].commits[parts[3]]["/".join(parts[4:])])
        is_api = parts[:2] == ["api", "models"]
        org, name, what, revision, *inside = [*(parts[2:] if is_api else parts), "", "", "", ""]
        repo = self.hub.repos.get(f"{org}/{name}")
        if repo is None:
            return self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
        if repo.is_gated and self.headers["Authorization"] != f"Bearer {TOKEN}" and what != "revision":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[commit]
        if what == "revision":
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            body = json.dumps({"id": f"{org}/{name}", "sha": commit, "siblings": siblings})
            return self._send(200, body.encode())
        path = "/".join(filter(None, inside))
        if what != "resolve" or path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if repo.is_redirected and path.endswith(".safetensors"):
            target = f"{self.hub.other_host}/cdn/{org}/{name}/{commit}/{path}?signature={self.hub.signature}"
            return self._send(302, b"", {"Location": target})
        return self._file(files[path])

    def _file(self, data: bytes) -> None:
        found = _RANGE.fullmatch(self.headers["Range"] or "")
        if found is None:
            return self._send(200, data)
        first, last = int(found[1]), min(int(found[2]), len(data) - 1)
        part = data[first : last + 1]
        if self.hub.short_answers:
            self.hub.short_answers -= 1
            part = part[:-1]
        return self._send(206, part, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        has_token = self.headers["Authorization"] is not None
        path = urlsplit(self.path).path
        self.hub.log.append(Served(self.command, path, self.headers["Range"], len(body), has_token))
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve() -> Iterator[HubServer]:
    """Serve in threads of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = HubServer(server.server_port)
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_environment() -> None:
    """Make `huggingface_hub` of this process read its environment again, which it does on import only."""
    from huggingface_hub import constants

    importlib.reload(constants)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty hub, an empty cache, nobody logged in."""
    with serve() as server, monkeypatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.endpoint)
        patch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        read_environment()
        yield server
    read_environment()
