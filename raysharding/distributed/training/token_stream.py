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
from raysharding.distributed.comm import all_gather_ints, is_accelerator, set_current_device


class GenerationStoppedError(Exception):
    """The reader of a stream has stopped it."""


class TokenStream:
    """A generation on a thread. Its methods `put` and `end` are those of transformers' `BaseStreamer`.

    Args:
        run: Generates, with this stream as the streamer, and calls `exchange` once a step; collective.
        device: Where the module computes.
        is_silent: True if this rank's tokens are no rows of the call.
    """

    def __init__(self, run: Callable[[TokenStream], Any], device: torch.device, *, is_silent: bool) -> None:
        self._run = run
        self._device = device
        self._is_silent = is_silent
        self.end_tokens: Collection[int] = ()
        """Ids after which a row has ended; set by `run`."""
        self._ended: set[int] = set()
        self._put: list[int] = []
        self._has_prompt = False
        self._width = 0
        self._widths: list[int] = []
        self._handed: SimpleQueue[Tokens | None] = SimpleQueue()
        self._goes_on: SimpleQueue[bool] = SimpleQueue()
        self._goes_on.put(True)  # the step after the one whose tokens travel is computed meanwhile
        self._result: Future[Any] = Future()
        self._thread: threading.Thread | None = None

    def next(self) -> Tokens | None:
        """Return the tokens of the next step, of all ranks; `None` at the end. Collective.

        Raises:
            Exception: The error of the generation.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._generate, name="raysharding-generate", daemon=True)
            self._thread.start()
        else:
            self._goes_on.put(True)
        # Not bounded here: the controller bounds each step, as it does a forward.
        tokens = self._handed.get()
        if tokens is None:
            self._thread.join()
        return tokens

    def result(self) -> Any:
        """Return what `run` returned, at the end; raise what it raised."""
        return self._result.result(0)

    def close(self) -> None:
        """Stop the generation, if it has not ended; collective, since all ranks leave the model together."""
        if self._thread is not None and self._thread.is_alive():
            self._goes_on.put(False)
            self._thread.join()

    def _generate(self) -> None:
        try:
            if is_accelerator(self._device):
                set_current_device(self._device)  # torch has one for each thread
            self._result.set_result(self._run(self))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._result.set_exception(error)
        self._handed.put(None)

    def put(self, value: torch.Tensor) -> None:
        """Take one token of each row; the prompt comes first."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        if value.ndim != 1:
            raise ValueError("stream=True: not with assisted decoding, which makes several tokens a step")
        if not self._is_silent:
            self._width = len(value)
            self._put += value.tolist()

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
        own, self._put = self._put, []
        # Every rank calls this once a step, ended or without rows too: the others would wait in the all-gather.
        found = all_gather_ints([not is_done, len(own), self._width])
        longest = max(length for _, length, _ in found)
        if longest:
            # In the first step all ranks with rows put tokens.
            self._widths = self._widths or [width for *_, width in found]
            by_rank = all_gather_ints([*own, *[0] * (longest - len(own))])
            self._handed.put(self._rows_of([one[:length] for one, (_, length, _) in zip(by_rank, found, strict=True)]))
            if not self._goes_on.get():
                raise GenerationStoppedError("the reader of the tokens has stopped the generation")
        return any(goes_on for goes_on, *_ in found)

    def _rows_of(self, by_rank: list[list[int]]) -> Tokens:
        """Return the tokens of rows that have not ended; transformers pads the others."""
        tokens = Tokens()
        for rank, own in enumerate(by_rank):
            start = sum(self._widths[:rank])
            for index, token in enumerate(own):
                row = start + index % self._widths[rank]
                if row not in self._ended:
                    tokens.append((row, token))
                if token in self.end_tokens:
                    self._ended.add(row)
        return tokens
