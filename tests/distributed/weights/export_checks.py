"""What is checked on the ranks of `test_export.py`: names, values, memory, and ranks that stop early."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import init_mesh, load_checkpoint, shard_module
from raysharding.distributed.fully_shard import local_tensor
from raysharding.distributed.weights import WeightStream
from raysharding.models import Adapted, build_module
from raysharding.worker import Worker, current_worker
from tests.distributed.loading.load_checks import ODD, sharded
from tests.spawn import device_type

WHOLE = ("llama-tied", "mixtral", "bert")
"""Models that are saved by transformers."""
MERGED = "merged/model.safetensors"
ADAPTED = [(name, torch.float32) for name in ("llama", "gpt2")]
ADAPTED += [(name, torch.bfloat16) for name in ("llama", "mixtral")]
"""Models with adapters that are saved, and merged, by peft."""


def loaded(path: Path, dtype: torch.dtype | None = None, adapters: Path | None = None) -> Any:
    opened = open_checkpoint(path)
    model = None if adapters is None else Adapted.of_files(None, open_checkpoint(adapters))
    module = shard_module(build_module(model, opened, dtype), init_mesh(device_type()))
    load_checkpoint(module, opened, loading=Loading(dtype=dtype))
    if adapters is not None:
        load_checkpoint(module, adapters)
    return module


def streamed(module: Any, **options: Any) -> dict[str, torch.Tensor]:
    """All pairs of this rank, kept until the end: none may share memory, or be written to later."""
    with WeightStream(module, **options) as stream:
        pairs = list(stream)
    assert len(dict(pairs)) == len(pairs)
    assert len({tensor.data_ptr() for _, tensor in pairs}) == len(pairs)
    assert all(tensor.device.type == device_type() and not tensor.requires_grad for _, tensor in pairs)
    return {name: tensor.cpu() for name, tensor in pairs}


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], is_given: bool = True) -> list[str]:
    """What differs in any bit. Asserted when a check has called all its collectives: the other ranks take part."""
    if found.keys() != (wanted.keys() if is_given else set()):
        return [f"names {sorted(found)}, not {sorted(wanted)}"]
    same = {name for name, one in found.items() if one.dtype == wanted[name].dtype and torch.equal(one, wanted[name])}
    return sorted(found.keys() - same)


def check_files(root: Path) -> None:
    """Names, shapes and values are those of the files, for every size of a bucket and every choice of ranks."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    found: list[str] = []
    for name in WHOLE:
        module, wanted = loaded(root / name), load_file(root / name / "model.safetensors")
        found += differences(streamed(module), wanted, rank == 0)
        found += differences(streamed(module, ranks=[last], bucket_bytes=1000), wanted, rank == last)
        found += differences(streamed(module, ranks={*range(last + 1)}, bucket_bytes=10_000), wanted)
    module = sharded(root / ODD)
    load_checkpoint(module, root / ODD)
    found += differences(streamed(module, bucket_bytes=1000), load_file(root / ODD), rank == 0)
    assert not found


def check_dtype(root: Path) -> None:
    """Floating-point tensors alone are converted, and travel narrow."""
    module = sharded(root / ODD)
    load_checkpoint(module, root / ODD)
    sent, found, file = {}, [], load_file(root / ODD)
    for dtype in (None, torch.bfloat16, torch.float64):
        stream = WeightStream(module, dtype=dtype)
        cast = {name: one.to(dtype) if dtype and one.is_floating_point() else one for name, one in file.items()}
        found += differences({name: tensor.cpu() for name, tensor in stream}, cast, dist.get_rank() == 0)
        sent[dtype] = stream._gather.wire_bytes
    assert not found
    assert sent[torch.float64] == sent[None]
    assert sent[torch.bfloat16] <= 0.51 * sent[None]


def check_adapters(root: Path) -> None:
    """Of a model with adapters these alone, as peft saves them; merged, what peft's own merge saves."""
    is_given = dist.get_rank() == 0
    found: list[str] = []
    for name, dtype in ADAPTED:
        path = root / f"adapted-{name}-{dtype}"
        module = loaded(path / "base", dtype, path / "adapters")
        before = [local_tensor(parameter).clone() for parameter in module.parameters()]
        alone, merged = (load_file(path / file) for file in ("adapters/adapter_model.safetensors", MERGED))
        found += differences(streamed(module), alone, is_given)
        values = [streamed(module, merge=True, bucket_bytes=700), streamed(module, merge=True, dtype=torch.float16)]
        if device_type() == "cpu":  # another device, other rounding
            found += differences(values[0], merged, is_given)
            found += differences(values[1], {key: one.to(torch.float16) for key, one in merged.items()}, is_given)
        after = [local_tensor(parameter) for parameter in module.parameters()]
        found += [] if all(map(torch.equal, before, after)) else ["the module's own tensors have changed"]
    assert not found


