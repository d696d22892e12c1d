"""Rendezvous: rank 0 serves a store on one address, and every rank joins the process group through it.

Rank 0 binds the listening socket and passes it to the store: no free port is guessed, and no other interface is used.
Errors name the ranks that did not arrive. Works under any launcher.

gloo and NCCL connect every pair of ranks on ports that the kernel chooses. If a firewall drops packets, they wait for
the timeout of collectives. `check_reachable` therefore tests the connection between each
two nodes before the process group is made: it takes a few ms if all nodes are reachable, and raises one error that
names the nodes if not.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from raysharding.distributed.comm.abort import closed_listeners
from raysharding.distributed.comm.device import backends_of, device_uuid, is_accelerator, nccl_version, why_unshareable
from raysharding.errors import RendezvousError

_BACKLOG = 2048
_LONGEST_S = 10.0
"""Time of four connection attempts of TCP, in seconds; later ones do not succeed where these failed."""

Address = tuple[str, int]


def listen(host: str, port_range: tuple[int, int] | None = None, *, rank: int = 0) -> socket.socket:
    """Listen on one address of this machine. The caller need not accept connections.

    Args:
        host: The address.
        port_range: First and last port to try, in order. Default: the kernel chooses a free port.
        rank: Rank that listens, for error messages.

    Raises:
        RendezvousError: `host` is not an address of this machine, or every port of the range is taken.
    """
    first, last = port_range or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        # Connections that were accepted on a port and are open, or in TIME_WAIT, do not occupy the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port_range is not None)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if port_range is None or error.errno != errno.EADDRINUSE:
                message = f"rank {rank} cannot listen on {host}: {error}; is it an address of this node?"
                raise RendezvousError(message, missing_ranks=(rank,)) from error
    cure = "set Placement.port_range to more ports, or stop the programs that listen on these"
    message = f"rank {rank} cannot listen on {host}: every port from {first} to {last} is taken; {cure}"
    raise RendezvousError(message, missing_ranks=(rank,))


def check_reachable(
    exchange: Callable[[dict[str, str]], Sequence[dict[str, str]]],
    rank: int,
    addresses: Sequence[Address],
    timeout_s: float,
) -> None:
    """Connect to each other node once, and exchange the results; collective.

    Args:
        exchange: Gives the values of all ranks, by rank; collective.
        rank: This rank.
        addresses: (host, port) on which each rank listens, in rank order.
        timeout_s: Longest time to connect is half of it.

    Raises:
        RendezvousError: On every rank, if one node cannot connect to another.
    """
    ports = dict(reversed(addresses))  # host → port of the host's first rank
    others = {host: port for host, port in ports.items() if host != addresses[rank][0]}
    # Each rank says what it found within `_LONGEST_S`, or has died, which the driver notices.
    every = exchange(asyncio.run(_unreachable(others, min(_LONGEST_S, timeout_s / 2))))
    failed = {(addresses[one][0], host): why for one, found in enumerate(every) for host, why in found.items()}
    if not failed:
        return
    # If a firewall isolates one node, every failure has that node at one end.
    ends = Counter(chain.from_iterable(failed))
    blamed = [host for host in ends if ends[host] == max(ends.values())]
    kernel_ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    message = (
        f"nodes of this group cannot connect to each other (suspect: {', '.join(blamed)}); gloo and NCCL listen on TCP "
        f"ports that the kernel chooses, here {' to '.join(kernel_ports)} (net.ipv4.ip_local_port_range): open them "
        "between the nodes, or start Ray with the address of another interface (--node-ip-address)"
    )
    lines = [f"{source} cannot connect to {host}:{ports[host]}: {why}" for (source, host), why in failed.items()]
    missing = [one for one, (host, _) in enumerate(addresses) if host in blamed]
    raise RendezvousError("\n  ".join((message, *lines)), missing_ranks=missing)


def _exchange(store: Store, keys: Sequence[str], rank: int, timeout_s: float, value: Any) -> list[Any]:
    """Set this rank's key to a JSON value, wait for the keys of all ranks, and return their values; collective."""
    store.set(keys[rank], json.dumps(value))
    store.wait(list(keys), timedelta(seconds=timeout_s))
    return [json.loads(found) for found in store.multi_get(list(keys))]


