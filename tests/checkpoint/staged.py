"""`StagedDirectory`: a save by one process, for tests of writers and commits."""

from __future__ import annotations

import os
from typing import Self

from raysharding.checkpoint.writing.commit import commit_staging, create_staging, remove_staging


class StagedDirectory:
    """A save by one process. Leaving the `with` block without `commit` removes the written files."""

    def __init__(self, final: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = create_staging(final, overwrite=overwrite)
        """Absolute path of the directory to write files into."""
        self._final, self._overwrite = os.path.realpath(final), overwrite

    def commit(self) -> None:
        """Commit the written files; see `commit_staging`."""
        commit_staging(self.path, self._final, overwrite=self._overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        remove_staging(self.path)  # nothing after a commit