class Live(TorchDispatchMode):
    """Counts the bytes of the memory that torch's operations make, from when a tensor is made until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func._schema.name in ("aten::empty", "aten::_to_copy", "aten::clone"):
            storage = result.untyped_storage()
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def check_memory(root: Path) -> None:
    """One bucket and one tensor, beside the tensor that the caller holds; on the other ranks one bucket."""
    module, bucket = loaded(root / "mixtral"), 4000
    largest = max(tensor.nbytes for tensor in load_file(root / "mixtral/model.safetensors").values())
    packed = max(parameter.numel() * parameter.itemsize for parameter in module.parameters())
    assert packed > largest + 2 * bucket, "a stacked parameter in memory would be seen"
    with WeightStream(module, bucket_bytes=bucket) as stream, Live() as live:
        for _, tensor in stream:
            del tensor
    padding = 16 * dist.get_world_size() * 8
    assert 0 < live.peak <= bucket + padding + (largest if dist.get_rank() == 0 else 0), live.peak
    assert live.now <= bucket + padding


def check_arguments(root: Path) -> None:
    """A bad one is everybody's error; different ones are, too, and nobody waits."""
    module = loaded(root / "bert")
    for options, message in (
        ({"ranks": []}, r"ranks=\[\]: give one or more ranks from 0 to"),
        ({"ranks": [99]}, r"ranks=\[99\]"),
        ({"ranks": 1}, r"ranks=1: give one or more ranks"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: give a whole number"),
        ({"dtype": torch.int8}, r"dtype=torch.int8: give a floating-point dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightStream(module, **options)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="the ranks gave different arguments"):
            streamed(module, bucket_bytes=1000 + dist.get_rank())
        with pytest.raises(ConnectionAbortedError if dist.get_rank() else ValueError, match=r"one at a time|stopped"):
            list(zip(WeightStream(module, bucket_bytes=1000), WeightStream(module, bucket_bytes=1000), strict=True))
        streamed(module)


@contextmanager
def stopped(by_me: type[Exception] | None, who: int) -> Iterator[None]:
    """Expect the error of the rank that stops, and that of the others, which name the rank and say why."""
    expected = by_me if by_me and dist.get_rank() == who else ConnectionAbortedError
    with pytest.raises(expected) as found:
        yield
    if dist.get_rank() != who:
        assert f"weights(): rank {who} " in str(found.value)
    elif by_me is ValueError:
        assert "tensors: every rank iterates to the end" in str(found.value)


def check_early_stops(root: Path) -> None:
    """A rank that stops, or raises, before the end is everybody's error at once; the next stream is whole."""
    worker = Worker(dist.get_rank(), dist.get_world_size(), dist.get_rank(), device_type())
    worker.build(None, open_checkpoint(root / "bert"))
    worker.load()
    wanted, last = load_file(root / "bert/model.safetensors"), dist.get_world_size() - 1

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return current_worker().weights(ranks=[0, last], bucket_bytes=2000)

    def breaks() -> None:
        for number, _ in enumerate(weights()):
            if number == 2 and dist.get_rank() == last:
                break

    def never_begins() -> None:
        pairs = weights()
        if dist.get_rank() != last:
            list(pairs)

    def fails() -> None:
        for number, _ in enumerate(weights()):
            if number == 2 and dist.get_rank() == last:
                raise LookupError("no such layer in this engine")

    kept: list[Iterator[Any]] = []

    def fails_elsewhere() -> None:
        pairs = weights()
        kept.append(pairs)
        next(pairs, None)
        if dist.get_rank() == last:
            raise LookupError("no such layer in this engine")
        list(pairs)

    def stop_all() -> None:
        next(weights(), None)

    errors = (ValueError, ValueError, LookupError, LookupError)
    for run, error in zip((breaks, never_begins, fails, fails_elsewhere), errors, strict=True):
        with stopped(error, last):
            worker.call(run)
        whole = worker.call(lambda: {name: tensor.cpu() for name, tensor in weights()})
        assert not differences(whole, wanted, dist.get_rank() in (0, last))
    if dist.get_rank() == last:
        with pytest.raises(ValueError, match="has ended with the call that it was made in"):
            list(kept[0])
    if dist.get_world_size() == 2:
        with pytest.raises(ValueError, match=r"stopped after \d+ of \d+ tensors"):
            worker.call(stop_all)


def check_a_rank_that_never_comes(root: Path) -> None:
    """A deadline ends the wait for a rank that does not call it; the last check of a group."""
    module = loaded(root / "bert")
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match=r"other ranks did not take part within .* s: call it on every rank"):
            list(WeightStream(module, timeout_s=0.5))
