"""`Call`: order, streaming, waiting, awaiting, and that arguments are taken when the call is made."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from raysharding import GroupError, Out, PerRank, ShardedModelGroup, Sharding, Split
from raysharding.group import GroupState
from raysharding.group.calls import Call, client, driver_handle
from tests.group.conftest import make_group


def test_ranks_stream_as_they_finish(group: ShardedModelGroup, tmp_path: Path) -> None:
    def wait(gate: Path) -> str:
        while not gate.exists():
            time.sleep(0.01)
        return gate.name

    gates = [tmp_path / "a", tmp_path / "b"]
    call = group.call.remote(wait, PerRank(gates))
    assert repr(call) == "<Call call: running>"
    assert not call.done()
    assert group.state is GroupState.BUSY
    with pytest.raises(TimeoutError, match="still runs"):
        call.result(timeout_s=0.05)
    stream = call.stream()
    gates[1].touch()
    assert next(stream) == (1, "b")
    gates[0].touch()
    assert list(stream) == [(0, "a")]
    assert call.per_rank() == ["a", "b"]
    assert call.done()
    assert repr(call) == "<Call call: finished>"


def test_arguments_are_taken_when_the_call_is_made(group: ShardedModelGroup) -> None:
    group.call.remote(time.sleep, 0.2)
    shared, split = torch.zeros(50_000), torch.zeros(4)
    call = group.call.remote(lambda a, b: (a.sum().item(), b.sum().item()), shared, Split(split))
    shared.fill_(1.0)
    split.fill_(1.0)
    assert call.result() == [(0.0, 0.0)] * 2


def test_await(group: ShardedModelGroup) -> None:
    async def two() -> list[list[int]]:
        return list(await asyncio.gather(group.call.remote(lambda: 1), group.call.remote(lambda: 2)))

    assert asyncio.run(two()) == [[1, 1], [2, 2]]


def test_an_error_of_all_ranks_is_raised_each_time_and_leaves_the_group_ready(group: ShardedModelGroup) -> None:
    def fail() -> None:
        raise KeyError("seen by every rank")

    call = group.call.remote(fail)
    after = group.call.remote(lambda: 4)
    for _ in range(2):
        with pytest.raises(GroupError, match="seen by every rank") as caught:
            call.result()
    error = caught.value
    assert error.primary is not None
    assert error.primary.error_type == "KeyError"
    assert "in fail" in error.primary.traceback
    assert sorted(error.failures) == [0, 1]
    assert isinstance(error.__cause__, KeyError)
    assert repr(call) == "<Call call: failed: GroupError(KeyError)>"
    with pytest.raises(GroupError):
        list(call.stream())
    assert after.result() == [4, 4]
    assert group.state is GroupState.READY


def write() -> Callable[[], None]:
    """Return a function that changes the weights, whole or sharded, as they are registered."""

    def run() -> None:
        import torch

        from raysharding import current_worker

        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.add_(1.0)

    return run


def is_first(module: nn.Module) -> bool:
    return getattr(module, "out_features", 0) == 16


def first_block() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that runs one block of the model only."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        import torch

        from raysharding import current_worker

        with torch.no_grad():
            output: torch.Tensor = next(current_worker().module.children())(rows)
            return output

    return run


def test_a_call_may_run_a_block_before_the_model_and_writes_the_shards(checkpoint: Path, reference: nn.Module) -> None:
    rows = torch.randn(6, 8)
    model = copy.deepcopy(reference)
    blocks: Any = model
    with make_group(checkpoint, sharding=Sharding(wrap=is_first)) as group:
        for found in group.call(first_block(), rows):
            torch.testing.assert_close(found, blocks[0](rows))
        for _ in range(2):
            # After a forward the root's parameters are full ones: a write into those would be lost.
            torch.testing.assert_close(group.forward(Split(rows)), model(rows))
            group.call(write())
            for parameter in model.parameters():
                parameter.add_(1.0)
        torch.testing.assert_close(group.forward(Split(rows)), model(rows))
        torch.testing.assert_close(group.state_dict(), dict(model.state_dict()))


def cast() -> Callable[[], None]:
    """Return a function that turns the module's parameters into doubles."""

    def run() -> None:
        import torch

        from raysharding import current_worker

        current_worker().module.to(torch.float64)

    return run


def test_a_first_call_may_change_dtypes_before_anything_runs(checkpoint: Path, reference: nn.Module) -> None:
    rows = torch.randn(6, 8, dtype=torch.float64)
    model = copy.deepcopy(reference).double().requires_grad_()
    model(rows).square().mean().backward()
    with make_group(checkpoint) as group:
        group.call(int)  # what FSDP2 settles in the first forward must not be settled by a call that runs nothing
        group.call(cast())
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        group.train_step(Split(rows), loss=mean_square())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(group.state_dict()[name], (parameter - 0.1 * parameter.grad).detach())


