"""Rendezvous: rank 0 serves a store on one address, every rank joins the process group through it.

Rank 0 binds its own listening socket and hands it to the store, so no free port is guessed and nothing listens on
other interfaces. Ranks that do not arrive are named. Plain `torch.distributed`, no launcher assumed.

Whether the ranks' nodes can connect to each other, found out before a process group is made.

gloo and NCCL connect every pair of ranks on ports that the kernel gives them. Where a firewall drops packets they wait
for the time-out of collectives, and name ports. Here each rank listens as they will, and connects to each other node
once: a few ms where all is well, one error that names the nodes where it is not.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, not re-exported
    PrefixStore,
    Store,
    TCPStore,
)

from raysharding.distributed.comm.abort import nobody_connects_later
from raysharding.errors import RendezvousError

_BACKLOG = 2048
_LONGEST_S = 10.0
"""Four tries of TCP: more would not find a node that these did not."""

Address = tuple[str, int]


def listen(host: str, port_range: tuple[int, int] | None = None, *, rank: int | None = None) -> socket.socket:
    """Listen on one address of this machine. Nobody has to accept connections.

    Args:
        host: The address.
        port_range: First and last port to try, in order. Default: the kernel chooses a free one.
        rank: Who listens, for errors. Default: the driver.

    Raises:
        RendezvousError: `host` is not an address of this machine, or every port of the range is taken.
    """
    who, missing = ("the driver", ()) if rank is None else (f"rank {rank}", (rank,))
    first, last = port_range or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        # A port is free although connections that were accepted on it are open, or linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port_range is not None)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if port_range is None or error.errno != errno.EADDRINUSE:
                message = f"{who} cannot listen on {host}: {error}; is it an address of this node?"
                raise RendezvousError(message, missing_ranks=missing) from error
    cure = "give Placement.port_range more ports, or end what listens on these"
    message = f"{who} cannot listen on {host}: every port from {first} to {last} is taken; {cure}"
    raise RendezvousError(message, missing_ranks=missing)


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


_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where rank 0's store listens, and the prefix under which this group keeps its keys."""

    host: str
    """Address of the one interface it listens on."""
    port: int
    """Port that it listens on."""
    prefix: str
    """Random, so that two groups that meet at one address by mistake never read each other's keys."""


def serve_store(
    host: str, *, timeout_s: float, port_range: tuple[int, int] | None = None
) -> tuple[TCPStore, StoreAddress]:
    """Start the group's store. Only rank 0 calls this, and keeps the store as long as the group lives.

    Args:
        host: Address of this node, of the interface that the other ranks can reach.
        timeout_s: Longest wait of one store operation.
        port_range: See `listen`.

    Returns:
        The store, and the address to give to every rank.

    Raises:
        RendezvousError: `host` is not an address of this machine, or every port of the range is taken.
    """
    listener = listen(host, port_range, rank=0)
    port = int(listener.getsockname()[1])
    # detach() gives the descriptor away: a socket object that still owned it would close the store when collected.
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, StoreAddress(host, port, secrets.token_hex(8))


def join_process_group(
    address: StoreAddress,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    node_ip: str,
    rendezvous_s: float,
    timeout_s: float,
    server: TCPStore | None = None,
) -> None:
    """Meet the other ranks and initialise the default process group. Every rank calls this.

    CUDA ranks get NCCL, with gloo beside it for what travels in host memory; CPU ranks get gloo.

    Args:
        address: From `serve_store` on rank 0.
        rank: This rank.
        world_size: Number of ranks.
        device: This rank's device, with its index for CUDA.
        node_ip: This node's address; its interface carries gloo's and NCCL's traffic unless the user chose one.
        rendezvous_s: How long to wait for the other ranks.
        timeout_s: Time-out of every later collective.
        server: Rank 0's store.

    Raises:
        RendezvousError: Some ranks did not arrive in time (named), rank 0's store cannot be reached, or nodes cannot
            connect to each other.
    """
    until = time.monotonic() + rendezvous_s
    choose_interface(node_ip)
    base = server if server is not None else _connect(address, rank, node_ip, rendezvous_s)
    store = PrefixStore(address.prefix, base)
    store.set_timeout(timedelta(seconds=rendezvous_s))
    with _listen_as_gloo(rank, node_ip) as listener:
        addresses = _await_ranks(store, address, rank, world_size, listener.getsockname(), rendezvous_s)
        check_reachable(store, rank, addresses, max(1.0, until - time.monotonic()))
    is_cuda = device.type == "cuda"
    try:
        with nullcontext() if is_cuda else nobody_connects_later():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if is_cuda else None,
            )
    except RuntimeError as error:  # `DistError`, and what gloo raises on its own
        message = f"rank {rank} met all ranks at {address.host}:{address.port} but cannot connect to them: {error}"
        raise RendezvousError(message) from error


