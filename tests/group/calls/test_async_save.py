"""Saves in the background: what was there when they began, while training goes on, and their failures."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysharding import Call, CheckpointError, GroupError, ShardedModelGroup, Split, Timeouts
from raysharding.checkpoint.writing import create_staging, remove_staging
from raysharding.group import GroupState
from raysharding.group.calls import collect_rank0, pending_saves
from raysharding.group.calls.pending_saves import PendingSaves
from raysharding.group.messages import BegunSave
from tests.clock import now, wait_until
from tests.conftest import make_group
from tests.group.fit.runs import slow_writes

pytestmark = pytest.mark.usefixtures("cluster")

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
ROWS = [{"input": row.tolist()} for row in BATCH]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def mean_square() -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
        return output.square().mean()

    return loss


def train(group: ShardedModelGroup) -> dict[str, float]:
    metrics: dict[str, float] = group.train_step(Split(BATCH), loss=mean_square())
    return metrics


@pytest.fixture(scope="module")
def trained(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    with make_group(checkpoint, optimizer=ADAMW) as group:
        yield group


def same(path: Path, weights: dict[str, torch.Tensor]) -> bool:
    found = load_file(path / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_it_holds_what_was_there_when_it_began(trained: ShardedModelGroup, tmp_path: Path) -> None:
    train(trained)
    before = trained.state_dict()
    assert trained.save(tmp_path / "saved", async_save=True) is None
    after = [train(trained) for _ in range(5)]
    trained.wait_for_save()
    assert same(tmp_path / "saved", before)
    with make_group(tmp_path / "saved", optimizer=ADAMW, world_size=3) as again:
        assert [train(again) for _ in range(5)] == [pytest.approx(one, rel=1e-5) for one in after]


def test_memory_is_there_before_the_first_save(checkpoint: Path, tmp_path: Path) -> None:
    """What a run that saves in the background has had made after its first step is what the copies go into."""

    def memory() -> dict[tuple[str, str], int]:
        from raysharding import current_worker

        saver = current_worker().status.saver
        if saver._preparing is not None:
            saver._preparing.join()
        return {key: buffer.data_ptr() for key, buffer in saver._memory._buffers.items()}

    rows = [{"input": row.tolist()} for row in BATCH]
    with make_group(checkpoint, optimizer=ADAMW) as group:
        options: dict[str, Any] = {"batch_size": 3, "loss": mean_square(), "save_to": tmp_path, "async_save": True}
        seen: list[Any] = []

        def look(_: object) -> None:
            seen.append(group.call(memory))

        group.fit(rows, **options, callbacks=[look])
        assert {kind for kind, _ in seen[0][0]} == {"model", "optimizer"}
        assert group.call(memory) == seen[0]


def test_one_at_a_time_and_in_order(trained: ShardedModelGroup, tmp_path: Path) -> None:
    weights = []
    for number in range(4):
        train(trained)
        weights.append(trained.state_dict())
        trained.save(tmp_path / f"step-{number}", async_save=True, keep_last=2)
    report = trained.save(tmp_path / "last")
    assert report is not None
    assert report.num_files == 1
    assert sorted(os.listdir(tmp_path)) == ["last", "step-2", "step-3"]
    assert same(tmp_path / "step-2", weights[2])
    assert same(tmp_path / "step-3", weights[3])


def test_a_failure_is_checked_in_the_files_by_the_thread_that_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the thread that hears of it, and ends all calls: the storage may be slow."""
    read: list[str] = []

    def is_whole(save: BegunSave) -> bool:
        read.append(save.path)
        return save.path == "whole"

    monkeypatch.setattr(pending_saves, "is_committed", is_whole)
    saves = PendingSaves(dict)
    for path in ("whole", "lost"):
        saves.begin(BegunSave(path, True, path), Call("save", 1, collect_rank0, 1.0))
    saves.lose(GroupError("the controller died"))
    assert not read
    with pytest.raises(GroupError, match="the save was lost with its ranks: the controller died") as caught:
        saves.raise_failed()
    assert caught.value.__notes__ == ["raysharding: raised by the background save to lost"]
    assert read == ["whole", "lost"]


def fill(disk: Path) -> None:
    (disk / "filler").write_bytes(b"x" * shutil.disk_usage(disk).free)


def test_a_failure_is_raised_by_the_next_call_once(trained: ShardedModelGroup, small_disk: Path) -> None:
    target = small_disk / "saved"
    trained.save(target, optimizer=False)
    old = {name: value.clone() for name, value in load_file(target / "model.safetensors").items()}
    fill(small_disk)
    trained.save(target, overwrite=True, async_save=True)
    until = time.monotonic() + 20

    def train_on() -> None:
        while time.monotonic() < until:
            train(trained)

    with pytest.raises(CheckpointError, match=r"cannot be (made|written)") as caught:
        train_on()
    assert f"from the save to {target}, in the background" in "".join(caught.value.__notes__)
    train(trained)
    assert trained.state is GroupState.READY
    assert sorted(os.listdir(small_disk)) == ["filler", "saved"]
    assert same(target, old)


def test_a_place_that_is_taken_is_refused_at_once(trained: ShardedModelGroup, tmp_path: Path) -> None:
    trained.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exists already"):
        trained.save(tmp_path / "saved", async_save=True)
    with pytest.raises(ValueError, match="has none"):
        trained.save(tmp_path / "unnumbered", keep_last=1)
    train(trained)


def test_a_restart_loads_a_save_that_was_committed_and_shutdown_waits_for_one(checkpoint: Path, tmp_path: Path) -> None:
    with make_group(checkpoint, optimizer=ADAMW) as group:
        train(group)
        weights = group.state_dict()
        group.save(tmp_path / "saved", async_save=True)
        group.wait_for_save()
        train(group)
        assert group.restart(world_size=1).checkpoint == str(tmp_path / "saved")
        group.save(tmp_path / "last", async_save=True)
    assert same(tmp_path / "last", weights)
    assert sorted(os.listdir(tmp_path)) == ["last", "saved"]


