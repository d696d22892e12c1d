"""`run_ranks`: run one function on W real processes that share a gloo group, and give back what each rank returned."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imports of torch and transformers take a rank 3 to 10 s of a core. Ranks are forked from a process that has done
# nothing but these imports: no thread, no group, no tensor, and so nothing that a fork would spoil.
# What is not installed here is passed over.
PRELOADED = [
    "raysharding.distributed",
    "raysharding.models",
    "tests.spawn",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "tests.frozen",
]

OUTSIDERS = "RAYSHARDING_TEST_OUTSIDERS"
"""Variable that makes the ranks of a test a part of a larger world: see `see_group`."""
PEER_GRACE_S = 3.0
"""How long the other ranks may go on after one failed: long enough to report an error that they share."""


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not finish. The message carries every rank's traceback."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    fresh: bool = False,
    device: str = "cpu",
    gloo: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` new processes inside one process group; return the results by rank.

    `fn` must be a module-level function and, like `args` and the results, picklable. Inside it `torch.distributed` is
    initialised (ask it for rank and world size) and torch uses one thread. No process outlives the call.

    Args:
        world_size: Number of processes.
        fn: Runs on every rank.
        args: Given to every rank alike.
        timeout_s: Deadline for all ranks together, process start included; also the gloo group's own timeout.
        fresh: Start new interpreters, slower by seconds, for what is fixed when a process starts (malloc's settings),
            or where memory is measured.
        device: `cpu`; `cuda` for ranks on GPUs, which they share where there are fewer; or `sim` for ranks on simulated
            devices, see `tests.accelerator`.
        gloo: False for the device's own backend alone, without gloo for tensors in host memory.

    Raises:
        RanksFailedError: A rank raised, died or missed the deadline; names each, with traceback or stacks.
    """
    context: multiprocessing.context.BaseContext = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(PRELOADED)
    environment = dict(os.environ)
    outsiders = int(environment.get(OUTSIDERS, "0")) if world_size and device == "cpu" else 0
    with tempfile.TemporaryDirectory(prefix="raysharding-ranks-") as folder:
        processes = [
            context.Process(  # type: ignore[attr-defined]  # typeshed gives it to the contexts themselves
                target=_rank_main,
                args=(rank, world_size + outsiders, folder, timeout_s, environment, (device, gloo), fn, args),
                daemon=True,
            )
            for rank in range(world_size + outsiders)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                _stop(process)
        return _collect(processes, folder)[outsiders:]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    environment: Mapping[str, str],
    device: tuple[str, bool],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the group, run `fn`, and leave the outcome in `folder/rank-R`."""
    # A forked rank has the environment of when the first rank was forked.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    # On SIGUSR1 (sent at the deadline) the stacks of all threads go into a file, so that a hang says where it is.
    stacks = Path(folder, f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        store = FileStore(str(Path(folder, "store")), world_size)
        deadline = timedelta(seconds=timeout_s)
        backend, device_id = _use(*device, rank)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=deadline, device_id=device_id
        )
        outsiders = int(os.environ.get(OUTSIDERS, "0")) if device[0] == "cpu" else 0
        if outsiders:
            global _group
            _group = dist.new_group(range(outsiders, world_size))
            see_group() if rank >= outsiders else None
        result = (True, fn(*args) if rank >= outsiders else None)
        # Without this a rank that is done early would close sockets that its peers still use. Not on the device, which
        # may be dead.
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(world_size)])
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    _write_result(folder, rank, result)
    # Skips interpreter teardown: a failed group's threads may block it, and the result is already on disk.
    os._exit(0 if result[0] else 1)


class _GroupDist:
    """`torch.distributed` for the code of tests, whose ranks are those of a group."""

    def __init__(self, group: Any) -> None:
        object.__setattr__(self, "_group", group)

    def __setattr__(self, name: str, value: Any) -> None:
        """What a test puts in place of a function is in place of it for all code."""
        import torch.distributed as dist

        setattr(dist, name, getattr(value, "of_all", value))

    def __getattr__(self, name: str) -> Any:
        import torch.distributed as dist

        found = getattr(dist, name)
        if name not in _OF_GROUP:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            for rooted in ("src", "dst"):
                if rooted in kwargs:
                    kwargs[f"group_{rooted}"] = kwargs.pop(rooted)
            bound = inspect.signature(found).bind_partial(*args, **kwargs)
            for rooted in ("src", "dst"):
                if bound.arguments.get(rooted) is not None:
                    bound.arguments[rooted] = dist.get_global_rank(self._group, bound.arguments[rooted])
            if bound.arguments.get("group") is None:
                bound.arguments["group"] = self._group
            return found(*bound.args, **bound.kwargs)

        call.of_all = found  # type: ignore[attr-defined]
        return call


_OF_GROUP = {
    *("get_rank", "get_world_size", "barrier", "monitored_barrier", "all_reduce", "broadcast", "broadcast_object_list"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object", "reduce_scatter_tensor"),
    *("send", "recv"),
}


def _takes_process_group(value: Any) -> bool:
    owners = ("torch.distributed.checkpoint", "raysharding.distributed.saving")
    is_one = inspect.isfunction(value) and (value.__module__ or "").startswith(owners)
    return is_one and "process_group" in inspect.signature(value).parameters


@functools.cache
def _make_oracles_of(group: Any) -> None:
    """Give FSDP1, with which tests compare, a group in place of its default."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    init = FullyShardedDataParallel.__init__

    def init_of_group(self: Any, module: Any, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if process_group is None and kwargs.get("device_mesh") is None:
            process_group = group
        init(self, module, process_group, *args, **kwargs)

    setattr(FullyShardedDataParallel, "__init__", init_of_group)  # noqa: B010


def _device_mesh_of(group: Any, device_type: str, shape: Sequence[int], *, mesh_dim_names: Any = None) -> Any:
    """`init_device_mesh` over the ranks of a group."""
    from torch.distributed.device_mesh import DeviceMesh

    from raysharding import Sharding
    from raysharding.distributed.comm import init_mesh

    mesh = init_mesh(device_type, Sharding(replicate_size=shape[0] if len(shape) == 2 else 1), group)
    assert mesh.mesh.shape == tuple(shape)
    if mesh_dim_names in (None, mesh.mesh_dim_names):
        return mesh
    groups = mesh.get_all_groups() if mesh.ndim > 1 else group
    return DeviceMesh.from_group(groups, device_type, mesh.mesh, mesh_dim_names=mesh_dim_names)


_group: Any = None


def part_of_ranks() -> Any:
    """The group of the test's ranks, where they are a part of a larger world, else `None`."""
    return _group


def see_group() -> None:
    """Let the code of tests, and nothing else, take this rank's group for all ranks, where it is a part of them.

    Modules of tests see `torch.distributed` of the group, and an `init_mesh` without a group makes a mesh of it. What
    they call must find the group by the mesh of a module. Call it again after an import of tests.
    """
    if _group is None:
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from raysharding.distributed import comm, fsdp2_prepare_model, load_state_dict

    _make_oracles_of(_group)
    own, takes_group = _GroupDist(_group), [comm.init_mesh, comm.agree, comm.agreeing, comm.from_rank_0, comm.any_rank]
    takes_group += [
        load_state_dict,
        comm.rank_name,
        comm.all_gather_json,
        comm.all_gather_ints,
        comm.broadcast_json,
        comm.metadata_device,
    ]
    for name, module in list(sys.modules.items()):
        is_test = name.startswith("tests.") and module is not sys.modules[__name__]
        for attribute, value in list(vars(module).items()) if is_test else []:
            if value is init_device_mesh:
                setattr(module, attribute, functools.partial(_device_mesh_of, _group))
            elif _takes_process_group(value):
                setattr(module, attribute, functools.partial(value, process_group=_group))
            elif value is dist:
                setattr(module, attribute, own)
            elif value is fsdp2_prepare_model:
                setattr(module, attribute, comm.using_group(_group)(value))
            elif any(value is one for one in takes_group):
                setattr(module, attribute, functools.partial(value, group=_group))


_device = "cpu"


def device_type() -> str:
    """The type of this rank's device, as `run_ranks` was told."""
    return _device


def _use(device: str, gloo: bool, rank: int) -> tuple[str, Any]:
    """Make a rank's device its current one; returns backend and `device_id` of the process group."""
    global _device
    _device = device
    if device == "cpu":
        return "gloo", None
    import torch
    import torch.distributed as dist

    if device == "sim":
        from tests.accelerator.device import register

        register()
    from raysharding.distributed.comm import share_device

    module = torch.get_device_module(device)
    used = torch.device(device, rank % module.device_count())
    share_device(used)
    module.set_device(used)
    backend = dist.Backend.default_device_backend_map[device]
    return f"cpu:gloo,{device}:{backend}" if gloo else backend, used


def _write_result(folder: str, rank: int, result: tuple[bool, Any]) -> None:
    try:
        data = pickle.dumps(result)
    except Exception:
        data = pickle.dumps((False, f"the result does not pickle:\n{traceback.format_exc()}"))
    partial = Path(folder, f"partial-{rank}")
    partial.write_bytes(data)
    partial.rename(Path(folder, f"rank-{rank}"))


def _wait(processes: Sequence[BaseProcess], folder: str, deadline: float) -> None:
    """Wait for all ranks; after a failure only `PEER_GRACE_S` more. At the deadline ask the late ones for stacks."""
    pending: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while pending and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(pending), timeout=left):
            process = pending.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
    for process in pending.values():
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    if pending:
        time.sleep(0.2)


def _stop(process: BaseProcess) -> None:
    if process.pid is not None:
        if process.is_alive():
            process.kill()
        process.join()


def _collect(processes: Sequence[BaseProcess], folder: str) -> list[Any]:
    results: list[Any] = []
    failures: list[str] = []
    for rank, process in enumerate(processes):
        path = Path(folder, f"rank-{rank}")
        if path.exists():
            ok, value = pickle.loads(path.read_bytes())
            results.append(value)
            if not ok:
                failures.append(f"rank {rank} raised:\n{value}")
            continue
        stacks = Path(folder, f"stacks-{rank}")
        where = stacks.read_text() if stacks.exists() else ""
        how = f"did not finish; its stacks:\n{where}" if where else f"ended with exit code {process.exitcode}"
        failures.append(f"rank {rank} {how}")
    if failures:
        raise RanksFailedError("\n".join(failures))
    return results
