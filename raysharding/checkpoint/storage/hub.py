"""Models of the Hugging Face hub: pinned commits, snapshots in the cache, and files that are read by ranges.

Note [Hub reads]: `pyarrow.fs` takes `hf://` through fsspec, whose files read ahead in blocks: a file of 1.1 MB was
served four times whole. Here a read is one request for exactly its range. The hub redirects reads of large files to
signed addresses of another host; the address is kept until that host refuses it, since the hub limits requests.
The hub's session of `huggingface_hub` sends the requests, so its proxies and `HF_HUB_OFFLINE` count here too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlsplit

from raysharding.checkpoint.storage.uri import is_remote, scheme_of
from raysharding.errors import CheckpointError

_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_LOG_IN: Final = "set HF_TOKEN or run `hf auth login`"
_OTHER_KINDS: Final = ("datasets", "spaces", "kernels", "buckets")
"""First parts of URIs that are no models; pyarrow opens these."""


@dataclass(frozen=True)
class HubAccess:
    """Address of the hub, and the token. The driver sends its own to the ranks; the token is in no `repr`."""

    endpoint: str
    """Address of the hub, without a slash at the end."""
    token: str | None = field(repr=False)
    """Token, `None` if nobody is logged in."""


_adopted: list[HubAccess] = []


def adopt_access(access: HubAccess) -> None:
    """Use the driver's access in this process, in place of what its environment says.

    A token that is held for the endpoint stays where the driver has none.
    """
    if access.token is None and _adopted and _adopted[0].endpoint == access.endpoint:
        return
    _adopted[:] = [access]


def hub_access() -> HubAccess:
    """Return the access of this process: the adopted one, or that of `huggingface_hub` (`HF_ENDPOINT`, `HF_TOKEN`)."""
    if _adopted:
        return _adopted[0]
    import huggingface_hub
    from huggingface_hub import constants

    return HubAccess(constants.ENDPOINT.rstrip("/"), huggingface_hub.get_token())


def hub_is_offline() -> bool:
    """Return True if `HF_HUB_OFFLINE` forbids requests to the hub."""
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


def access_to(*paths: str | None) -> HubAccess | None:
    """Return this process's access to the hub, for ranks that read these paths; `None` if none is of the hub.

    A snapshot in this machine's cache counts: a node without it reads the same commit from the hub.
    """
    is_there = (HubPath.of_pinned(path) or (is_remote(path) and HubPath.of(path)) for path in paths if path is not None)
    return hub_access() if any(is_there) else None


@dataclass(frozen=True)
class HubPath:
    """A model of the hub, or a file in it."""

    repo: str
    """`org/name`."""
    revision: str | None
    """Commit, branch or tag; `None` for `main`."""
    inside: str = ""
    """Path in the repository; empty for its root."""

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Parse a hub id or an `hf://` URI of a model; return `None` for any other text.

        A text is an id if it is `org/name` and `huggingface_hub`, where it is installed, takes it as one.
        """
        if scheme_of(text) == "hf":
            inside = model_path(text)
            return None if inside is None else cls.parse(inside)
        if not _ID.fullmatch(text):
            return None
        try:
            from huggingface_hub.utils import HFValidationError, validate_repo_id
        except ImportError:
            return None
        try:
            validate_repo_id(text)
        except HFValidationError:
            return None
        return cls(text, None)

    @classmethod
    def of_pinned(cls, path: str) -> Self | None:
        """Return the model and commit of an `hf://` URI or of a snapshot in the cache; `None` for other paths."""
        match = _SNAPSHOT.search(path)
        if match is not None and scheme_of(path) is None:
            return cls(f"{match[1]}/{match[2]}", match[3])
        hub = cls.of(path) if scheme_of(path) == "hf" else None
        return hub if hub is not None and hub.is_pinned and not hub.inside else None

    @classmethod
    def parse(cls, path: str) -> Self:
        """Parse `org/name@revision/directory/file`, of which all after `org` may be missing."""
        org, _, rest = path.strip("/").partition("/")
        name, _, inside = rest.partition("/")
        name, at, revision = name.partition("@")
        return cls(f"{org}/{name}", unquote(revision) if at else None, inside)

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, so that the files cannot change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def uri(self) -> str:
        """The URI, which opens the same files in any process."""
        at = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repo}{at}" + (f"/{quote(self.inside)}" if self.inside else "")

    def cached(self) -> str | None:
        """Return the snapshot of this revision in this machine's Hugging Face cache, whole or not; `None` if none."""
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:
            return None  # a path may look like a snapshot where nothing of the hub is used
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json"):
            cached = try_to_load_from_cache(self.repo, name, revision=self.revision)
            if isinstance(cached, str):
                return os.path.dirname(cached)
        return None

    def commit(self, timeout_s: float) -> str:
        """Ask the hub for the commit of the revision.

        Raises:
            CheckpointError: The hub refused; names the model, the reason and the cure.
            OSError: The hub does not answer.
        """
        if self.is_pinned:
            return str(self.revision)
        with _hub_errors(self):
            commit = _model_info(hub_access(), self, timeout_s).sha
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise CheckpointError(f"the hub names no commit for revision {self.revision or 'main'!r}", path=self.repo)
        return commit