def mean_square() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that pickles by value."""
    return lambda output, rows: output.square().mean()


def test_what_cannot_travel_is_a_clear_error(group: ShardedModelGroup) -> None:
    class Odd(Exception):
        def __init__(self, lock: object, text: str) -> None:
            super().__init__(text)
            self.lock = lock

    def raise_odd() -> None:
        raise Odd(threading.Lock(), "holds a lock")

    with pytest.raises(TypeError, match=r"an argument of call cannot be pickled at args\[0\] \(type lock\)"):
        group.call(print, threading.Lock())
    with pytest.raises(GroupError, match=r"the result of call cannot be pickled .*\(type lock\)") as caught:
        group.call(threading.Lock)
    assert caught.value.primary is not None
    assert caught.value.primary.error_type == "TypeError"
    with pytest.raises(GroupError, match="holds a lock") as caught:
        group.call(raise_odd)
    assert caught.value.primary is not None
    assert caught.value.primary.error_type.endswith("Odd")
    assert group.call(lambda: 1) == [1, 1]


def test_a_batch_that_cannot_be_dealt_is_refused_by_the_driver(group: ShardedModelGroup) -> None:
    with pytest.raises(ValueError, match="0 rows"):
        group.forward(Split(torch.zeros(0, 8)))
    with pytest.raises(ValueError, match="PerRank holds 3 values"):
        group.call(print, PerRank([1, 2, 3]))
    with pytest.raises(ValueError, match="mode='evaluate'"):
        group.forward(Split(torch.zeros(2, 8)), mode="evaluate")  # type: ignore[arg-type]
    for out in ("gather", Out.gather):
        with pytest.raises(ValueError, match=r"give Out\.gather\(\)"):
            group.forward(Split(torch.zeros(2, 8)), out=out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Out\.gather\(\): return values of fn are not gathered"):
        group.call(len, Split(torch.zeros(2, 8)), out=Out.gather())
    with pytest.raises(TypeError, match=r"group cannot be sent to ranks; use raysharding\.current_worker"):
        group.call(lambda: group.world_size)
    with pytest.raises(TypeError, match="a Call cannot leave its driver"):
        pickle.dumps(group.call.remote(len, "ab"))


def test_a_call_gives_each_ranks_own_output(group: ShardedModelGroup) -> None:
    rows = torch.randn(3, 8)
    whole = group.forward(Split(rows))
    call = group.forward.remote(Split(rows))
    assert torch.equal(torch.cat(call.per_rank()), whole)
    assert torch.equal(torch.cat([part for _, part in sorted(call.stream())]), whole)
    assert torch.equal(call.result(), whole)


def test_nothing_comes_of_a_dummy_row(group: ShardedModelGroup) -> None:
    one = Split(torch.ones(1, 8))
    assert group.call(lambda x: float(x.sum()), one) == [8.0, None]
    parts = group.forward(one, out=Out.per_rank())
    assert parts[0].shape == (1, 4)
    assert parts[1] is None
    assert group.forward.remote(one).per_rank()[1] is None
    for refs in (group.forward(one, out=Out.refs()), group.call(len, one, out=Out.refs())):
        assert isinstance(refs, PerRank)
        assert refs[0] is not None
        assert refs[1] is None


def test_a_result_that_unpickles_badly_names_call_and_rank(group: ShardedModelGroup) -> None:
    here = os.getpid()

    def only_there() -> int:
        if os.getpid() == here:
            raise OSError("not on the driver")
        return 1

    class Odd:
        def __reduce__(self) -> Any:
            return only_there, ()

    with pytest.raises(GroupError, match=r"result of call on rank 0 cannot be unpickled .*OSError: not on the driver"):
        group.call(Odd)
    assert group.call(lambda: 1) == [1, 1]


@pytest.mark.usefixtures("nothing_left")
def test_a_call_keeps_its_group_until_it_ends(checkpoint: Path) -> None:
    call = make_group(checkpoint, world_size=1).call.remote(time.sleep, 0.5)
    gc.collect()
    assert call.result() == [None]


def test_what_is_the_drivers_own_needs_no_thread_but_may_have_one() -> None:
    class Owner:
        @driver_handle
        def where(self, fail: bool = False) -> int:
            """Say where."""
            if fail:
                raise SystemExit(3)
            return threading.get_ident()

    owner = Owner()
    assert owner.where() == threading.get_ident()
    assert owner.where.remote().result(timeout_s=5) != threading.get_ident()
    assert (owner.where.__name__, owner.where.__doc__) == ("where", "Say where.")
    with pytest.raises(SystemExit):
        owner.where.remote(fail=True).result(timeout_s=5)
    assert isinstance(owner.where.remote(), Call)


def test_queued_arguments_are_bounded(group: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_BYTES", 1_000_000)
    first = group.call.remote(time.sleep, 0.3)
    begun = time.monotonic()
    calls = []
    for _ in range(8):
        calls.append(group.call.remote(lambda tensor: tensor.numel(), torch.zeros(100_000)))
        assert group._client.connection.num_bytes < 2_000_000
    assert time.monotonic() - begun > 0.2, "remote() waits for room"
    assert first.done()
    assert [call.result() for call in calls] == [[100_000] * 2] * 8
    assert group._client.connection.num_bytes == 0


def test_a_call_that_cannot_be_sent_takes_no_number(group: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller would wait for the number before it takes the later calls."""

    class Full:
        @property
        def queue(self) -> Any:
            raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(group._client.connection, "controller", Full())
    with pytest.raises(ray.exceptions.ObjectStoreFullError):
        group.call(len, "abc")
    monkeypatch.undo()
    assert group.call.remote(len, "abc").result(timeout_s=20) == [3, 3]


