"""Faults that show on an accelerator only: each check runs on every rank of one group of two."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding import RayshardingError, current_worker
from raysharding import distributed as rs
from raysharding.batch import RankBatch, Split, deal
from raysharding.checkpoint import FileReader
from raysharding.config import Loading, Sharding
from raysharding.distributed import init_mesh, shard_module, train_step
from raysharding.distributed.comm import is_busy, waits_for_others
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.fully_shard import cut, is_recoverable, local_tensor, reshard
from raysharding.distributed.loading import load as streams
from raysharding.distributed.training import Accumulation, forward_backward, generate, optim_step
from raysharding.distributed.transfer import sources
from raysharding.errors import CheckpointError
from tests.accelerator.build import load_extension
from tests.distributed.checks import outcome_of
from tests.distributed.training.training_cases import (
    Scaled,
    bert_questions,
    gathering,
    images,
    llama,
    segformer,
    tagger_ignoring,
    tags,
)
from tests.spawn import device_type


def make_model() -> nn.Module:
    """The model of the checkpoint."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    """Cut a module over the ranks' devices."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        module = module.to(device_type())
    return shard_module(module, init_mesh(device_type(), sharding := Sharding(**options)), sharding)


def batch_of(rows: dict[str, torch.Tensor]) -> RankBatch:
    """This rank's rows, in host memory."""
    return deal((), {key: Split(value) for key, value in rows.items()}, dist.get_world_size())[dist.get_rank()]


def is_alive() -> bool:
    """Return True if this rank's device still computes."""
    try:
        torch.get_device_module(device_type()).synchronize()
    except torch.AcceleratorError:
        return False
    return True


# --- losses, which are read without labels of our own ---------------------------------------------------------------


def tags_above_0() -> dict[str, torch.Tensor]:
    """Tags of which a tagger that ignores 0 leaves out none."""
    return {**tags(), "labels": tags()["labels"] % 8 + 1}


def questions() -> dict[str, torch.Tensor]:
    """Answers of which one lies behind its text: the loss leaves out the length of the text."""
    ids = torch.arange(24).view(4, 6)
    start, end = torch.tensor([1, 2, 6, 0]), torch.tensor([1, 3, 6, 5])
    return {"input_ids": ids, "start_positions": start, "end_positions": end}


class Tagger(nn.Module):
    """Returns a loss of its own, which leaves out the label 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": tagger_ignoring(0)(self.inner(tokens), labels)}


def by_position(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean log-likelihood of one label for each row."""
    return -logits[:, 0].log_softmax(-1).gather(1, labels[:, None]).mean()


