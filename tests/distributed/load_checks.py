"""What is checked on the ranks of `test_loading.py`: odd shapes, dtypes, errors that reach everybody, saves."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from raysharding.batch import Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import (
    gather_state_dict,
    init_mesh,
    load_checkpoint,
    save_checkpoint,
    shard_module,
    shared_ring,
    train_step,
)
from raysharding.distributed.layout import local_tensor, module_tensors
from raysharding.distributed.metadata import all_gather_json
from raysharding.distributed.verifying import digest_module
from raysharding.errors import CheckpointError, PlanError, RayshardingError
from raysharding.models import build_module
from tests.distributed.models import Odd, filled

ODD = "odd.safetensors"
SOCKETS = Loading("scatter", 64 << 10, shared_memory=False)
"""A checkpoint of `Odd`."""
APART = "apart"
"""A directory that not every rank sees."""
SMALL_DISK = "small"
"""A file system of 3 MiB."""
FILE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def sharded(path: str | Path, sharding: Sharding | None = None, dtype: torch.dtype | None = None) -> Any:
    """An `Odd` on meta, cut over all ranks."""
    module = build_module(Odd, open_checkpoint(path), dtype)
    return shard_module(module, init_mesh("cpu", sharding), sharding)


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, on rank 0."""
    return {name: tensor for part in gather_state_dict(module) for name, tensor in part.items()}


