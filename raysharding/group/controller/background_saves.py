"""`BackgroundSaves`: follows the saves that the ranks write in the background, to their commit or their failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from raysharding.errors import GroupError
from raysharding.group.controller.members import Ranks, start
from raysharding.group.messages import BegunSave

_POLL_S = 0.2
_ANSWER_S = 10.0
_NUM_ENDED = 64


class BackgroundSaves:
    """Saves in the background, by their tokens."""

    def __init__(self, on_committed: Callable[[BegunSave], Awaitable[None]], on_ended: Callable[[], None]) -> None:
        """Begin without saves.

        Args:
            on_committed: Awaited for each save that is committed, before it counts as ended.
            on_ended: Called after each save that has ended.
        """
        self.ended: dict[str, Exception | None] = {}
        """Token → the failure of a save that has ended, `None` if it is committed; of the last saves."""
        self.bytes_done: dict[str, int] = {}
        """Token → bytes written so far, of the saves in progress."""
        self._on_committed = on_committed
        self._on_ended = on_ended

    def follow(self, save: BegunSave, number: int, ranks: Ranks) -> None:
        """Follow a save that the ranks have begun.

        Args:
            save: The save.
            number: Its number on rank 0.
            ranks: The ranks that write it.
        """
        self.bytes_done[save.token] = 0
        start(self._follow(save, number, ranks))

    async def _follow(self, save: BegunSave, number: int, ranks: Ranks) -> None:
        error = await self._watch(save, number, ranks)
        try:
            if error is None:
                await self._on_committed(save)
        except GroupError as unrecorded:
            error = unrecorded
        del self.bytes_done[save.token]
        self.ended[save.token] = error
        while len(self.ended) > _NUM_ENDED:
            del self.ended[next(iter(self.ended))]
        self._on_ended()

    async def _watch(self, save: BegunSave, number: int, ranks: Ranks) -> Exception | None:
        """Poll until the save has ended; return its failure, or `None`."""
        while not (ranks.is_stopping or ranks.dead):
            answers = await ranks.ask("save_status", number, within_s=_ANSWER_S, ranks=[0])
            is_done, bytes_done, error = answers.replies.get(0, (False, self.bytes_done[save.token], None))
            if is_done:
                return error  # type: ignore[no-any-return]
            self.bytes_done[save.token] = bytes_done
            await asyncio.sleep(_POLL_S)
        # The ranks may have committed it before they ended: the files say so, where they are seen.
        why = f"rank {min(ranks.dead)} died" if ranks.dead else "they were stopped"
        return GroupError(f"the save was lost with its ranks: {why}")
