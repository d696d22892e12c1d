"""A real S3 server on loopback (moto's), behind a proxy that tests can make fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.faulty_proxy import FaultyProxy

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",  # else the SDK looks for a metadata server on the network
}
_UNSIGNED = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
"""moto checks no signature, but takes service and region from here."""


class S3Server:
    """A bucket, and the proxy in front of it.

    Args:
        host: Address of the S3 server.
        port: Its port.
        proxy: What clients are sent through.
    """

    bucket = "bucket"

    def __init__(self, host: str, port: int, proxy: FaultyProxy) -> None:
        self._address = (host, port)
        self.proxy = proxy
        self._send("PUT", f"/{self.bucket}", b"")

    def uri(self, key: str) -> str:
        """URI of an object or directory of the bucket, by way of the proxy."""
        query = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{self.proxy.port}"
        return f"s3://{self.bucket}/{quote(key)}?{query}"

    @property
    def endpoint(self) -> str:
        """URL of the server, by way of the proxy, for clients that are told by `AWS_ENDPOINT_URL`."""
        return f"http://127.0.0.1:{self.proxy.port}"

    def put(self, key: str, data: bytes) -> None:
        """Write one object, past the proxy."""
        self._send("PUT", f"/{self.bucket}/{quote(key)}", data)

    def upload(self, directory: Path, key: str) -> str:
        """Write the files at and below a directory as `key/name` and return the URI of `key`."""
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            self.put(f"{key}/{path.relative_to(directory)}", path.read_bytes())
        return self.uri(key)

    def delete(self, key: str) -> None:
        """Remove one object."""
        self._send("DELETE", f"/{self.bucket}/{quote(key)}", b"")

    def _send(self, method: str, path: str, data: bytes) -> None:
        connection = HTTPConnection(*self._address, timeout=30)
        try:
            connection.request(method, path, data, {"Authorization": _UNSIGNED})
            response = connection.getresponse()
            assert response.status < 300, (method, path, response.status, response.read())
        finally:
            connection.close()


@contextmanager
def serve() -> Iterator[S3Server]:
    """Serve S3 in threads of this process, and set the credentials that it takes."""
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with FaultyProxy(host, port) as proxy, pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)
            yield S3Server(host, port, proxy)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of a module; import it next to `s3`."""
    with serve() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3Server]:
    """The module's server, with no faults set and nothing counted yet."""
    s3_server.proxy.reset()
    yield s3_server
    s3_server.proxy.reset()