def raised_everywhere(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Run `fn` on every rank; rank → what it raised."""
    try:
        fn(*args, **kwargs)
        outcome = ""
    except (CheckpointError, PlanError) as error:
        outcome = f"{type(error).__name__}: {error}"
    return all_gather_json(outcome)


def check_odd_shapes(root: Path) -> None:
    """Every kind of tensor, bit for bit, by every transport; ties stay, buffers stay."""
    path = root / ODD
    expected = filled().state_dict()
    reports = []
    for loading in (SOCKETS, Loading("broadcast", 64 << 10), Loading("scatter", 64 << 10), Loading()):
        module = sharded(path)
        reports.append(load_checkpoint(module, path, loading=loading))
        assert module.head.weight is module.embed.weight
        assert module.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
        state = full_state(module)
        if dist.get_rank() == 0:
            assert set(state) == set(expected)
            for name, tensor in expected.items():
                assert state[name].dtype == tensor.dtype, name
                assert torch.equal(state[name], tensor), name
        ids = torch.arange(8).view(2, 4)
        with torch.no_grad():
            torch.testing.assert_close(module.eval()(ids), filled()(ids), rtol=0, atol=1e-6)
    assert [report.transport for report in reports] == ["scatter", "broadcast", "scatter", "local"]
    several = dist.get_world_size() > 1
    assert [report.shared_bytes > 0 for report in reports] == [False, False, several, several]
    assert reports[0].num_buckets > 1
    assert reports[3].num_buckets == 1


def token_loss(logits: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_training(root: Path) -> None:
    """Ten steps of a plain module with a callable loss give the loss curve of one process."""
    module, reference = sharded(root / ODD), filled()
    load_checkpoint(module, root / ODD)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    oracle = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ids, targets = torch.arange(20).view(5, 4), torch.arange(5, 25).view(5, 4)
    batch = deal((Split(ids),), {"targets": Split(targets)}, dist.get_world_size())[dist.get_rank()]
    for step in range(10):
        # In eval mode: BatchNorm's batch statistics differ between one process and several.
        metrics = train_step(module, optimizer, batch, loss=token_loss, training=False)
        oracle.zero_grad()
        loss = token_loss(reference(ids), ids, targets)
        loss.backward()
        oracle.step()
        assert abs(metrics["loss"] - loss.item()) < 1e-5, step
    state = full_state(module)
    for name, tensor in reference.state_dict().items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-4)


REPLICATED_LOADS = (
    SOCKETS,
    Loading("scatter", 64 << 10),
    Loading("scatter", 64 << 10, shared_memory=False, num_readers=3),
    Loading("broadcast", 64 << 10, num_readers=2),
    Loading("local", 64 << 10, shared_memory=False),
    Loading("local", 64 << 10),
    Loading("auto", num_readers=2),
    Loading(),
)


def check_replicas(root: Path) -> None:
    """HSDP 2 × 2: both replicas hold the same shards, by every transport, at the least wire."""
    path = root / ODD
    sharding = Sharding(replicate_size=2)
    for loading in REPLICATED_LOADS:
        module = sharded(path, sharding)
        report = load_checkpoint(module, path, loading=loading)
        require_filled(module)
        for name, tensor in module_tensors(module).items():
            mine = local_tensor(tensor).contiguous()
            parts = [torch.empty_like(mine) for _ in range(2)]
            mesh = module.embed.weight.device_mesh
            dist.all_gather(parts, mine, group=mesh.get_group("replicate"))
            assert torch.equal(parts[0], parts[1]), (name, loading)
        assert report.read_bytes <= 1.02 * report.checkpoint_bytes, loading
        if loading.transport != "broadcast":
            # Each of the ranks that do not read a part themselves is sent it, once.
            assert report.wire_bytes + report.shared_bytes <= 1.02 * least_wire(module, report.readers), loading


def least_wire(module: nn.Module, readers: Sequence[int]) -> float:
    """Bytes that must travel: each shard to each of its two holders but one that reads it; the rest to all but one."""
    cut = sum(local_tensor(item).nbytes for item in module.parameters() if isinstance(item, DTensor))
    whole = sum(item.nbytes for item in module_tensors(module).values() if not isinstance(item, DTensor))
    unread = sum(2 - any(rank in readers for rank in (shard, shard + 2)) for shard in range(2))
    return unread * cut + 3 * whole + 2_000


def require_filled(module: nn.Module) -> None:
    """Every value is the checkpoint's."""
    state = full_state(module)
    for name, tensor in filled().state_dict().items() if dist.get_rank() == 0 else ():
        assert torch.equal(state[name], tensor), name


def check_readers(root: Path) -> None:
    """Three ranks of which some see the files, as on nodes that do not share a disk."""
    rank = dist.get_rank()
    apart = root / APART
    if rank == 2:
        hide(apart)
    for loading, transport, readers in (
        (Loading(), "scatter", (0, 1)),
        (Loading(shared_memory=False, bucket_bytes=64 << 10), "scatter", (0, 1)),
        (Loading(num_readers=1), "scatter", (0,)),
        (Loading("scatter"), "scatter", (0,)),
        (Loading("broadcast", 64 << 10, num_readers=2), "broadcast", (0, 1)),
    ):
        module = sharded(root / ODD)
        report = load_checkpoint(module, apart / ODD, loading=loading)
        assert (report.transport, report.readers) == (transport, readers), report.transport_reason
        assert report.read_bytes <= 1.02 * report.checkpoint_bytes
        require_filled(module)
    for loading, said in ((Loading("local"), "rank 2"), (Loading(num_readers=3), "only ranks 0, 1")):
        errors = raised_everywhere(load_checkpoint, sharded(root / ODD), apart / ODD, loading=loading)
        assert all(error.startswith("CheckpointError") and said in error for error in errors), errors
    if rank == 2:  # the same header, other values, as a later step of one training run has
        state = load_file(root / ODD)
        save_file(
            {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}, apart / ODD
        )
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), apart / ODD)
    assert all("rank 2 (" in error and "other content" in error for error in errors), errors
    module = sharded(root / ODD)
    load_checkpoint(module, apart / ODD, loading=Loading("scatter"))
    require_filled(module)


def hide(directory: Path) -> None:
    """Lay an empty file system over a directory, for this thread and those that it starts."""
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())


DTYPE_LOADS = (Loading("scatter", 64 << 10), Loading("local", 64 << 10))