def model_path(uri: str) -> str | None:
    """Return the part of an `hf://` URI after the scheme, decoded but for the revision; `None` if it is no model's."""
    parts = urlsplit(uri)
    org = unquote(parts.netloc)
    if scheme_of(uri) != "hf" or org in _OTHER_KINDS:
        return None
    name, slash, inside = parts.path.strip("/").partition("/")
    return f"{org}/{name}{slash}{unquote(inside)}"


class HubFile:
    """An open file of the hub, with the methods of a pyarrow `NativeFile` that readers use. Thread-safe."""

    def __init__(self, url: str, path: HubPath, num_bytes: int, etag: str, timeout_s: float) -> None:
        self._url = url
        self._path = path
        self._num_bytes = num_bytes
        self._etag = etag
        self._timeout_s = timeout_s
        self._address = url  # where the hub sent the last read

    def size(self) -> int:
        """Return the number of bytes."""
        return self._num_bytes

    def metadata(self) -> dict[str, bytes]:
        """Return the etag: the hash of the content."""
        return {"etag": self._etag.encode()}

    def read_at(self, length: int, offset: int) -> bytes:
        """Return a range by one request, or two where the kept address has expired."""
        with _hub_errors(self._path):
            if self._address != self._url:
                data = self._send(self._address, length, offset, is_kept=True)
                if data is not None:
                    return data
            data = self._send(self._url, length, offset, is_kept=False)
            assert data is not None, "errors of the hub itself are raised"
            return data

    def _send(self, url: str, length: int, offset: int, *, is_kept: bool) -> bytes | None:
        """Request a range; return `None` if a kept address is refused."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        asked = f"{offset}-{offset + length - 1}"
        is_whole = (offset, length) == (0, self._num_bytes)
        headers = _headers(url) | ({} if is_whole else {"Range": f"bytes={asked}"})
        # The client leaves the token out of a redirect to another host.
        options: dict[str, Any] = {"headers": headers, "timeout": self._timeout_s, "follow_redirects": True}
        with get_session().stream("GET", url, **options) as response:
            if is_kept and response.status_code in (401, 403, 404, 410):
                return None
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            ranged = response.headers.get("Content-Range", "").startswith(f"bytes {asked}/")
            if not ranged and not (is_whole and response.status_code == 200):
                what = f"HTTP status {response.status_code} without the range {asked}"
                raise OSError(f"the answer is another part of the file than was asked for ({what})")
            data = bytearray()
            for chunk in response.iter_raw():
                data += chunk
                if len(data) > length:
                    raise OSError(f"the answer has more bytes than the {length} that were asked for")
            self._address = str(response.url)
        return bytes(data)


class HubFileSystem:
    """The models of the hub, with the methods of a `pyarrow.fs.FileSystem` that reading needs.

    Paths are `org/name@revision/directory/file`.

    Args:
        timeout_s: Longest silence of the hub within a request, in seconds.
    """

    type_name = "hf"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def get_file_info(self, wanted: Any) -> Any:
        """Return a `FileInfo` for a path, or those of all entries for a `FileSelector`."""
        import pyarrow.fs as arrow_fs

        is_listing = isinstance(wanted, arrow_fs.FileSelector)
        path = HubPath.parse(wanted.base_dir if is_listing else wanted)
        files = self._files(path)
        below = f"{path.inside}/".lstrip("/")
        names = {name.removeprefix(below).partition("/")[0] for name in files if name.startswith(below)}

        def info(inside: str, name: str) -> Any:
            if inside in files:
                return arrow_fs.FileInfo(name, arrow_fs.FileType.File, size=files[inside].size)
            return arrow_fs.FileInfo(name, arrow_fs.FileType.Directory)

        if is_listing:
            return [info(f"{below}{name}", f"{wanted.base_dir}/{name}") for name in names]
        if path.inside and path.inside not in files and not names:
            return arrow_fs.FileInfo(wanted, arrow_fs.FileType.NotFound)
        return info(path.inside, wanted)

    def open_input_file(self, wanted: str) -> HubFile:
        """Open a file, without a request if the model was listed before."""
        path = HubPath.parse(wanted)
        file = self._files(path).get(path.inside)
        if file is None:
            raise FileNotFoundError(f"{path.uri}: no such file")
        url = f"{hub_access().endpoint}/{path.repo}/resolve/{quote(path.revision or 'main', safe='')}"
        etag = (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        return HubFile(f"{url}/{quote(path.inside)}", path, file.size, etag, self._timeout_s)

    def open_output_stream(self, wanted: str) -> Any:
        """Refuse: saves go elsewhere."""
        what = "a save to the hub is not supported: save to a directory, and upload it with `hf upload`"
        raise CheckpointError(what, path=f"hf://{wanted}")

    def _files(self, path: HubPath) -> Mapping[str, Any]:
        """Return path → `RepoSibling` of all files of a model; asked once for a commit, whose files cannot change."""
        listing = _listing if path.is_pinned else _listing.__wrapped__
        with _hub_errors(path):
            return listing(hub_access(), replace(path, inside=""), self._timeout_s)


@lru_cache(maxsize=64)
def _listing(access: HubAccess, model: HubPath, timeout_s: float) -> Mapping[str, Any]:
    return {file.rfilename: file for file in _model_info(access, model, timeout_s, files_metadata=True).siblings or ()}


def _model_info(access: HubAccess, model: HubPath, timeout_s: float, **options: Any) -> Any:
    """Ask the hub for a `ModelInfo`. `HfApi` has other listings, which take no deadline."""
    from huggingface_hub import HfApi

    api = HfApi(access.endpoint, token=access.token or False, library_name="raysharding")
    return api.model_info(model.repo, revision=model.revision or "main", timeout=timeout_s, **options)


def _headers(url: str) -> dict[str, str]:
    """Return the headers of a request; only the hub itself gets the token."""
    from huggingface_hub.utils import build_hf_headers

    access = hub_access()
    is_hub = urlsplit(url)[:2] == urlsplit(access.endpoint)[:2]
    headers: dict[str, str] = build_hf_headers(
        token=access.token if is_hub and access.token else False, library_name="raysharding"
    )
    return headers | {"Accept-Encoding": "identity"}


@contextmanager
def _hub_errors(path: HubPath) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into a `CheckpointError` with the cure; into `OSError` if a retry may help.

    Texts of `huggingface_hub` are not repeated: they hold addresses, which may be signed.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        what = "HF_HUB_OFFLINE is set, and the Hugging Face cache of this machine does not hold it: unset it, or run"
        raise CheckpointError(f"{what} `hf download {path.repo}` where the network is", path=path.uri) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (408, 429) or status >= 500:
            raise OSError(f"the hub answered with HTTP status {status}") from error
        raise CheckpointError(_refusal(path, error, status), path=path.uri) from error
    except (errors.HFValidationError, KeyError, TypeError) as error:
        # The id is none; or the answer lacks a field, or is of another kind.
        what = f"no name of a model, or {hub_access().endpoint} gives no description of one: check both"
        raise CheckpointError(what, path=path.uri) from error
    except errors.HTTPError as error:  # of httpx: no connection, no answer in time
        raise OSError(f"the hub does not answer ({type(error).__name__})") from error


def _refusal(path: HubPath, error: Exception, status: int) -> str:
    """Return why the hub refused, and what the user can do about it."""
    from huggingface_hub import errors

    endpoint, revision = hub_access().endpoint, path.revision or "main"
    if isinstance(error, errors.GatedRepoError):
        return f"the model is gated (HTTP {status}): accept its licence at {endpoint}/{path.repo} and {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no revision {revision!r} (HTTP {status}): check the spelling"
    if isinstance(error, errors.EntryNotFoundError):
        return f"the model has no such file or directory (HTTP {status})"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        what = f"{endpoint} has no such model (HTTP {status}), and this machine has no such path: check the spelling"
        token = f"the token that is set gives no access; {_LOG_IN}" if hub_access().token else _LOG_IN
        return f"{what}. If the model is private: {token}. If only the nodes see the path, give an absolute one"
    return f"the hub refused (HTTP {status}): {_LOG_IN}, with a token that may read it"
