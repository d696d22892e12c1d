"""A real HTTP proxy between an S3 client and its server that answers wrong, breaks off or goes silent, by rule."""

from __future__ import annotations

import re
import socket
import struct
import threading
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass
class Fault:
    """What goes wrong, with which requests, and how often. The first rule that fits a request is carried out."""

    kind: Literal["status", "reset", "stall", "short"]
    """`status`: the proxy answers, with an error; `reset`: the connection breaks in the body; `stall`: bytes stop;
    `short`: the answer has half the bytes, and a `Content-Length` that fits them."""
    method: str = "GET"
    path: str = ""
    """Regular expression, searched for in the request's path and query."""
    times: int = 1 << 30
    """How many requests it fits; it is spent after those."""
    skip: int = 0
    """How many fitting requests pass before the first one that it hits."""
    status: int = 503
    code: str = "ServiceUnavailable"
    """S3's name of the error."""
    after_bytes: int = 100
    """Bytes of the body that pass before a `reset` or `stall`; below 0, not even the head passes."""


@dataclass(frozen=True)
class Request:
    """One request as the proxy saw it, and how much of a body it sent back."""

    method: str
    path: str
    range: str | None
    status: int
    body_bytes: int


class FaultyProxy:
    """Listens on a free port of 127.0.0.1 and passes requests on to a server. A context manager.

    Args:
        host: The server's address.
        port: The server's port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.most_in_flight = 0
        """Most requests at once, each counted from its arrival until its answer begins."""
        self.delay_s = 0.0
        """Wait before each answer."""
        self._in_flight = 0
        self._upstream = (host, port)
        self._lock = threading.Lock()
        self._let_go = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def port(self) -> int:
        """Port to give to clients."""
        return int(self._server.server_address[1])

    def body_bytes(self, method: str = "GET", path: str = "") -> int:
        """Body bytes sent back so far to requests that fit."""
        with self._lock:
            return sum(r.body_bytes for r in self.requests if r.method == method and re.search(path, r.path))

    def reset(self) -> None:
        """Forget faults and counts, and close the connections that stall."""
        with self._lock:
            self._let_go.set()
            self._let_go = threading.Event()
            self.faults.clear()
            self.requests.clear()
            self.most_in_flight = 0
            self.delay_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reset()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault to commit on a request, counting it."""
        with self._lock:
            for fault in self.faults:
                if fault.method != method or not re.search(fault.path, path):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                elif fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Carry out one request."""
        body = _body(handler)
        fault = self.take_fault(handler.command, handler.path)
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            self._let_go.wait(self.delay_s)
            if fault is not None and fault.kind == "status":
                status, head, data = fault.status, {"Content-Type": "application/xml"}, _error_body(fault)
            else:
                status, head, data = self._forward(handler, body)
        finally:
            # Before the answer: with its last byte the client may send the next request.
            with self._lock:
                self._in_flight -= 1
        self._send(handler, status, head, data, fault)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection(*self._upstream, timeout=30)
        try:
            kept = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(handler.command, handler.path, body, kept)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, head: dict[str, str], data: bytes, fault: Fault | None
    ) -> None:
        breaks = fault if fault is not None and fault.kind in ("reset", "stall") else None
        if fault is not None and fault.kind == "short":
            data = data[: len(data) // 2]
        sent = data if handler.command != "HEAD" else b""
        if breaks is not None:
            sent = sent[: max(0, breaks.after_bytes)]
        # Before it is sent: with the last byte the client may look at what was counted.
        with self._lock:
            seen = Request(handler.command, handler.path, handler.headers.get("Range"), status, len(sent))
            self.requests.append(seen)
        try:
            if breaks is None or breaks.after_bytes >= 0:
                _send_head(handler, status, head, len(data))
            handler.wfile.write(sent)
        except OSError:
            handler.close_connection = True  # the client has given up on this connection
        if breaks is not None:
            handler.close_connection = True
            if breaks.kind == "stall":
                self._let_go.wait()
            else:
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    """Body of a request, which may come in chunks: of a stream nobody knows the length beforehand."""
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    chunks = []
    while length := int(handler.rfile.readline().split(b";")[0], 16):
        chunks.append(handler.rfile.read(length))
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        pass  # trailers
    return b"".join(chunks)


def _send_head(handler: BaseHTTPRequestHandler, status: int, head: dict[str, str], num_bytes: int) -> None:
    handler.send_response_only(status)
    for name, value in head.items():
        if name.lower() not in _HOP_BY_HOP | {"content-length"}:
            handler.send_header(name, value)
    length = head.get("Content-Length", "0") if handler.command == "HEAD" else str(num_bytes)
    handler.send_header("Content-Length", length)
    handler.end_headers()


def _error_body(fault: Fault) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()


def _handler_of(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes

        def do_GET(self) -> None:
            proxy.answer(self)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass  # tests look into `FaultyProxy.requests`

    return Handler
