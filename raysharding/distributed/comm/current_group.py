"""The current process group: the ranks that take part in what this thread does, and their numbers.

Note [Current group]: a module is sharded over the ranks of its mesh, which may be a part of all processes. A function
that takes a module makes the group of the module's mesh current while it runs (`fully_shard.over_ranks_of`). The
collectives of this library, `get_rank` and `get_world_size` go by the current group, and "rank 0" is its first rank.
torch knows nothing of it: user code that runs inside, such as a forward, sees the default group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_thread = threading.local()


def current_group() -> dist.ProcessGroup | None:
    """Return the current group of this thread; `None` for torch's default group, which has all ranks."""
    group: dist.ProcessGroup | None = getattr(_thread, "group", None)
    return group


@contextmanager
def using_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make a process group the current one of this thread inside the context.

    Functions that take a module use the group of its mesh. Where nothing is sharded, as with a plain `DistModule`, they
    use the current group.

    Args:
        group: The ranks that make the calls inside; `None` for torch's default group, which has all.

    Raises:
        ValueError: This process is not in the group.
    """
    require_member(group)
    before = current_group()
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = before


def require_member(group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if this process is not in a group: its collectives would wait for nobody, or hang."""
    if group is not None and dist.get_rank(group) < 0:  # torch gives no group to a rank that is not in it, but -100
        raise ValueError(
            f"global rank {dist.get_rank()} is not in the process group: make this call on the ranks of its mesh alone"
        )


def require_group(group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if a process group, where one is given, has other ranks than the current one."""
    if group is not None and global_ranks(group) != global_ranks():
        raise ValueError(
            f"the process group has the ranks {global_ranks(group)}, and the model's mesh {global_ranks()}: give that "
            "of the mesh, or None"
        )


def get_rank() -> int:
    """Return the number of this process in the current group."""
    return dist.get_rank(current_group())


def get_world_size() -> int:
    """Return the number of ranks of the current group."""
    return dist.get_world_size(current_group())


def global_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group, in the order of its own numbers. Default: the current group."""
    group = current_group() if group is None else group
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def rank_name(rank: int, group: dist.ProcessGroup | None = None) -> str:
    """Return the number of a rank of a group, for people: with the global one, where it is another."""
    other = global_ranks(group)[rank]
    return f"{rank}" if rank == other else f"{rank} (global rank {other})"
