"""A forked child has the parent's group and none of its threads: whatever it asks for is an error at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.group.conftest import make_group

ROWS = torch.ones(3, 8)


def ask_all(asked: dict[str, Callable[[], Any]], told: Connection) -> None:
    """In the child: say what each comes to, and how long all of them took."""
    begun, said = time.monotonic(), {}
    for name, ask in asked.items():
        try:
            said[name] = f"no error: {ask()!r}"
        except GroupError as error:
            said[name] = str(error)
    told.send((said, time.monotonic() - begun))


def test_a_group_in_a_forked_child(group: ShardedModelGroup, checkpoint: Path) -> None:
    async def wait_for(call: Any) -> Any:
        return await call

    call, status = group.call.remote(time.sleep, 2.0), group.status.remote()
    asked: dict[str, Callable[[], Any]] = {
        "forward": lambda: group.forward(Split(ROWS)),
        "remote": lambda: group.call.remote(os.getpid),
        "result": call.result,
        "per_rank": call.per_rank,
        "stream": lambda: list(call.stream()),
        "await": lambda: asyncio.run(wait_for(call)),
        "done": call.done,
        "wait": lambda: call.wait(100.0),
        "its thread's result": status.result,
        "save": lambda: group.save("/nowhere"),
        "status": group.status,
        "state": lambda: group.state,
        "stacks": group.stacks,
        "logs": lambda: group.logs(0),
        "interrupt": group.interrupt,
        "restart": lambda: group.restart(checkpoint),
        "shutdown": group.shutdown,
        "attach": lambda: ShardedModelGroup.attach("llama"),
        "from_checkpoint": lambda: make_group(checkpoint),
        "plan": lambda: ShardedModelGroup.plan(checkpoint, world_size=2, device="cpu"),
    }
    client = group._client
    silent: dict[str, Callable[[], Any]] = {"collected": client.dropped_soon, "exits": client.connection.thread.stop}
    heard, told = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=ask_all, args=(asked | silent, told), daemon=True)
    child.start()
    try:
        assert heard.poll(30.0), "something waits"
        said, took_s = heard.recv()
    finally:
        child.kill()
        child.join()
    print(f"{len(said)} entries took {took_s:.3f} s")
    for name in asked:
        assert re.search(f"was forked from process {os.getpid()}, .*'spawn'.*attach", said[name]), (name, said[name])
    for name in silent:
        assert said[name] == "no error: None"
    assert took_s < 5.0

    assert call.result() == [None, None]
    assert group.state is GroupState.READY
    assert group.call(os.getpid) == [one.pid for one in group.ranks]
    with pytest.raises(ValueError, match="there is nothing to restart"):
        group.restart()
