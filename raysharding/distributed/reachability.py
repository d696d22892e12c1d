"""Whether the ranks' nodes can connect to each other, found out before a process group is made.

gloo and NCCL connect every pair of ranks on ports that the kernel gives them. Where a firewall drops packets they wait
for the time-out of collectives, and name ports. Here each rank listens as they will, and connects to each other node
once: a few ms where all is well, one error that names the nodes where it is not.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from raysharding.errors import RendezvousError

_BACKLOG = 2048
_LONGEST_S = 10.0
"""Four tries of TCP: more would not find a node that these did not."""

Address = tuple[str, int]


def listen(host: str) -> socket.socket:
    """Listen on one address of this machine, at a port that the kernel chooses. Nobody has to accept connections.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def check_reachable(store: Store, rank: int, addresses: Sequence[Address], timeout_s: float) -> None:
    """Connect to each other node once, and compare with what the others found; collective.

    Args:
        store: The ranks' store.
        rank: This rank.
        addresses: Where each rank listens, in rank order.
        timeout_s: Longest time for all of it.

    Raises:
        RendezvousError: On every rank, when some node cannot connect to some other.
    """
    own = addresses[rank][0]
    targets = {host: port for host, port in reversed(addresses) if host != own}  # the first rank of each node
    unreachable = _unreachable(targets, min(_LONGEST_S, timeout_s / 2))
    store.set(f"unreachable/{rank}", json.dumps(unreachable))
    keys = [f"unreachable/{other}" for other in range(len(addresses))]
    # Bounded: each rank writes its key after `_LONGEST_S` at the most, or is gone and the driver sees that.
    store.wait(keys, timedelta(seconds=timeout_s))
    found = {addresses[other][0]: json.loads(said) for other, said in enumerate(store.multi_get(keys))}
    if any(found.values()):
        raise _error(found, addresses)


def _unreachable(targets: Mapping[str, int], timeout_s: float) -> dict[str, str]:
    """Connect to all at once. Returns host → why not."""
    until = time.monotonic() + timeout_s
    failed: dict[str, str] = {}
    with selectors.DefaultSelector() as waiting:
        for host, port in targets.items():
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            probe.setblocking(False)
            try:
                probe.connect((host, port))
            except BlockingIOError:
                pass
            except OSError as error:  # no route
                failed[host] = error.strerror or str(error)
                probe.close()
                continue
            waiting.register(probe, selectors.EVENT_WRITE, host)
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(until - time.monotonic()):
                code = _close(waiting, key.fileobj)
                if code:
                    failed[key.data] = os.strerror(code)
        for key in list(waiting.get_map().values()):
            failed[key.data] = f"no answer within {timeout_s:.0f} s"
            _close(waiting, key.fileobj)
    return failed


def _close(waiting: selectors.BaseSelector, probe: Any) -> int:
    """Return the errno of a connection that has come about, or not; 0 if it has."""
    waiting.unregister(probe)
    with probe:
        return int(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _error(found: Mapping[str, Mapping[str, str]], addresses: Sequence[Address]) -> RendezvousError:
    lines = []
    ends: Counter[str] = Counter()
    for source, failed in found.items():
        for target, why in failed.items():
            lines.append(f"{source} cannot connect to {target}: {why}")
            ends.update((source, target))
    # Of a firewall round one node, every failure has that node at one end.
    most = max(ends.values())
    blamed = [host for host in ends if ends[host] == most]
    missing = [rank for rank, (host, _) in enumerate(addresses) if host in blamed]
    message = (
        f"nodes of this group cannot connect to each other (suspect: {', '.join(blamed)}); ranks need every TCP port "
        "between nodes: open the firewall, or start Ray with the address of another interface (--node-ip-address)"
    )
    return RendezvousError("\n  ".join((message, *lines)), missing_ranks=missing)