def check_dtypes(root: Path) -> None:
    """Files of four dtypes into models of three, in the narrower dtype on the wire."""
    for file_dtype in FILE_DTYPES:
        for target, loading in product((torch.float32, torch.bfloat16, torch.float16), DTYPE_LOADS):
            path = root / f"{file_dtype}.safetensors"
            module = sharded(path, dtype=target)
            report = load_checkpoint(module, path, loading=loading)
            narrower = min(file_dtype.itemsize, target.itemsize)
            floats = sum(value.numel() for value in load_file(path).values() if value.is_floating_point())
            if dist.get_rank() == 0:
                # All but rank 0's own part of the sharded tensors leaves rank 0, in the narrower dtype.
                share = (dist.get_world_size() - 1) / dist.get_world_size()
                assert report.wire_bytes + report.shared_bytes <= share * floats * narrower + 10_000
            saved = root / "saves" / f"{dist.get_world_size()}-{file_dtype}-{target}"
            save_checkpoint(module, saved, overwrite=True)
            state = full_state(module)
            for name, tensor in load_file(saved / "model.safetensors").items() if dist.get_rank() == 0 else ():
                assert torch.equal(state[name], tensor), name
            for name, tensor in load_file(path).items() if dist.get_rank() == 0 else ():
                want = tensor.to(target) if tensor.is_floating_point() else tensor
                assert state[name].dtype == want.dtype, name
                assert torch.equal(state[name], want), (name, file_dtype, target)


def check_mapping(root: Path) -> None:
    """Shards that are pages of the files: right values, no bytes read, nothing written back, uneven ones read."""
    path = root / ODD
    before = path.read_bytes()
    module = sharded(path)
    report = load_checkpoint(module, path, loading=Loading(mmap=True))
    require_filled(module)
    assert report.transport == "local"
    assert report.mapped_bytes > 0
    assert report.mapped_bytes + report.read_bytes <= 1.02 * report.checkpoint_bytes
    assert (report.read_bytes > 0) == (dist.get_world_size() > 1)  # rows that the ranks do not divide
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(ids), filled()(ids), rtol=0, atol=1e-6)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(ids).square().sum().backward()
    optimizer.step()
    dist.barrier()
    assert path.read_bytes() == before
    loaded = load_checkpoint(module, path, loading=Loading(mmap=True))  # real already: read into the memory it has
    assert loaded.mapped_bytes == 0
    require_filled(module)
    wide = sharded(path, dtype=torch.float64)
    converted = load_checkpoint(wide, path, loading=Loading(mmap=True))
    assert converted.mapped_bytes < report.mapped_bytes
    verified = load_checkpoint(sharded(path), root / SAVED, loading=Loading(mmap=True, verify="full"))
    assert verified.mapped_bytes > 0


SAVED = "with-a-manifest"
"""A save of `Odd` by raysharding."""
VERIFIED = (
    Loading("scatter", 64 << 10, verify="full"),
    Loading("local", 64 << 10, verify="full"),
    Loading("broadcast", 64 << 10, verify="full"),
    Loading(verify="full", mmap=True),
)


def check_checksums(root: Path) -> None:
    """A flipped byte is found by every transport and named on every rank; without a manifest there is an error."""
    for loading in VERIFIED:
        module = sharded(root / ODD)
        load_checkpoint(module, root / SAVED, loading=loading)
        require_filled(module)
        errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / FLIPPED, loading=loading)
        assert all(error.startswith("CheckpointError") and "'blocks.1.weight'" in error for error in errors), errors
        assert not any("blocks.0" in error for error in errors), errors
    load_checkpoint(sharded(root / ODD), root / FLIPPED)
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / ODD, loading=VERIFIED[0])
    assert all("manifest" in error and "verify='finite'" in error for error in errors), errors


FLIPPED = "with-a-flipped-byte"
"""The same, with one byte of one tensor changed."""
INFINITE = "infinite.safetensors"
"""`Odd` with an infinity in the last row of a matrix, and a NaN in a buffer."""


def check_finite_values(root: Path) -> None:
    """A value that is not finite is named on every rank, in any dtype."""
    finite = Loading("scatter", 64 << 10, verify="finite")
    for dtype in FILE_DTYPES:
        load_checkpoint(sharded(root / f"{dtype}.safetensors", dtype=torch.float32), root / ODD, loading=finite)
    for dtype in (torch.float32, torch.bfloat16):
        module = sharded(root / INFINITE, dtype=dtype)
        errors = raised_everywhere(load_checkpoint, module, root / INFINITE, loading=finite)
        assert all("blocks.0.weight" in error and "inf" in error for error in errors), errors
    load_checkpoint(sharded(root / INFINITE), root / INFINITE)


