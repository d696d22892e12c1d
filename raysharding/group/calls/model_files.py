"""`ModelFiles`: which files hold a group's model, as its driver has heard, and as they say once the ranks are gone."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from raysharding.checkpoint import is_checkpoint, new_token, read_save_record, remove_unfinished
from raysharding.errors import CheckpointError

_NUM_BEGUN = 64


@dataclass(frozen=True, eq=False)
class BegunSave:
    """A save that the ranks were asked for."""

    number: int
    """Place among all saves and loads."""
    path: str
    """Where it goes: a path or a normal URI."""
    is_origin: bool
    """Whether a restart may load it."""
    token: str = field(default_factory=new_token)
    """Tells it, in files, from all others."""

    def is_committed(self) -> bool:
        """Return True if what this process sees at its place is this save, whole."""
        try:
            return read_save_record(self.path).token == self.token and is_checkpoint(self.path)
        except CheckpointError:
            return False  # out of sight: what was heard counts


class ModelFiles:
    """Saves and loads of one group, by all the ranks that it has had. Thread-safe."""

    def __init__(self, origin: str, begun: tuple[BegunSave, ...] = ()) -> None:
        """Begin with the checkpoint that the group was made from, or with what an earlier driver knew.

        Args:
            origin: A path or URI that means the same wherever the program goes.
            begun: Saves begun since, of which that driver had not heard how they ended.
        """
        self.origin = origin
        """The newest files that hold the model: what a restart would load."""
        self.saves: list[str] = []
        """Paths of the saves that were committed."""
        self._numbers = itertools.count(1 + max((save.number for save in begun), default=0))
        self._newest = 0
        self._begun = list(begun)
        self._lock = threading.Lock()

    @property
    def begun(self) -> tuple[BegunSave, ...]:
        """Saves of which nobody has heard how they ended."""
        with self._lock:
            return tuple(self._begun)

    def begin_save(self, path: str, *, is_origin: bool) -> BegunSave:
        """Note a save before the ranks are asked for it."""
        with self._lock:
            save = BegunSave(next(self._numbers), path, is_origin)
            self._begun = [*self._begun[1 - _NUM_BEGUN :], save]
        return save

    def begin_load(self) -> int:
        """Return the number of a load, for `loaded`."""
        return next(self._numbers)

    def committed(self, save: BegunSave) -> None:
        """Note that a save is committed; a second time it does nothing."""
        with self._lock:
            if save not in self._begun:
                return
            self._begun.remove(save)
            self.saves.append(save.path)
            if save.is_origin:
                self._set_origin(save.path, save.number)

    def loaded(self, path: str, number: int) -> None:
        """Note that the ranks hold what is in these files."""
        with self._lock:
            self._set_origin(path, number)

    def settle(self) -> None:
        """Learn from the files how the saves ended of which nothing was heard, and remove what they have left.

        Their writers are dead: one that is not committed never will be.
        """
        begun = self.begun
        for save in begun:
            remove_unfinished(save.path, save.token)
            if save.is_committed():
                self.committed(save)
        with self._lock:
            self._begun = [save for save in self._begun if save not in begun]

    def _set_origin(self, path: str, number: int) -> None:
        # A save in the background may be heard of after a load that came later.
        if number > self._newest:
            self.origin, self._newest = path, number