def ctc(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """transformers' loss for speech, as a sum."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    lengths = torch.full((len(labels),), logits.shape[1], device=logits.device)
    function = LOSS_MAPPING["ForCTC"]
    return function(logits, labels, lengths, blank_token_id=0, reduction="sum", zero_infinity=True), len(labels)


@dataclass(frozen=True)
class Loss:
    """A model, its rows, and a loss function or the model's own."""

    build: Callable[[], nn.Module]
    rows: Callable[[], dict[str, torch.Tensor]]
    function: Callable[..., Any] | None = None

    def expected(self, module: nn.Module) -> float:
        """Return the loss of one process on the CPU."""
        rows = self.rows()
        if self.function is None:
            output = module(**rows)
            return float(output["loss"].detach())
        found = self.function(module(rows["tokens"]), rows["labels"])
        return float(found[0].detach()) / found[1] if isinstance(found, tuple) else float(found.detach())


LOSSES = {
    "SegFormer ignores 255": Loss(segformer, images),
    "tagger ignores 0, and there are none": Loss(Tagger, tags_above_0),
    "tagger ignores 0": Loss(Tagger, tags),
    "loss function ignores 0": Loss(Scaled, tags, tagger_ignoring(0)),
    "gathers by label": Loss(Scaled, tags, gathering),
    "gathers by row": Loss(Scaled, lambda: {**tags(), "labels": tags()["labels"][:, 0]}, by_position),
    "answers ignore the length": Loss(bert_questions, questions),
    "CTC": Loss(Scaled, tags_above_0, ctc),
}


def check_loss(name: str) -> None:
    """The first step leaves the device alive, and its loss is the CPU's."""
    torch.manual_seed(0)
    case = LOSSES[name]
    module = case.build().eval()
    expected = case.expected(copy.deepcopy(module))
    sharded(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found = train_step(module, optimizer, batch_of(case.rows()), loss=case.function, training=False)["loss"]
    assert abs(found - expected) < 1e-4 * abs(expected), (found, expected)
    assert is_alive()


# --- devices, state and generators ----------------------------------------------------------------------------------


@contextmanager
def small_jobs(read_ranges: Callable[..., None]) -> Iterator[pytest.MonkeyPatch]:
    """Let loads read by this, in many jobs."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(FileReader, "read_ranges", read_ranges)
        for module in (streams, sources):
            changed.setattr(module, "JOB_BYTES", 256)
        yield changed


def check_reader_threads(root: Path) -> None:
    """The threads that read use their rank's device alone. The first check of a process: it counts from there."""
    module = sharded(make_model().to("meta"))
    seen: set[threading.Thread] = set()
    together, read = threading.Barrier(3), FileReader.read_ranges

    def meet(self: FileReader, file: int, ranges: Any) -> None:
        if threading.current_thread() not in seen and len(seen) < 3:
            seen.add(threading.current_thread())
            together.wait(20)  # three threads read at once
        read(self, file, ranges)

    with small_jobs(meet) as changed:
        changed.setattr(streams, "READ_THREADS", 8)  # of two ranks
        rs.load_checkpoint(module, root / "model.safetensors", loading=Loading("local"))
    assert len(seen) == 3
    touched = load_extension().touched()
    assert set(touched) == {dist.get_rank()}, touched


def check_an_error_of_one_reading_thread(root: Path) -> None:
    """All ranks raise it, no thread outlives the load, and the next load is right."""
    read, calls = FileReader.read_ranges, iter(range(1000))

    def fails(self: FileReader, file: int, ranges: Any) -> None:
        if dist.get_rank() == 1 and next(calls) == 2:
            raise CheckpointError("a dead disk", path="model.safetensors")
        read(self, file, ranges)

    for transport in ("local", "scatter", "broadcast"):
        with small_jobs(fails):
            calls = iter(range(1000))
            module = sharded(make_model().to("meta"))
            options = Loading(transport, bucket_bytes=4096, num_readers=None if transport == "local" else 2)
            with pytest.raises(RayshardingError, match="a dead disk"):
                rs.load_checkpoint(module, root / "model.safetensors", loading=options)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("raysharding-read")]
        assert not left, left
    rs.load_checkpoint(sharded(make_model().to("meta")), root / "model.safetensors", loading=Loading("local"))


def check_offloaded_state(root: Path) -> None:
    """Under offload the restored state of an optimizer is in host memory, and the next step is that of the first."""
    module = sharded(make_model().to("meta"), cpu_offload=True)
    rs.load_checkpoint(module, root / "model.safetensors")
    batch, losses = batch_of({"input": torch.ones(4, 64)}), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    train_step(module, optimizer, batch, loss=mean_square)
    rs.save_checkpoint(module, root / "offloaded", optimizer=optimizer)
    for source in (None, root / "offloaded"):
        if source is not None:
            rs.load_checkpoint(module, source)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            rs.load_optimizer_state(module, optimizer, source)
            devices = {state["exp_avg"].device.type for state in optimizer.state.values()}
            assert devices == {"cpu"}, devices
        losses.append([train_step(module, optimizer, batch, loss=mean_square)["loss"] for _ in range(2)])
    assert losses[0] == losses[1]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """A loss without labels."""
    return output.square().mean()


def check_offloaded_state_of_whole_matrices(root: Path) -> None:
    """Under offload a matrix-wise rule runs on the device, and its state, cut or not, is in host memory."""
    torch.manual_seed(0)
    alone = make_model()
    module = sharded(make_model().to("meta"), cpu_offload=True)
    rs.load_full_state_dict(module, alone.state_dict() if dist.get_rank() == 0 else {})
    rows = torch.ones(4, 64)
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.01)
    expected = torch.optim.Adafactor(alone.parameters(), lr=0.01)
    for _ in range(2):
        train_step(module, optimizer, batch_of({"input": rows}), loss=mean_square)
        expected.zero_grad()
        alone(rows).square().mean().backward()
        expected.step()
    values = [value for held in optimizer.state.values() for value in held.values()]
    assert {local_tensor(value).device.type for value in values} == {"cpu"}
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(local_tensor(one), local_tensor(cut(other, one)), rtol=1e-4, atol=1e-6)