def leave_process_group() -> None:
    """Destroy the default process group of this rank, if there is one. Not a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exists(group: dist.ProcessGroup) -> bool:
    """Return True if nobody has destroyed a process group that this rank was in; no collective."""
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except ValueError:  # there is a default group, but not this one
        return False


def collective_counters(group: dist.ProcessGroup) -> list[Callable[[], int]]:
    """Return what tells how many collectives this rank has begun in a process group, for each backend that counts.

    gloo also counts what is sent and received, NCCL does not.
    """
    # torch has no public way. A group of several backends has no number of its own, but each of them has.
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return [backend._get_sequence_number_for_group for backend in backends if _counts(backend)]


def _counts(backend: Any) -> bool:
    try:
        backend._get_sequence_number_for_group()
    except RuntimeError:  # "does not yet support sequence numbers", as a backend of a vendor's may not
        return False
    return True


def _connect(address: StoreAddress, rank: int, node_ip: str, rendezvous_s: float) -> TCPStore:
    try:
        return TCPStore(
            address.host, address.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=rendezvous_s)
        )
    except dist.DistError as error:
        where = f"{address.host}:{address.port}"
        who = f"rank {rank} on {node_ip}"
        message = f"{who} cannot reach rank 0's store at {where} within {rendezvous_s:g} s: {error}"
        raise RendezvousError(message, missing_ranks=(0,)) from error


def _listen_as_gloo(rank: int, node_ip: str) -> socket.socket:
    """Listen at the address that gloo will use: of the interface that the user chose, else the node's."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return listen((address_of(chosen) or node_ip) if chosen else node_ip, rank=rank)


def _await_ranks(
    store: Store, address: StoreAddress, rank: int, world_size: int, listens_at: tuple[Any, ...], rendezvous_s: float
) -> list[tuple[str, int]]:
    """Wait until every rank has said where it listens, so that init_process_group meets nobody missing."""
    keys = [f"arrived/{other}" for other in range(world_size)]
    where = f"{address.host}:{address.port}"
    try:
        store.set(keys[rank], json.dumps(listens_at[:2]))
        store.wait(keys, timedelta(seconds=rendezvous_s))
        return [(host, port) for host, port in map(json.loads, store.multi_get(keys))]
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(map(str, missing))
        message = f"rank {rank} waited {rendezvous_s:g} s at {where}; ranks that did not arrive: {named}"
        raise RendezvousError(message, missing_ranks=missing) from error
    except dist.DistError as error:
        message = f"rank {rank} lost rank 0's store at {where}: {error}"
        raise RendezvousError(message, missing_ranks=(0,)) from error


def choose_interface(node_ip: str) -> str | None:
    """Make gloo and NCCL use the interface that owns `node_ip`, unless the user chose one by environment variable.

    Without this gloo resolves the host name, which often is 127.0.0.1, and two hosts never meet.

    Returns:
        The interface's name, `None` where no interface owns the address.
    """
    name = interface_of(node_ip)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # NCCL refuses the loopback unless it is named alone, and on one node it needs no socket interface.
        if name != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return name


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface that owns an IPv4 or IPv6 address, or `None`."""
    wanted = ipaddress.ip_address(address.split("%", 1)[0])
    if wanted.version == 6:
        return _interface_of_ipv6(wanted)
    for _, name in socket.if_nameindex():
        if address_of(name) == str(wanted):
            return name
    return None


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface of this machine, or `None`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None  # there is no such interface, or it has no IPv4 address
    return socket.inet_ntoa(reply[20:24])


def _interface_of_ipv6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except FileNotFoundError:
        return None  # a kernel without IPv6
    return next((row[5] for row in rows if bytes.fromhex(row[0]) == wanted.packed), None)