def test_of_two_in_the_queue_the_first_fails(trained: ShardedModelGroup, small_disk: Path, tmp_path: Path) -> None:
    """The second does not make anybody forget what the first failed of."""
    fill(small_disk)
    calls = [trained.save.remote(path, async_save=True) for path in (small_disk / "one", tmp_path / "two")]
    assert [call.result() for call in calls] == [None, None]
    with pytest.raises(CheckpointError, match=r"cannot be (made|written)"):
        trained.wait_for_save()
    trained.wait_for_save()
    assert trained.saves[-1] == str(tmp_path / "two")
    assert str(small_disk / "one") not in trained.saves


def test_a_full_disk_ends_a_fit_with_one_error(trained: ShardedModelGroup, small_disk: Path) -> None:
    """Two saves fail of it, one of them while the other is begun: no later call is told of that."""
    fill(small_disk)
    options: dict[str, Any] = {"save_to": small_disk / "out", "save_every": 1, "async_save": True, "epochs": 40}
    with pytest.raises(CheckpointError, match=r"cannot be (made|written)|No space left") as caught:
        trained.fit(ROWS, batch_size=3, loss=mean_square(), **options)
    print("raised once:", caught.value, getattr(caught.value, "__notes__", ()))
    for _ in range(8):
        train(trained)
        time.sleep(0.1)
    trained.wait_for_save()


def broken(group: ShardedModelGroup) -> None:
    wait_until(lambda: group.state is GroupState.BROKEN, 30, "the group is broken", 0.02)


def appears(folder: Path, pattern: str) -> None:
    wait_until(lambda: list(folder.glob(pattern)), 30, "a file is there", 0.005)


@contextlib.contextmanager
def unheard(group: ShardedModelGroup) -> Iterator[None]:
    """Keep from the controller what happens meanwhile; then rank 0 ends, which alone can tell how saves ended."""
    pid = int(group._client.connection.where.rpartition(" ")[2])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        os.kill(group.ranks[0].pid, signal.SIGKILL)
    finally:
        os.kill(pid, signal.SIGCONT)
    broken(group)


@pytest.mark.timeout(120)
def test_a_restart_asks_the_files_how_saves_ended(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest that is whole is loaded, heard of or not; what the others have left is removed at once."""
    with make_group(checkpoint, optimizer=ADAMW) as group:
        train(group)
        group.save(tmp_path / "step-1")
        train(group)
        weights = group.state_dict()
        group.call(slow_writes(0.2))
        group.save(tmp_path / "step-2", async_save=True)
        with unheard(group):
            appears(tmp_path, "step-2")
        assert group.saves == (str(tmp_path / "step-1"),)
        assert group.restart().checkpoint == str(tmp_path / "step-2")
        assert group.saves[-1] == str(tmp_path / "step-2")
        assert all(torch.equal(value, weights[name]) for name, value in group.state_dict().items())
        group.call(slow_writes(5.0))
        others = create_staging(tmp_path / "step-3", overwrite=False)  # somebody else's, who lives
        group.save(tmp_path / "step-1", overwrite=True, async_save=True)
        group.save.remote(tmp_path / "step-3", overwrite=True, async_save=True)
        appears(tmp_path, ".step-1.tmp-*")
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        broken(group)
        assert group.restart().checkpoint == str(tmp_path / "step-2")
        assert sorted(os.listdir(tmp_path)) == sorted(["step-1", "step-2", os.path.basename(others)])
        lost = f"the background save to {tmp_path / 'step-1'} failed: the save was lost with its ranks: "
        assert capsys.readouterr().err.count(lost) == 1, "told, and not raised by a call on the new ranks"
        group.call(int)
        remove_staging(others)


@pytest.mark.full
def test_a_driver_that_attaches_asks_them_too(checkpoint: Path, tmp_path: Path) -> None:
    first = make_group(checkpoint, optimizer=ADAMW, name="asks")
    first.save(tmp_path / "step-1")
    first.call(slow_writes(0.2))
    first.save(tmp_path / "step-2", async_save=True)
    with unheard(first):
        appears(tmp_path, "step-2")
    group = ShardedModelGroup.attach("asks")
    assert group.saves == (str(tmp_path / "step-1"),)
    assert group.restart().checkpoint == str(tmp_path / "step-2")
    saves = [str(tmp_path / "step-1"), str(tmp_path / "step-2")]
    assert list(first.saves) == list(group.saves) == saves
    group.shutdown()


def make_large() -> Callable[[], torch.nn.Module]:
    """Pickles by value: 96 MiB, which a save writes in several rounds."""

    def build() -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])

    return build


@pytest.mark.full
def test_a_slow_disk_is_no_stall(cluster: None, tmp_path: Path) -> None:
    """A save that takes longer than `load_stall_s`, and writes meanwhile, is waited for: by the next, by the end."""
    save_file(make_large()().state_dict(), tmp_path / "model.safetensors")
    options: dict[str, Any] = {"model": make_large(), "timeouts": Timeouts(load_stall_s=4.0)}
    with make_group(tmp_path / "model.safetensors", **options) as group:
        group.call(slow_writes(1.0))
        begun = now()
        group.save(tmp_path / "one", async_save=True)
        group.save.remote(tmp_path / "two", async_save=True)  # waits for the first, and is not waited for here
    assert now() - begun > 4.0, "or the disk was not slow"
    expected = load_file(tmp_path / "model.safetensors")
    assert same(tmp_path / "one", expected)
    assert same(tmp_path / "two", expected)
