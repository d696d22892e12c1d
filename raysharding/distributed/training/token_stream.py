"""`TokenStream`: the tokens of a `generate` while it runs, on a thread that is one step ahead of what was taken.

transformers' loop pushes tokens into a streamer, and the controller asks for them a step at a time: as in transformers'
own `TextIteratorStreamer`, a thread stands between. All ranks exchange their tokens once a step, so that they take, and
stop after, the same steps. The work thread runs no collective while the other thread lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from raysharding.batch import Tokens
from raysharding.distributed.comm import all_gather_ints

_NO_TOKEN = -1


class GenerationStoppedError(Exception):
    """The reader of a stream has stopped it."""


class TokenStream:
    """A generation on a thread. Its methods `put` and `end` are those of transformers' `BaseStreamer`.

    Args:
        run: `run(stream=...)` sets the thread's device, generates with this stream as the streamer, and calls
            `exchange` once a step; collective.
        is_silent: True if this rank's tokens are no rows of the call.
    """

    def __init__(self, run: Callable[..., Any], *, is_silent: bool) -> None:
        self.end_tokens: Collection[int] = ()
        """Ids after which a row has ended; set by `run`."""
        self.outcome: Future[Any] = Future()
        """What `run` returned or raised, once `next` has returned `None`."""
        self._is_silent = is_silent
        self._num_rows: int | None = None
        """Rows of this rank that are rows of the call; `None` before the prompt."""
        self._rows: list[int] = []
        """That number of each rank, from the first `exchange`."""
        self._ended: set[int] = set()
        self._put: list[int] = []
        self._handed: SimpleQueue[Tokens | None] = SimpleQueue()
        self._goes_on: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(run,), name="raysharding-generate", daemon=True)
        self._thread.start()

    def next(self) -> Tokens | None:
        """Return the tokens of the next step, of all ranks; `None` at the end. Collective."""
        self._goes_on.put(True)  # the step after the one whose tokens travel is computed meanwhile
        # Not bounded here: the controller bounds each step, as it does a forward.
        return self._handed.get()

    def close(self) -> None:
        """Stop the generation, if it has not ended; collective, since all ranks leave the model together."""
        self._goes_on.put(False)
        self._thread.join()

    def _run(self, run: Callable[..., Any]) -> None:
        try:
            self.outcome.set_result(run(stream=self))
        except BaseException as error:  # noqa: BLE001 - raised by `outcome`
            self.outcome.set_exception(error)
        self._handed.put(None)

    def put(self, value: torch.Tensor) -> None:
        """Take one token of each row; the prompt comes first."""
        if self._num_rows is None:
            self._num_rows = 0 if self._is_silent else len(value)
        elif value.ndim != 1:
            raise ValueError("stream=True: not with assisted decoding, which makes several tokens a step")
        elif self._num_rows:
            assert not self._put, "transformers puts one token of each row between two exchanges"
            self._put = value.tolist()

    def end(self) -> None:
        """Do nothing: `exchange` says when all ranks have ended."""

    def exchange(self, *, is_done: bool) -> bool:
        """Hand over the tokens that ranks have put, and wait until those of the step before are taken; collective.

        Args:
            is_done: True if this rank's rows have ended.

        Returns:
            True if rows of a rank have not ended.

        Raises:
            GenerationStoppedError: On every rank: the reader goes away.
        """
        # Every rank calls this once a step, ended or without rows too: the others would wait in the all-gather.
        if not self._rows:
            self._rows = [num_rows for (num_rows,) in all_gather_ints([self._num_rows or 0])]
        own, self._put = self._put, []
        missing = [_NO_TOKEN] * (max(self._rows) - len(own))
        found = all_gather_ints([not is_done, *own, *missing])
        if tokens := self._tokens_of([one for _, *one in found]):
            self._handed.put(tokens)
            if not self._goes_on.get():
                raise GenerationStoppedError("the reader of the tokens has stopped the generation")
        return any(goes_on for goes_on, *_ in found)

    def _tokens_of(self, by_rank: list[list[int]]) -> Tokens:
        """Return the tokens of rows that have not ended; transformers pads the others."""
        tokens = Tokens()
        of_rows = (token for own, num_rows in zip(by_rank, self._rows, strict=True) for token in own[:num_rows])
        for row, token in enumerate(of_rows):
            if token != _NO_TOKEN and row not in self._ended:
                tokens.append((row, token))
                if token in self.end_tokens:
                    self._ended.add(row)
        return tokens
