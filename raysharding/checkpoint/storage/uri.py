"""Parse and join local paths and URIs without file system access."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from raysharding.errors import CheckpointError

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URI in lower case, `None` for a local path."""
    match = _SCHEME.match(path)
    return match[1].lower() if match else None


def is_remote(path: str) -> bool:
    """Return True if `path` is a URI, but not a `file://` URI."""
    return scheme_of(path) not in (None, "file")


def normal_path(path: str) -> str:
    """Return the normal form of a path that the user gave: an absolute local path, or a remote URI.

    A URI keeps its query, which pyarrow reads (`?region=...&endpoint_override=...`), but not its trailing slashes.

    Raises:
        CheckpointError: An empty path, a `file://` URI of another host, a URI with a password or a fragment.
    """
    if not path or "\0" in path:
        raise CheckpointError(f"the path {path!r} is none: give a directory, a .safetensors file or an index JSON")
    scheme = scheme_of(path)
    if scheme is None:
        return os.path.abspath(path)
    parts = urlsplit(path)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            raise CheckpointError("is not a local file URI: write file:///absolute/path", path=path)
        return os.path.abspath(unquote(parts.path))
    if "@" in parts.netloc and ":" in parts.netloc.rpartition("@")[0]:
        what = "the URI holds a password, which would show in logs and reports: give credentials in the environment"
        raise CheckpointError(what, path=f"{scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}")
    if "#" in path:
        raise CheckpointError("the URI has a fragment: write %23 for a # in a name", path=path)
    return _with_path(path, urlsplit(path).path.rstrip("/"))


def join_path(directory: str, name: str) -> str:
    """Return the path of `name` in `directory`, a normal path; in a URI all but a `/` in it is percent-encoded."""
    if not is_remote(directory):
        return os.path.join(directory, name)
    return _with_path(directory, f"{urlsplit(directory).path}/{quote(name)}")


def split_path(path: str) -> tuple[str, str]:
    """Return the directory and the name of a normal path. The inverse of `join_path`."""
    if not is_remote(path):
        return os.path.split(path)
    directory, _, name = urlsplit(path).path.rpartition("/")
    return _with_path(path, directory), unquote(name)


def root_of(uri: str) -> str:
    """Return the URI of the bucket or host that a URI is in, with the query."""
    return _with_path(uri, "")


def _with_path(uri: str, path: str) -> str:
    before, question, query = uri.partition("?")
    scheme, _, rest = before.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}{path}{question}{query}"
