"""What the ranks of `tests.spawn` have imported before they are forked. Importing it runs nothing else."""

import contextlib

with contextlib.suppress(ImportError):
    pass
