"""Several reads at once: one thread alone reaches neither a fast disk's rate nor the page cache's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

Job = Callable[[], None]


class _Batch:
    """Jobs of which the caller waits for the last."""

    def __init__(self, num_jobs: int) -> None:
        self._left = num_jobs
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.error: Exception | None = None

    def run(self, job: Job) -> None:
        try:
            if self.error is None:
                job()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = self.error or error
        with self._lock:
            self._left -= 1
            if not self._left:
                self.done.set()


class ReadThreads:
    """Runs jobs in a few threads, the caller's among them; a context manager that lets the others end.

    They are daemons: a read that hangs on a dead file system must not keep the process from exiting.

    Args:
        num_threads: How many jobs run at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Batch, Job] | None] = queue.SimpleQueue()
        self._num_others = num_threads - 1
        for number in range(self._num_others):
            threading.Thread(target=self._work, name=f"raysharding-read-{number}", daemon=True).start()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs and wait for them; raises the first error that one of them raised."""
        if not self._num_others:
            for job in jobs:
                job()
            return
        batch = _Batch(len(jobs))
        for job in jobs[1:]:
            self._jobs.put((batch, job))
        for job in jobs[:1]:
            batch.run(job)
            self._help()
            batch.done.wait()
        if batch.error is not None:
            raise batch.error

    def _help(self) -> None:
        """Take jobs that no thread has taken yet."""
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            assert item is not None, "closed while it ran"
            item[0].run(item[1])

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            item[0].run(item[1])

    def __enter__(self) -> ReadThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _ in range(self._num_others):
            self._jobs.put(None)