async def _unreachable(targets: Mapping[str, int], timeout_s: float) -> dict[str, str]:
    """Connect to all targets at once. Return unreachable host → reason."""

    async def reason(host: str, port: int) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
        except OSError as error:
            # The TimeoutError of `wait_for` has no number.
            return os.strerror(error.errno) if error.errno else f"no answer within {timeout_s:.0f} s"
        writer.close()
        return ""

    reasons = await asyncio.gather(*starmap(reason, targets.items()))
    return {host: why for host, why in zip(targets, reasons, strict=True) if why}


_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of rank 0's store, and the prefix of this group's keys."""

    host: str
    """Address of the only interface that the store listens on."""
    port: int
    """Port that the store listens on."""
    prefix: str
    """Random, so that two groups that use one address by mistake never read each other's keys."""


def serve_store(
    host: str, *, timeout_s: float, port_range: tuple[int, int] | None = None
) -> tuple[TCPStore, StoreAddress]:
    """Start the store of the group. Only rank 0 calls this, and holds the store for the lifetime of the group.

    Args:
        host: Address of this node on the interface that the other ranks can reach.
        timeout_s: Timeout of one store operation.
        port_range: First and last port to try. Default: the kernel chooses a free port.

    Returns:
        The store, and the address that every rank needs.

    Raises:
        RendezvousError: `host` is not an address of this machine, or every port of the range is taken.
    """
    listener = listen(host, port_range)
    port = int(listener.getsockname()[1])
    # detach() passes on ownership of the descriptor: a socket object would close it when garbage-collected.
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
    """Wait for the other ranks and initialise the default process group; collective.

    Ranks on accelerators get the backend of their device (NCCL on GPUs), and gloo for tensors in host memory; CPU ranks
    get gloo.

    Args:
        address: Result of `serve_store` on rank 0.
        rank: This rank.
        world_size: Number of ranks.
        device: Device of this rank; an accelerator with its index.
        node_ip: Address of this node. gloo and NCCL use its interface unless the user chose another.
        rendezvous_s: Longest wait for the other ranks.
        timeout_s: Timeout of every later collective.
        server: The store, on rank 0.

    Raises:
        RendezvousError: Ranks did not arrive in time (the error names them), the store cannot be reached, or nodes
            cannot connect to each other.
        ValueError: On every rank, if ranks share a device, and the NCCL of one of them cannot.
    """
    until = time.monotonic() + rendezvous_s
    choose_interface(node_ip)
    base = server if server is not None else connect_store(address, rank, node_ip, rendezvous_s)
    store = PrefixStore(address.prefix, base)
    store.set_timeout(timedelta(seconds=rendezvous_s))
    on_accelerator = is_accelerator(device)
    with listen_as_gloo(rank, node_ip) as listener:
        uuid = device_uuid(device) if on_accelerator else None
        value = (*listener.getsockname()[:2], uuid, why_unshareable(nccl_version(device)))
        arrived = _await_ranks(store, address, rank, world_size, value, rendezvous_s)
        # Before the device's backend is made: NCCL would refuse on some ranks, and the others would wait for them.
        _check_shared_devices(arrived)
        addresses = [(host, port) for host, port, *_ in arrived]
        left_s = max(1.0, until - time.monotonic())
        keys = [f"unreachable/{other}" for other in range(world_size)]
        check_reachable(partial(_exchange, store, keys, rank, left_s), rank, addresses, left_s)
    try:
        with nullcontext() if on_accelerator else closed_listeners():
            dist.init_process_group(
                backends_of(device),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if on_accelerator else None,
            )
    except RuntimeError as error:  # `DistError`, and errors of gloo itself
        message = f"rank {rank} met all ranks at {address.host}:{address.port} but cannot connect to them: {error}"
        raise RendezvousError(message) from error


