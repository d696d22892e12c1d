"""`ModelFiles`: which files hold a group's model, as far as the driver knows, and by the files once ranks are gone."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from raysharding.checkpoint import read_save_record
from raysharding.checkpoint.format import new_token
from raysharding.checkpoint.writing import is_checkpoint, remove_unfinished
from raysharding.errors import CheckpointError

_NUM_BEGUN = 64


@dataclass(frozen=True, eq=False)
class BegunSave:
    """A save that was requested from the ranks."""

    number: int
    """Position among all saves and loads."""
    path: str
    """Destination: a path or a normalized URI."""
    is_origin: bool
    """True if a restart may load the save."""
    token: str = field(default_factory=new_token)
    """Identifier of the save in its files, different from that of any other save."""

    def is_committed(self) -> bool:
        """Return True if this process sees this save at its path, and the save is complete."""
        try:
            return read_save_record(self.path).token == self.token and is_checkpoint(self.path)
        except CheckpointError:
            return False  # not visible here: the ranks' report counts


class ModelFiles:
    """Saves and loads of one group, by all ranks that it has had. Thread-safe."""

    def __init__(self, origin: str, begun: tuple[BegunSave, ...] = (), base: str | None = None) -> None:
        """Begin with the checkpoint that the group was made from, or with the record of an earlier driver.

        Args:
            origin: A path or URI that does not depend on the working directory.
            begun: Saves begun since then whose outcome the earlier driver did not know.
            base: See the attribute.
        """
        self.origin = origin
        """The newest files that hold the model, which a restart would load."""
        self.base = base
        """A whole model that was loaded since the ranks were made, with the adapters kept on it; `None` if none was.

        The origin stays: it holds the adapters, if any file does."""
        self.saves: list[str] = []
        """Paths of the committed saves."""
        self._numbers = itertools.count(1 + max((save.number for save in begun), default=0))
        self._newest = 0
        self._begun = list(begun)
        self._lock = threading.Lock()

    @property
    def is_first(self) -> bool:
        """True if the origin is still the one that this began with."""
        return self._newest == 0

    @property
    def begun(self) -> tuple[BegunSave, ...]:
        """Saves whose outcome is not known."""
        with self._lock:
            return tuple(self._begun)

    def begin_save(self, path: str, *, is_origin: bool) -> BegunSave:
        """Record a save before it is requested from the ranks."""
        with self._lock:
            save = BegunSave(next(self._numbers), path, is_origin)
            self._begun = [*self._begun[1 - _NUM_BEGUN :], save]
        return save

    def begin_load(self) -> int:
        """Return the number of a new load, for `loaded`."""
        return next(self._numbers)

    def committed(self, save: BegunSave) -> None:
        """Record that a save is committed; a second call does nothing."""
        with self._lock:
            if save not in self._begun:
                return
            self._begun.remove(save)
            self.saves.append(save.path)
            if save.is_origin:
                self._set_origin(save.path, save.number)

    def loaded(self, path: str, number: int) -> None:
        """Record that the ranks hold the contents of these files."""
        with self._lock:
            self._set_origin(path, number)

    def settle(self) -> None:
        """Determine from the files how the saves with an unknown outcome ended, and remove their unfinished files.

        The writers of these saves are dead: a save that is not committed now never will be.
        """
        begun = self.begun
        for save in begun:
            remove_unfinished(save.path, save.token)
            if save.is_committed():
                self.committed(save)
        with self._lock:
            self._begun = [save for save in self._begun if save not in begun]

    def _set_origin(self, path: str, number: int) -> None:
        # A background save may be reported after a load that began later.
        if number > self._newest:
            self.origin, self._newest = path, number