def check_digests(root: Path) -> None:
    """The digest is the same by every transport, and another for other values; replicas that differ are found."""
    digests = set()
    for loading in (Loading("scatter", 64 << 10, digest=True), Loading(digest=True)):
        module = sharded(root / ODD)
        digests.add(load_checkpoint(module, root / ODD, loading=loading).digest)
    assert len(digests) == 1
    assert len(digests.pop()) == 16
    (root / "digests").mkdir(exist_ok=True)
    (root / "digests" / f"{dist.get_world_size()}-{dist.get_rank()}").write_text(
        digest_module(module_tensors(module), "")
    )
    assert len({file.read_text() for file in (root / "digests").iterdir() if file.read_text()}) == 1
    module = sharded(root / ODD)
    other = load_checkpoint(module, root / FLIPPED, loading=Loading(digest=True)).digest
    assert other != (root / "digests" / f"{dist.get_world_size()}-{dist.get_rank()}").read_text()
    with torch.no_grad():
        dict(module.named_buffers())["positions"].add_(dist.get_rank())
    outcome = ""
    try:
        digest_module(module_tensors(module), "here")
    except CheckpointError as error:
        outcome = str(error)
    assert (outcome == "") == (dist.get_world_size() == 1)
    assert "positions" in outcome or dist.get_world_size() == 1


def check_plan_errors(root: Path) -> None:
    """All mismatches in one error, on every rank; a missing file too."""
    path = root / "bad.safetensors"
    for loading in (Loading("scatter"), Loading("broadcast")):
        errors = raised_everywhere(load_checkpoint, sharded(path), path, loading=loading)
        for error in errors:
            assert error.startswith("PlanError")
            for name in ("blocks.0.weight", "narrow", "extra", "table"):
                assert name in error, error
    missing = raised_everywhere(load_checkpoint, sharded(path), root / "nowhere.safetensors")
    assert all(error.startswith("CheckpointError") and "nowhere" in error for error in missing), missing


def check_a_model_that_differs(root: Path) -> None:
    """Ranks that built different models are told before data moves."""
    path = root / ODD
    module = build_module(Odd, open_checkpoint(path), torch.float32 if dist.get_rank() == 0 else torch.bfloat16)
    shard_module(module, init_mesh("cpu"))
    errors = raised_everywhere(load_checkpoint, module, path)
    assert all("ranks 1 built another model" in error for error in errors), errors


def check_options_that_differ(root: Path) -> None:
    """So are ranks that were given different options."""
    rank = dist.get_rank()
    for loading in (Loading("scatter" if rank else "broadcast"), Loading(strict=False, seed=rank)):
        errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / ODD, loading=loading)
        assert all("were given other options" in error for error in errors), errors


def check_a_reload(root: Path) -> None:
    """A module that has run a forward, whose root holds its full parameters, is loaded again."""
    module = sharded(root / ODD)
    load_checkpoint(module, root / ODD)
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        before = module.eval()(ids)
        for parameter in module.parameters():
            local_tensor(parameter).zero_()
    load_checkpoint(module, root / ODD)
    with torch.no_grad():
        assert torch.equal(module(ids), before)


def check_a_save_that_fails_late(root: Path) -> None:
    """An error of rank 0 alone, after the tensors were written, is everybody's and leaves nothing."""
    import transformers

    module: Any = build_module(None, open_checkpoint(root / "llama"), torch.bfloat16)
    shard_module(module, init_mesh("cpu"))
    load_checkpoint(module, root / "llama", loading=Loading(dtype=torch.bfloat16))
    module.config.max_length = 12
    try:
        save_checkpoint(module, root / "saves" / "late")
        outcome = ""
    except (ValueError, RayshardingError) as error:
        outcome = str(error)
    assert all("eneration parameters" in said for said in all_gather_json(outcome)), outcome
    # Rank 0 removes what was written; the others learn of the error before it is done.
    assert dist.get_rank() != 0 or not any("late" in name for name in os.listdir(root / "saves"))
    del module.config.max_length
    save_checkpoint(module, root / "saves" / "late")
    if dist.get_rank() == 0:
        reopened = transformers.AutoModelForCausalLM.from_pretrained(root / "saves" / "late")
        assert reopened.dtype == torch.bfloat16