def leave_process_group() -> None:
    """Destroy the default process group of this rank, if there is one. Not collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exists(group: dist.ProcessGroup) -> bool:
    """Return True if a process group of this rank has not been destroyed. Not collective."""
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except ValueError:  # there is a default group, and this group is destroyed
        return False


def collective_counters(group: dist.ProcessGroup) -> list[Callable[[], int]]:
    """Return, for each backend of a group, a function that returns the number of collectives this rank has started.

    Backends without a count are left out. gloo also counts point-to-point messages, NCCL does not.
    """
    # torch has no public API for this. A group with several backends has no count of its own; its backends have.
    counters: list[Callable[[], int]] = []
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        counter = backend._get_sequence_number_for_group
        with suppress(RuntimeError):  # "does not yet support sequence numbers": possible for a third-party backend
            counter()
            counters.append(counter)
    return counters


def connect_store(address: StoreAddress, rank: int, node_ip: str, rendezvous_s: float) -> TCPStore:
    """Connect to the store that another rank serves, on this rank only.

    Raises:
        RendezvousError: The store cannot be reached within `rendezvous_s`.
    """
    try:
        return TCPStore(
            address.host, address.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=rendezvous_s)
        )
    except dist.DistError as error:
        where = f"{address.host}:{address.port}"
        who = f"rank {rank} on {node_ip}"
        cure = "let the nodes of ranks reach rank 0's node, on any port or on those of Placement.port_range"
        message = f"{who} cannot reach rank 0's store at {where} within {rendezvous_s:g} s; {cure}: {error}"
        raise RendezvousError(message, missing_ranks=(0,)) from error


def listen_as_gloo(rank: int, node_ip: str) -> socket.socket:
    """Listen as gloo will: on the address of the interface the user chose, else the node's; on a port of the kernel."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return listen((address_of(chosen) or node_ip) if chosen else node_ip, rank=rank)


def _await_ranks(
    store: Store, address: StoreAddress, rank: int, world_size: int, value: tuple[Any, ...], rendezvous_s: float
) -> list[tuple[Any, ...]]:
    """Wait until every rank has published its address, so that init_process_group waits for no missing rank.

    Returns:
        (host, port, device's identity or `None`, why the rank cannot share it or `None`) of each rank, by rank.
    """
    keys = [f"arrived/{other}" for other in range(world_size)]
    where = f"{address.host}:{address.port}"
    try:
        return [tuple(one) for one in _exchange(store, keys, rank, rendezvous_s, value)]
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(map(str, missing))
        message = f"rank {rank} waited {rendezvous_s:g} s at {where}; ranks that did not arrive: {named}"
        raise RendezvousError(message, missing_ranks=missing) from error
    except dist.DistError as error:
        message = f"rank {rank} lost rank 0's store at {where}: {error}"
        raise RendezvousError(message, missing_ranks=(0,)) from error


def _check_shared_devices(arrived: Sequence[tuple[Any, ...]]) -> None:
    """Raise a ValueError, from the same values on every rank, if ranks share a device that one cannot share."""
    why = next((one[3] for one in arrived if one[3] is not None), None)
    places = [(host, device) for host, _, device, _ in arrived]
    shared = next((one for one in places if one[1] is not None and places.count(one) > 1), None)
    if why is not None and shared is not None:
        sharing = ", ".join(str(rank) for rank, place in enumerate(places) if place == shared)
        raise ValueError(f"ranks {sharing} share one GPU: {why}")


def choose_interface(node_ip: str) -> None:
    """Make gloo and NCCL use the interface that owns `node_ip`, unless the user chose one by environment variable.

    Otherwise gloo resolves the host name, often to 127.0.0.1, and ranks of two hosts cannot connect.
    """
    name = interface_of(node_ip)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # NCCL refuses the loopback interface unless it is the only one named, and needs none on a single node.
        if name != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


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
            return None  # no such interface, or it has no IPv4 address
    return socket.inet_ntoa(reply[20:24])


def _interface_of_ipv6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except FileNotFoundError:
        return None  # a kernel without IPv6
    return next((row[5] for row in rows if bytes.fromhex(row[0]) == wanted.packed), None)
