"""`GroupFiles`: which files hold a group's model, by the saves and loads in the order in which the ranks run them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raysharding.group.messages import BegunSave, FilesRecord

_NUM_BEGUN = 64


class GroupFiles:
    """Saves and loads of one group, by all ranks that it has had."""

    def __init__(self, record: FilesRecord) -> None:
        """Begin with the files that the group was made from, or with the record of a controller that has ended."""
        self.record = record
        """What is known now."""

    def begin_save(self, save: BegunSave) -> BegunSave:
        """Record a save before the ranks run it; return it with its number."""
        record = self.record
        save = replace(save, number=record.last + 1)
        self.record = replace(record, last=save.number, begun=(*record.begun[1 - _NUM_BEGUN :], save))
        return save

    def begin_load(self) -> int:
        """Return the number of a load that the ranks begin."""
        self.record = replace(self.record, last=self.record.last + 1)
        return self.record.last

    def committed(self, save: BegunSave) -> None:
        """Record that a save is committed; a second report is ignored."""
        if save not in self.record.begun:
            return
        self._drop([save.token])
        self.record = replace(self.record, saves=(*self.record.saves, save.path))
        if save.is_origin:
            self._set_origin(save.path, save.number)

    def loaded(self, path: str, number: int, *, keeps_adapters: bool) -> None:
        """Record that the ranks hold the contents of these files."""
        if keeps_adapters:
            self.record = replace(self.record, base=path)
        else:
            self._set_origin(path, number)

    def settled(self, tokens: Collection[str], committed: Collection[str]) -> None:
        """Record how saves ended whose ranks are gone.

        Args:
            tokens: Those whose files were looked at.
            committed: Those of them that are complete.
        """
        for save in self.record.begun:
            if save.token in committed:
                self.committed(save)
        self._drop(tokens)

    def reloaded(self, path: str) -> None:
        """Record that new ranks were made from these files."""
        self._set_origin(path, self.begin_load())
        self.record = replace(self.record, base=None)

    def _drop(self, tokens: Collection[str]) -> None:
        self.record = replace(self.record, begun=tuple(one for one in self.record.begun if one.token not in tokens))

    def _set_origin(self, path: str, number: int) -> None:
        # A save in the background may be committed after a load that began later.
        if number > self.record.newest:
            self.record = replace(self.record, origin=path, newest=number)
