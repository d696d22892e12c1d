"""`Record`: what outlives the controller's process, in Ray's internal KV, as Ray Serve's controller keeps its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from raysharding.errors import GroupError
from raysharding.group.cluster import delete_record, read_record, write_record
from raysharding.group.controller.files import GroupFiles
from raysharding.group.messages import BegunSave, FilesRecord, Packed, Submission

_KV_S = 20.0


@dataclass(frozen=True, slots=True)
class Stored:
    """The value in the KV."""

    files: FilesRecord
    """Files that hold the model."""
    spec: Packed
    """The `GroupSpec`, with the optimizer's factory that was set last."""
    loaded: Packed
    """What the load has found."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that may be a save or a load."""

    number: int
    """Its number; 0 if it is neither."""
    save: BegunSave | None = None
    """The save."""
    loads: str | None = None
    """Files of the load."""


class Record:
    """The record of one group. Until the group is READY for the first time, nothing is stored."""

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
        self._stored: Stored | None = read_record(key) if is_restarted else None
        self.files = GroupFiles(FilesRecord(origin) if self._stored is None else self._stored.files)
        """Files that hold the model."""

    @property
    def stored(self) -> Stored | None:
        """What was stored last."""
        return self._stored

    async def keep(self, spec: Packed, loaded: Packed) -> None:
        """Store the record of a group that is loaded."""
        self._stored = Stored(self.files.record, spec, loaded)
        await self.write()

    async def set_spec(self, spec: Packed) -> None:
        """Store another spec."""
        assert self._stored is not None, "the group was READY"
        self._stored = replace(self._stored, spec=spec)
        await self.write()

    async def begin(self, submission: Submission) -> Begun:
        """Number a save or load in the order in which the ranks run them; the record of a save comes before it."""
        if submission.save is not None:
            save = self.files.begin_save(submission.save)
            await self.write()
            return Begun(save.number, save=save)
        loads = submission.loads
        return Begun(0) if loads is None else Begun(self.files.begin_load(), loads=loads)

    async def end(self, begun: Begun, *, keeps_adapters: bool) -> None:
        """Record that a save or load has succeeded; see `Verdict`."""
        if begun.save is not None:
            await self.committed(begun.save)
        elif begun.loads is not None:
            self.files.loaded(begun.loads, begun.number, keeps_adapters=keeps_adapters)
            await self.write()

    async def committed(self, save: BegunSave) -> None:
        """Record that a save is committed."""
        self.files.committed(save)
        await self.write()

    async def write(self) -> None:
        """Store what is known of the files now.

        Raises:
            GroupError: The GCS does not answer.
        """
        if self._stored is None:
            return
        self._stored = replace(self._stored, files=self.files.record)
        try:
            await asyncio.wait_for(asyncio.to_thread(write_record, self._key, self._stored), _KV_S)
        except TimeoutError:
            what = f"{self._title}: the GCS did not take the group's record within {_KV_S:g} s"
            raise GroupError(f"{what}; call again when it answers") from None

    async def delete(self) -> None:
        """Remove the record, if the GCS answers."""
        await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(delete_record, self._key))], timeout=_KV_S)
