"""Jobs run at once, all of them, and the first error comes out."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from raysharding.distributed.transfer.sources import ReadThreads


def boom(number: int) -> None:
    raise OSError(f"job {number}")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_jobs_run_once(num_threads: int) -> None:
    ran: list[int] = []
    with ReadThreads(num_threads) as threads:
        for count in (0, 1, 2, 50):
            ran.clear()
            threads.run([partial(ran.append, number) for number in range(count)])
            assert sorted(ran) == list(range(count))


def test_jobs_run_at_once() -> None:
    together = threading.Barrier(3)
    met: list[int] = []

    def meet() -> None:
        met.append(together.wait(20))

    with ReadThreads(3) as threads:
        threads.run([meet] * 3)
    assert sorted(met) == [0, 1, 2]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_comes_out_and_the_threads_go_on(num_threads: int) -> None:
    ran: list[int] = []
    with ReadThreads(num_threads) as threads:
        with pytest.raises(OSError, match="job 1"):
            threads.run([partial(ran.append, 0), partial(boom, 1)])
        threads.run([partial(ran.append, 2), partial(ran.append, 3)])
    assert {2, 3} <= set(ran)


def test_the_threads_end() -> None:
    earlier = set(threading.enumerate())  # those of the tests before may still be about to end
    with ReadThreads(4):
        mine = set(threading.enumerate()) - earlier
        assert len(mine) == 3
    for thread in mine:
        thread.join(timeout=10)
        assert not thread.is_alive()
