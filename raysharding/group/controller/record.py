"""`Record`: what outlives the controller's process, in Ray's internal KV, as Ray Serve's controller keeps its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raysharding.errors import GroupError
from raysharding.group.cluster import delete_record, read_record, write_record
from raysharding.group.messages import BegunSave, FilesRecord, Packed

_KV_S = 20.0
_NUM_BEGUN = 64


class Record:
    """The record of one group, over all ranks that it has had. Until the group was READY, nothing is stored."""

    def __init__(self, key: str, title: str, origin: str, *, is_restarted: bool) -> None:
        """Begin without a record, or with that of a process that has died; waits for the GCS.

        Args:
            key: Key of the record.
            title: Name of the group in errors.
            origin: Files that the group is made from.
            is_restarted: True in a process that replaces another one.
        """
        self._key = key
        self._title = title
        self._writer = ThreadPoolExecutor(1, "record")
        """One thread: an older write, also one that was given up, never comes after a newer one."""
        self.files = FilesRecord(origin)
        """The files that hold the model, by the saves and loads in the order in which the ranks run them."""
        self.spec: Packed | None = None
        """The `GroupSpec`, with the optimizer's factory that was set last; `None` until the group was READY."""
        self.loaded: Packed | None = None
        """The packed `Loaded` of the group; `None` until the group was READY."""
        stored = read_record(key) if is_restarted else None
        if stored is not None:
            self.files, self.spec, self.loaded = stored

    async def keep(self, spec: Packed, loaded: Packed, reloaded: str | None) -> None:
        """Store the record of a group that is loaded.

        Args:
            spec: The `GroupSpec`.
            loaded: The packed `Loaded`, reports and facts of the group.
            reloaded: Files that a restart has loaded, if not those of before.
        """
        self.spec, self.loaded = spec, loaded
        if reloaded is not None:
            self._set_origin(reloaded, len(self.files.begun))
            self.files = replace(self.files, base=None)
        await self._write()

    async def set_spec(self, spec: Packed) -> None:
        """Store another spec."""
        self.spec = spec
        await self._write()

    async def begun(self, save: BegunSave) -> None:
        """Record a save before the ranks run it."""
        self.files = replace(self.files, begun=(*self.files.begun[1 - _NUM_BEGUN :], save))
        await self._write()

    async def load_ended(self, path: str, *, keeps_adapters: bool) -> None:
        """Record that the ranks hold the contents of these files.

        Args:
            path: Path or URI of the files.
            keeps_adapters: True if they are the base only, on which the ranks keep their adapters.
        """
        if keeps_adapters:
            self.files = replace(self.files, base=path)
        else:
            self._set_origin(path, len(self.files.begun))
        await self._write()

    async def saves_ended(self, tokens: Collection[str], committed: Collection[str]) -> None:
        """Record how saves ended.

        Args:
            tokens: The saves; one that is not in the record any more is ignored.
            committed: Those of them that are complete.
        """
        for save in self.files.begun:
            if save.token in committed:
                self.files = replace(self.files, saves=(*self.files.saves, save.path))
                if save.is_origin:
                    self._set_origin(save.path, self.files.begun.index(save))
        begun = tuple(one for one in self.files.begun if one.token not in tokens)
        self.files = replace(self.files, begun=begun)
        await self._write()

    async def delete(self) -> None:
        """Remove the record, if the GCS answers."""
        await asyncio.wait([self._in_order(delete_record)], timeout=_KV_S)

    def _set_origin(self, path: str, num_older: int) -> None:
        # The saves that began before are older, also those in the background that are committed later.
        begun = self.files.begun
        older = (replace(save, is_origin=False) for save in begun[:num_older])
        self.files = replace(self.files, origin=path, is_initial=False, begun=(*older, *begun[num_older:]))

    def _in_order(self, change: Callable[..., None], *args: Any) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._writer, change, self._key, *args)

    async def _write(self) -> None:
        """Store what is known now.

        Raises:
            GroupError: The GCS does not answer.
        """
        if self.spec is None:
            return
        try:
            await asyncio.wait_for(self._in_order(write_record, (self.files, self.spec, self.loaded)), _KV_S)
        except TimeoutError:
            what = f"{self._title}: the GCS did not take the group's record within {_KV_S:g} s"
            raise GroupError(f"{what}; call again when it answers") from None
