"""What the simulated device does as a GPU does, and that it catches programs which forget to wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Transport
from raysharding.distributed import init_mesh, load_checkpoint, shard_module
from raysharding.distributed.fully_shard import local_tensor
from raysharding.distributed.loading import load
from raysharding.distributed.saving import save
from raysharding.distributed.transfer import sources
from raysharding.distributed.transfer.stream import ReadAhead
from raysharding.models import build_module
from tests.accelerator.build import load_extension
from tests.accelerator.device import sim
from tests.distributed.checks import outcome_of
from tests.spawn import run_ranks

DELAY_US = 20_000


def check_copies_are_asynchronous() -> None:
    """A copy from pinned memory returns before it has run; an event orders it before what waits for the event."""
    load_extension().set_copy_delay_us(DELAY_US)
    pinned, target = torch.ones(4, pin_memory=True), torch.zeros(4, device="sim")
    assert pinned.is_pinned()
    side = sim().Stream()
    sim().synchronize()
    with sim().stream(side):
        target.copy_(pinned, non_blocking=True)
        copied = sim().Event()
        copied.record(side)
    assert not copied.query()
    assert target.tolist() == [0.0] * 4
    sim().current_stream().wait_event(copied)
    assert target.tolist() == [1.0] * 4
    assert copied.query()


def check_copies_of_pageable_memory_wait() -> None:
    """As on CUDA: `non_blocking` is for pinned memory."""
    load_extension().set_copy_delay_us(DELAY_US)
    host = torch.ones(4)
    target = host.to("sim", non_blocking=True)
    host.zero_()
    assert target.tolist() == [1.0] * 4


def check_fresh_memory_is_garbage() -> None:
    """Also memory that was freed and is given out again."""
    for _ in range(2):
        assert torch.empty(1000, device="sim").isnan().all()


def check_memory_is_counted() -> None:
    """Bytes requested, their peak, and an error at the limit after which all goes on."""
    before = sim().memory_allocated()
    tensor = torch.empty(1000, device="sim")
    assert sim().memory_allocated() - before == 4000
    load_extension().set_limit(0, sim().memory_allocated() + 100)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 400 bytes"):
        torch.empty(100, device="sim")
    del tensor
    assert sim().memory_allocated() == before
    torch.empty(100, device="sim")


def check_random_numbers() -> None:
    """A generator of its own, which makes a CPU's numbers: drop-out, samples and `manual_seed`."""
    torch.manual_seed(1)
    expected = torch.rand(4), nn.functional.dropout(torch.ones(8))
    torch.manual_seed(1)
    torch.rand(3)  # the CPU's generator is another
    found = torch.rand(4, device="sim"), nn.functional.dropout(torch.ones(8, device="sim"))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    state = sim().get_rng_state()
    first = torch.rand(4, device="sim")
    sim().set_rng_state(state)
    assert torch.equal(torch.rand(4, device="sim"), first)


def check_devices_do_not_mix() -> None:
    """An operation of tensors on several devices is refused; a parameter moves by its `data`."""
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2, device="sim") @ weight
    weight.data = weight.data.to("sim")
    assert (torch.ones(2, 2, device="sim") @ weight).tolist() == [[2.0, 2.0]] * 2


def check_collectives() -> None:
    """A collective blocks the stream that waits for it, not the host; the backend has NCCL's conditions."""
    load_extension().set_collective_delay_us(DELAY_US)
    rank = dist.get_rank()
    message = [dist.P2POp(dist.irecv if rank else dist.isend, torch.zeros(1, device="sim"), 1 - rank)]
    with pytest.raises(ValueError, match="the first operation of a group"):
        dist.batch_isend_irecv(message)
    tensor = torch.full((4,), float(rank + 1), device="sim")
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    assert not work.is_completed()
    assert tensor.tolist() == [rank + 1.0] * 4, "nobody has waited"
    work.wait()
    assert tensor.tolist() == [1.5] * 4
    table = torch.zeros(4, 4, device="sim")
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(table[:, 0])
    other = torch.zeros(2, device=torch.device("sim", 2 + rank))
    with pytest.raises(ValueError, match="in a group of"):
        dist.all_reduce(other)


def check_an_index_out_of_range_kills_the_device() -> None:
    """As a device-side assert does: every later call fails. The last check, therefore."""
    logits, labels = torch.zeros(2, 3, device="sim"), torch.tensor([1, 7], device="sim")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        nn.functional.cross_entropy(logits, labels).item()  # as on CUDA, where the host waits
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.zeros(2, device="sim")


ALONE = [name for name in list(globals()) if name.startswith("check_") and name != "check_collectives"]


def run_alone() -> dict[str, str]:
    """All checks of one process; name → traceback."""
    return {name: outcome_of(globals()[name]) for name in ALONE}


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """Traceback of each check of one process."""
    return run_ranks(1, run_alone, device="sim")[0]


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, alone: dict[str, str]) -> None:
    assert not alone[name], alone[name]


