"""`DcpReader`: tensors that `torch.distributed.checkpoint` saved in chunks, put together one at a time."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from raysharding.checkpoint.storage import LocalStorage, os_errors
from raysharding.checkpoint.torch_formats.dcp_metadata import read_dcp_metadata
from raysharding.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PIECE_BYTES: Final = 4 << 20
"""Largest piece that is passed to a writer at once, in bytes."""
_MAX_FRAME_BYTES: Final = 16 << 20
"""Bytes that an archive may hold besides the tensor."""
_DIRECTORY_BYTES: Final = 1 << 20
"""Most bytes at the end of an archive in which its directory is; torch writes six records."""
_ZIP_MARK: Final = b"PK\x03\x04"

Write = Callable[[int, memoryview], None]
"""Called as `write(byte_offset, piece)`."""


class DcpReader:
    """Reads a directory by torch's `FileSystemReader`, tensor by tensor. For one thread.

    torch's reader reads tensors by `torch.load(weights_only=True)`. What it leaves open is closed here: `.metadata` is
    a pickle that may run code; archives may unpack to any size; and torch's planner reads values by
    `torch.load(weights_only=False)`.

    Args:
        directory: A local directory.

    Raises:
        CheckpointError: As from `read_dcp_metadata`; or a file is missing or too short. The error names file and
            tensor.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.metadata = read_dcp_metadata(directory)
        """Contents of the directory."""
        for index, place in self.metadata.saved.storage_data.items():
            self._check_place(index.fqn, place)

    def read_tensor(self, key: str, write: Write) -> None:
        """Read one tensor and write it, row-major, in pieces of at most `PIECE_BYTES`.

        The tensor and one chunk are in memory.

        Raises:
            CheckpointError: A file changed, is damaged or unreadable, or the tensor does not fit into memory.
        """
        info, entry = self.metadata.tensors[key], self.metadata.saved.state_dict_metadata[key]
        for chunk in cast("TensorStorageMetadata", entry).chunks:
            self._check_archive(key, chunk.offsets, math.prod(chunk.sizes) * info.dtype.itemsize)
        try:
            whole = torch.empty(info.shape, dtype=info.dtype)
        except RuntimeError as error:
            what = f"has no place in memory: {error}"
            raise CheckpointError(what, path=self.metadata.directory, tensor=key) from error
        self._load({key: whole})
        data = whole.view(-1).view(torch.uint8).numpy().data
        for first in range(0, data.nbytes, PIECE_BYTES):
            write(first, data[first : first + PIECE_BYTES])

    def read_value(self, key: str) -> Any:
        """Read a value that is no tensor, by torch's weights-only unpickler.

        Raises:
            CheckpointError: The value needs another unpickler.
        """
        self._check_archive(key, None, 0)
        found: dict[str, Any] = {key: None}
        self._load(found)
        return found[key]

    def _load(self, state: dict[str, Any]) -> None:
        """Fill a state dict of one tensor or value."""
        from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

        class WeightsOnlyPlanner(DefaultLoadPlanner):
            """Reads values by the unpickler that reads tensors."""

            def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
                """Read a value; torch's own method runs the code that its pickle names."""
                self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

        planner = WeightsOnlyPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(self.metadata.directory)
        try:
            planner.set_up_planner(state, self.metadata.saved, True)
            reader.set_up_storage_reader(self.metadata.saved, True)
            with torch.no_grad():
                reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:  # torch raises errors of many types
            what = f"cannot be read with torch.load(weights_only=True): {error}"
            raise CheckpointError(what, path=self.metadata.directory, tensor=next(iter(state))) from error

    def _check_archive(self, key: str, offsets: torch.Size | None, expected: int) -> None:
        """Refuse an archive that says that it unpacks to less than `expected` bytes, or to much more."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        place = self.metadata.saved.storage_data[MetadataIndex(key, offsets)]
        path, end = self._check_place(key, place), place.offset + place.length
        begin = max(place.offset, end - _DIRECTORY_BYTES)
        with os_errors("cannot be read", path), open(path, "rb") as file:
            try:
                file.seek(place.offset)
                if file.read(len(_ZIP_MARK)) != _ZIP_MARK:
                    raise zipfile.BadZipFile("it begins otherwise")  # torch's older format, which may end in an archive
                file.seek(begin)
                with zipfile.ZipFile(io.BytesIO(file.read(end - begin))) as archive:
                    unpacked = sum(info.file_size for info in archive.infolist())
            except Exception as error:  # zipfile raises errors of many types if the bytes are no archive
                what = f"holds no torch.save archive at bytes [{place.offset}, {end}): {error}"
                raise CheckpointError(what, path=path, tensor=key) from error
        if not expected <= unpacked <= max(expected, place.length) + _MAX_FRAME_BYTES:
            what = f"unpacks to {unpacked} bytes, but {expected or place.length} were expected"
            raise CheckpointError(what, path=path, tensor=key)

    def _check_place(self, key: str, place: Any) -> str:
        """Return the path of the file of a chunk or a value, after a check that it holds the range."""
        directory, end = self.metadata.directory, place.offset + place.length
        path = os.path.join(directory, place.relative_path)
        storage = LocalStorage()
        storage.check_inside(directory, place.relative_path)
        found = storage.find(path)
        if found.kind != "file":
            what = "the file that holds it is missing" if found.kind == "missing" else "is not a regular file"
            raise CheckpointError(what, path=path, tensor=key)
        if end > found.num_bytes:
            what = f"lies at bytes [{place.offset}, {end}), but the file has {found.num_bytes}: it is truncated"
            raise CheckpointError(what, path=path, tensor=key)
        return path
