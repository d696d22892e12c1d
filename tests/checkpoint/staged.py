"""`StagedDirectory`: a save by one process, for tests of writers and commits."""

from __future__ import annotations

import os
from typing import Self

from raysharding.checkpoint.writing.commit import commit_staging, create_staging, remove_staging
from raysharding.errors import CheckpointError


class StagedDirectory:
    """A save by one process. Leaving the `with` block without `commit` removes the written files.

    Args:
        final: The destination directory.
        overwrite: Allow a checkpoint there.

    Raises:
        CheckpointError: As `create_staging`.
    """

    def __init__(self, final: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.final = os.path.realpath(final)
        """Absolute path of the destination."""
        self.path = create_staging(final, overwrite=overwrite)
        """Absolute path of the directory to write files into."""
        self._overwrite = overwrite
        self._open = True

    def commit(self) -> None:
        """Commit the written files to `final`; see `commit_staging`."""
        assert self._open, "commit after commit or abort"
        commit_staging(self.path, self.final, overwrite=self._overwrite)
        self._open = False

    def abort(self) -> None:
        """Remove the written files. Does nothing after `commit`, or a second time."""
        if self._open:
            self._open = False
            remove_staging(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.abort()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the first error is the one that is raised