def test_a_device_in_exclusive_mode_has_one_process(tmp_path: Path) -> None:
    code = "from tests.accelerator.device import register; register(); import torch; torch.zeros(1, device='sim:1')"
    environment = os.environ | {"SIM_EXCLUSIVE": str(tmp_path)}
    command: Any = [sys.executable, "-c", f"{code}; print('has it', flush=True); input()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first: Any
    with subprocess.Popen(command, env=environment, **pipes) as first:
        assert first.stdout.readline() == "has it\n"
        second = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        first.stdin.write("\n")
    assert second.returncode
    assert "sim:1 is in exclusive mode and in use by another process" in second.stderr


# --- mutants: code that does not wait is caught ---------------------------------------------------------------------


class NoModule:
    """Stands for `torch.sim` where waiting is left out."""

    def current_stream(self, device: Any) -> NoModule:
        """Return something to wait for."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


def no_wait_for_copies(changed: pytest.MonkeyPatch) -> None:
    """The messages do not wait for the copies into their buffer."""

    def without_event(self: ReadAhead, timeout_s: float, reading: Callable[[int], None]) -> None:
        self._wait(timeout_s, reading)
        self._taken += 1

    changed.setattr(ReadAhead, "next", without_event)


def no_wait_before_reads(changed: pytest.MonkeyPatch) -> None:
    """Reads overwrite a buffer from which bytes are still copied."""
    wait = ReadAhead._wait_for_copies

    def without_event(self: ReadAhead, slot: Any) -> None:
        slot.copied = None
        wait(self, slot)

    changed.setattr(ReadAhead, "_wait_for_copies", without_event)


def no_wait_for_other_threads(changed: pytest.MonkeyPatch) -> None:
    """A buffer counts as filled once the first of its threads has read."""
    copy = ReadAhead._copy

    def after_the_first(self: ReadAhead, slot: Any, parts: Any) -> None:
        copy(self, slot, parts)
        self._record(slot)
        self._filled[next(index for index, own in enumerate(self.slots) if own is slot)].set()

    changed.setattr(ReadAhead, "_copy", after_the_first)


def no_wait_for_messages(changed: pytest.MonkeyPatch) -> None:
    """Copies overwrite a buffer that is still sent."""
    load_extension().set_collective_delay_us(3 * DELAY_US)
    load_extension().set_copy_delay_us(0)
    changed.setattr(ReadAhead, "release", lambda self, index: self._free.release())


def no_wait_for_a_save(changed: pytest.MonkeyPatch) -> None:
    """An asynchronous save returns before its copies are done."""
    changed.setattr(save, "device_module", lambda device: NoModule())


def unchanged(changed: pytest.MonkeyPatch) -> None:
    """No mutant."""


MUTANTS = {
    # First: later its memory would hold what the copies of another have brought.
    no_wait_for_a_save: "is wrong in the save",
    unchanged: "",
    no_wait_for_copies: "is wrong after the load",
    no_wait_before_reads: "is wrong after the load",
    no_wait_for_other_threads: "is wrong after the load",
    no_wait_for_messages: "is wrong after the load",
}
"""Mutant → what is said of it."""


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def loaded_and_saved(path: Path) -> None:
    """Load a checkpoint, and copy the weights for an asynchronous save."""
    sources.JOB_BYTES = load.JOB_BYTES = 4096  # several threads read each bucket
    rows = {name: full.chunk(dist.get_world_size())[dist.get_rank()] for name, full in load_file(path).items()}
    wrong: list[str] = []  # said at the end: the other rank, where all may be right, waits in the next load
    transports: tuple[Transport, ...] = ("local", "broadcast", "scatter")
    for transport in transports:
        module = shard_module(build_module(make_model, open_checkpoint(path), None), init_mesh("sim"))
        load_checkpoint(module, path, loading=Loading(transport, bucket_bytes=16 << 10))
        parameters = dict(module.named_parameters())
        differ = (name for name, one in parameters.items() if not torch.equal(local_tensor(one).cpu(), rows[name]))
        wrong += [f"{name} is wrong after the load by {transport}" for name in differ]
    assert not wrong, "\n".join(wrong)
    copied = save.HostMemory().copies(parameters, "weights")
    for name, tensor in copied.items():
        assert torch.equal(local_tensor(tensor), rows[name]), f"{name} is wrong in the save"


def run_together(path: Path) -> dict[str, str]:
    """Check of the collectives, and a load and a save of each mutant, on a rank: name → traceback."""
    outcomes = {check_collectives.__name__: outcome_of(check_collectives)}  # counts from a group's first operation
    for mutate in MUTANTS:
        sim().synchronize()
        load_extension().set_copy_delay_us(DELAY_US)
        load_extension().set_collective_delay_us(0)
        with pytest.MonkeyPatch.context() as changed:
            mutate(changed)
            outcomes[mutate.__name__] = outcome_of(partial(loaded_and_saved, path))
    return outcomes


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Every rank's tracebacks."""
    path = tmp_path_factory.mktemp("mutants") / "model.safetensors"
    torch.manual_seed(0)
    save_file(make_model().state_dict(), path)
    return run_ranks(2, run_together, path, device="sim")


def test_collectives_block_streams(together: list[dict[str, str]]) -> None:
    assert [outcome[check_collectives.__name__] for outcome in together] == ["", ""]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_forgotten_wait_is_caught(mutate: Callable[..., None], together: list[dict[str, str]]) -> None:
    outcomes, said = [outcome[mutate.__name__] for outcome in together], MUTANTS[mutate]
    assert any(said in outcome for outcome in outcomes) if said else not any(outcomes), "\n".join(outcomes)