def test_what_fails_on_the_thread_that_ends_calls_is_logged_and_ends_no_other_call(
    group: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, connection = group._client, group._client.connection
    looked = threading.Event()

    def check() -> None:
        looked.set()
        raise ConnectionError("the check failed")

    first = group.call.remote(time.sleep, 0.3)
    last: list[Call] = []
    first.when_done(lambda _: sys.exit(3))
    first.when_done(lambda _: last.remove(first))
    first.when_done(last.append)
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", closed)
        client.tell_soon("nobody hears it")
        changed.setattr(connection, "_last_note", -1)
        connection.take(replace(connection.snapshot, notes=((0, "nor this"),)))
        changed.setattr(connection.thread, "_check", check)
        assert first.result(timeout_s=20) == [None, None]
        assert looked.wait(5)
    assert group.call.remote(len, "abc").result(timeout_s=20) == [3, 3]
    assert last == [first], "the callbacks behind run"
    for said in ("SystemExit: 3", "ValueError: list.remove", "closed file", "the check failed"):
        assert said in caplog.text


def test_a_callback_that_would_wait_is_refused_at_once(
    group: ShardedModelGroup, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that runs it would have to act on what it waits for."""
    later: list[Call] = []
    entries: dict[str, Callable[[], Any]] = {
        "forward": lambda: group.forward(Split(torch.zeros(2, 8))),
        "result": lambda: later[0].result(),
        "result in time": lambda: later[0].result(timeout_s=60),
        "per_rank": lambda: later[0].per_rank(),
        "stream": lambda: list(later[0].stream()),
        "wait": lambda: later[0].wait(60),
        "restart": lambda: group.restart(world_size=1),
        "save": lambda: group.save(tmp_path / "save"),
        "wait_for_save": lambda: group.wait_for_save(),
        "state_dict": lambda: group.state_dict(),
        "fit": lambda: group.fit([{"input": torch.zeros(8)}], batch_size=1),
        "set_optimizer": lambda: group.set_optimizer(torch.optim.SGD, lr=0.1),
        "set_scheduler": lambda: group.set_scheduler(torch.optim.lr_scheduler.ConstantLR),
        "interrupt": lambda: group.interrupt(),
        "status": lambda: group.status(),
        "stacks": lambda: group.stacks(),
        "logs": lambda: group.logs(0),
        "memory_summary": lambda: group.memory_summary(),
        "from_checkpoint": lambda: make_group(checkpoint),
        "attach": lambda: ShardedModelGroup.attach("nobody"),
        "a full queue": lambda: group.call.remote(len, "ab"),
    }
    tried: list[str] = []
    said: dict[str, str] = {}
    is_done = threading.Event()

    def callback(call: Call) -> None:
        said["a call that has ended"] = str(call.result())
        later.append(group.call.remote(len, "abc"))
        for name, wait in entries.items():
            tried.append(name)
            try:
                if name == "a full queue":
                    monkeypatch.setattr(client, "_MAX_BYTES", 0)
                said[name] = f"returned {wait()}"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
        monkeypatch.undo()
        is_done.set()

    group.call.remote(time.sleep, 0.3).when_done(callback)
    assert is_done.wait(20), f"it waits for {tried[-1]}"
    assert said.pop("a call that has ended") == "[None, None]"
    assert later[0].result() == [3, 3]
    wrong = {name: text for name, text in said.items() if not re.match(r"GroupError: .*\.remote\(", text)}
    assert not wrong
    assert said["save"].startswith("GroupError: save(): ")
    assert group.state is GroupState.READY
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_left")
def test_a_callback_that_shuts_down_begins_that(checkpoint: Path, tmp_path: Path) -> None:
    """What it would raise is only logged: the group lived on."""
    group = make_group(checkpoint, world_size=1)
    group.save(tmp_path / "save", async_save=True)
    group.call.remote(time.sleep, 0.2).when_done(lambda _: group.shutdown())
    behind = group.call.remote(time.sleep, 30.0)
    with pytest.raises(GroupError, match="was shut down before this call ended"):
        behind.result(timeout_s=20)
    assert group.saves == (str(tmp_path / "save"),), "it was waited for"
    group.shutdown()
    assert group.state is GroupState.CLOSED