def refuse(name: str, flags: int = 0) -> int:
    """A system call that a sandbox forbids."""
    raise PermissionError(1, "Operation not permitted")


def check_a_rank_that_cannot_map(root: Path) -> None:
    """A rank on another host, by its host name, is sent its part; the others read theirs in shared memory."""
    told = shared_ring.host_identity
    if dist.get_rank() == 1:
        shared_ring.host_identity = lambda: ["elsewhere", *told()[1:]]
    try:
        module = sharded(root / ODD)
        report = load_checkpoint(module, root / ODD, loading=Loading("scatter", 64 << 10))
        absent = load_checkpoint(sharded(root / ODD), root / ODD, loading=SOCKETS)
    finally:
        shared_ring.host_identity = told
    create = os.memfd_create
    if dist.get_rank() == 0:
        os.memfd_create = refuse
    try:
        refused = load_checkpoint(sharded(root / ODD), root / ODD, loading=Loading("scatter"))
    finally:
        os.memfd_create = create
    assert refused.shared_bytes == 0
    state = full_state(module)
    if dist.get_rank() == 0:
        for name, tensor in filled().state_dict().items():
            assert torch.equal(state[name], tensor), name
    size = dist.get_world_size()
    if size > 1:
        assert 0 < report.wire_bytes < absent.wire_bytes or size == 2
        assert (report.shared_bytes > 0) == (size > 2)


def shrinking(loading: Loading) -> str:
    """Name of the file that shrinks under `loading`."""
    return f"shrinks-{loading.transport}-{loading.shared_memory}.safetensors"


SHRINKING = (SOCKETS, Loading("scatter", 64 << 10), Loading("broadcast", 64 << 10), Loading("local", 64 << 10))


def check_broken_stream(root: Path) -> None:
    """A file that shrinks during the load is everybody's error, and the group goes on."""
    for loading in SHRINKING:
        path = root / shrinking(loading)
        checkpoint = open_checkpoint(path)
        module = sharded(path)
        dist.barrier()
        if dist.get_rank() == 0:
            os.truncate(path, path.stat().st_size // 2)
        errors = raised_everywhere(load_checkpoint, module, checkpoint, loading=loading, stall_s=20)
        assert all(error.startswith("CheckpointError") for error in errors), errors
        assert all(parameter.is_meta for parameter in module.parameters())
        # The group is as good as before: nothing of the broken load is left in flight.
        load_checkpoint(module, root / ODD, loading=loading)
        require_filled(module)


def check_saves(root: Path) -> None:
    """A save loads again, refuses to overwrite unasked, and leaves nothing beside it."""
    path = root / ODD
    module = sharded(path)
    load_checkpoint(module, path)
    target = root / "runs" / "step-1"
    report = save_checkpoint(module, target)
    assert report.num_bytes == sum(t.numel() * t.itemsize for t in load_file(path).values())
    assert all("exists already" in error for error in raised_everywhere(save_checkpoint, module, target))
    save_checkpoint(module, target, overwrite=True)
    again = sharded(path)
    load_checkpoint(again, target)
    state = full_state(again)
    if dist.get_rank() == 0:
        for name, tensor in filled().state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert os.listdir(root / "runs") == ["step-1"]


def check_full_disk(root: Path) -> None:
    """A full disk is everybody's error; the old checkpoint still loads, and nothing is left."""
    path, small = root / ODD, root / SMALL_DISK
    module = sharded(path)
    load_checkpoint(module, path)
    target = small / "saved"
    save_checkpoint(module, target)
    wide = sharded(path, dtype=torch.float64)
    load_checkpoint(wide, path)
    with (small / "filler").open("wb") as filler:
        if dist.get_rank() == 0:
            filler.write(b"0" * max(0, os.statvfs(small).f_bavail * 4096 - 8192))
    errors = raised_everywhere(save_checkpoint, wide, target, overwrite=True)
    assert all("No space left" in error for error in errors), errors
    if dist.get_rank() == 0:
        assert sorted(os.listdir(small)) == ["filler", "saved"]
        (small / "filler").unlink()
    again = sharded(path)
    load_checkpoint(again, target)