def check_labels_of_a_loss_function(root: Path) -> None:
    """Labels that only the loss function takes come to the device of the output."""
    seen = []

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((output.device, labels.device))
        return (output - labels).square().mean()

    module = sharded(make_model())
    rows = {"input": torch.ones(4, 64), "labels": torch.zeros(4, 64)}
    train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), batch_of(rows), loss=loss)
    assert {device.type for both in seen for device in both} == {device_type()}, seen


def check_generator_after_generate(root: Path) -> None:
    """Drop-out after `generate` is as without it."""
    module = sharded(llama())
    prompts = batch_of({"input_ids": torch.arange(3, 11).view(4, 2)})
    masks = []
    for generates in (False, True):
        torch.manual_seed(7)
        if generates:
            generate(module, prompts, training=False)
        masks.append(F.dropout(torch.ones(64, device=device_type())).tolist())
    assert masks[0] == masks[1]


def check_dead_device(root: Path) -> None:
    """A group does not go on with a device that has died, whatever is raised. The last check of a process."""
    module = sharded(make_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    batch = batch_of({"input": torch.ones(4, 64)})
    train_step(module, optimizer, batch, loss=mean_square)
    hook = module.register_forward_pre_hook(die_and_say_something_else)
    for error in (ValueError, torch.AcceleratorError):
        with pytest.raises(error) as caught:
            train_step(module, optimizer, batch, loss=mean_square)
        hook.remove()
        assert not is_alive()
        assert not is_recoverable(caught.value), caught.value


def kill_device() -> None:
    """Use an index out of range, and wait for it."""
    device = torch.accelerator.current_accelerator()
    F.embedding(torch.tensor([7], device=device), torch.zeros(3, 2, device=device)).sum().item()


def check_one_rank_without_memory(root: Path) -> None:
    """Its buffers fit on all ranks but one: all raise, and none waits for it."""
    module, rank = sharded(make_model()), dist.get_rank()
    begun = time.monotonic()
    for work in (
        partial(rs.load_checkpoint, module, root / "model.safetensors", loading=Loading("scatter")),
        partial(rs.save_checkpoint, module, root / "without-memory"),
    ):
        load_extension().set_limit(rank, load_extension().memory_allocated(rank) if rank == 1 else None)
        with pytest.raises((torch.OutOfMemoryError, RayshardingError), match="out of memory"):
            work()
        load_extension().set_limit(rank, None)
    assert time.monotonic() - begun < 20
    rs.save_checkpoint(module, root / "without-memory")


def die_and_say_something_else(*_: Any) -> None:
    """On a GPU the host learns of a death later, and may raise another error first."""
    with suppress(torch.AcceleratorError):
        kill_device()
    raise ValueError("a row is wrong")


CHECKS = (
    check_reader_threads,
    check_an_error_of_one_reading_thread,
    check_offloaded_state,
    check_offloaded_state_of_whole_matrices,
    check_labels_of_a_loss_function,
    check_generator_after_generate,
    check_one_rank_without_memory,
    check_dead_device,
)


def run_all(root: Path) -> dict[str, str]:
    """All checks of a rank; name → traceback."""
    first, *others = CHECKS
    outcomes = {first.__name__: outcome_of(lambda: first(root))}
    outcomes |= {name: outcome_of(lambda name=name: check_loss(name)) for name in LOSSES}  # type: ignore[misc]
    return outcomes | {check.__name__: outcome_of(lambda check=check: check(root)) for check in others}  # type: ignore[misc]


# --- hangs ----------------------------------------------------------------------------------------------------------

HANG_S = 0.6


class Hang:
    """Stops rank 1 for a while, in a call of its own, and looks at what every rank does meanwhile."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign
        self.looks: list[bool] = []
        self._waits = threading.get_ident()

    def strike(self, *_: Any) -> None:
        """Hang, once, on rank 1."""
        if dist.get_rank() == 1 and not self.sign.exists():
            self.sign.touch()
            time.sleep(HANG_S)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look, from the sign on, at the frame of the thread that runs the call."""
        thread = threading.Thread(target=self._look)
        thread.start()
        yield
        thread.join()

    def _look(self) -> None:
        device = current_device(device_type())
        while not self.sign.exists():
            time.sleep(0.01)
        time.sleep(HANG_S / 3)
        until = time.monotonic() + HANG_S / 3
        while time.monotonic() < until:
            self.looks.append(waits_for_others(sys._current_frames()[self._waits]) or is_busy(device))
            time.sleep(0.01)


def step(hang: Hang, root: Path, num_steps: int) -> None:
    """Rank 1 does not come to a block after some steps; without any, the loss is found out in it."""
    module = sharded(make_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    batch = batch_of({"input": torch.ones(4, 64)})
    for _ in range(num_steps):
        train_step(module, optimizer, batch, loss=mean_square)
    module.get_submodule("2").register_forward_pre_hook(hang.strike)
    with hang.watched():
        train_step(module, optimizer, batch, loss=mean_square)


def read_on_host(hang: Hang, root: Path) -> None:
    """The model reads a value, in a forward to which rank 1 does not come."""

    def read(_block: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.sum().item()

    module, rows = sharded(make_model()), torch.ones(4, 64, device=device_type())
    module(rows)
    reshard(module)
    module.get_submodule("2").register_forward_hook(read)
    with hang.watched():
        hang.strike()
        module(rows)


def hang_in_update(hang: Hang, root: Path) -> None:
    """Rank 1 does not come to the norm of the gradients."""
    module, done = sharded(make_model()), Accumulation()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    forward_backward(module, batch_of({"input": torch.ones(4, 64)}), done, loss=mean_square)
    with hang.watched():
        hang.strike()
        optim_step(module, optimizer, done)


def load(hang: Hang, root: Path, loading: Loading) -> None:
    """Rank 1 stops in the third bucket, or the last. Rank 0 cannot read on, or has sent all."""
    calls = []

    def progress(phase: str, *_: Any) -> None:
        calls.append(phase)
        if calls.count("stream") == 3:
            hang.strike()

    module = sharded(make_model().to("meta"))
    with hang.watched():
        rs.load_checkpoint(module, root / "model.safetensors", loading=loading, progress=progress)
    assert hang.sign.exists(), calls


def hang_in_save(hang: Hang, root: Path) -> None:
    """Rank 1 stops amid a save."""
    module = sharded(make_model())
    with hang.watched():
        rs.save_checkpoint(module, root / f"saved-{device_type()}", progress=hang.strike)


HANGS: dict[str, Callable[[Hang, Path], None]] = {
    "first step": partial(step, num_steps=0),
    "step": partial(step, num_steps=1),
    "read on the host": read_on_host,
    "update": hang_in_update,
    "load": partial(load, loading=Loading("scatter", bucket_bytes=4096, shared_memory=False)),
    "short load": partial(load, loading=Loading("scatter", bucket_bytes=1 << 15, shared_memory=False)),
    "save": hang_in_save,
}
"""Where rank 1 hangs → the call."""


def run_hangs(root: Path) -> dict[str, float]:
    """What share of the looks saw this rank wait for others."""
    shares = {}
    for name, call in HANGS.items():
        hang = Hang(root / f"{name}-{device_type()}")
        call(hang, root)
        shares[name] = sum(hang.looks) / len(hang.looks)
    return shares


# --- groups ---------------------------------------------------------------------------------------------------------


def hang_on_rank_1(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that rank 1 never comes to the end of."""
    if dist.get_rank() == 1:
        time.sleep(60)
    return (output - targets).square().mean()


def read_beside_rank_1() -> None:
    """Read on the host what rank 1 would send, which never comes to it."""
    if dist.get_rank() == 1:
        time.sleep(60)
    value = torch.ones(1, device=current_worker().device)
    dist.all_reduce(value)
    value.item()


class _LostInBackward(torch.autograd.Function):
    """Rank 1 takes part in no collective after this."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, how: str) -> torch.Tensor:
        """Return the value."""
        ctx.how = how
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Lose rank 1, once the other has had the time to queue its update."""
        if dist.get_rank() == 1:
            time.sleep(1.0)
            if ctx.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if ctx.how == "hangs":
                time.sleep(60)
            raise RuntimeError("rank 1 is lost")
        return gradients[0], None


def lost_in_backward(value: torch.Tensor, how: str) -> torch.Tensor:
    """Return the value; in its backward rank 1 `raises`, `dies` or `hangs`."""
    return _LostInBackward.apply(value, how)  # type: ignore[no-untyped-call]


def lost_loss(how: str, output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A loss in whose backward rank 1 is lost."""
    return (lost_in_backward(output, how) - targets).square().sum(), output.numel()
