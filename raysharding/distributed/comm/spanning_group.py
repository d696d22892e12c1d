"""`SpanningGroup`: a gloo group over the ranks of two groups, beside the default process group of each.

`torch.distributed.new_group` makes groups of ranks of one default group. The ranks of two groups have two, whose rank
numbers overlap: the backend is therefore made directly, over the store of one of the groups, as the constructors of
torch's process groups make it.

Note [Ending a wait]: a rank that fails must not leave the others waiting. gloo's `abort` ends no wait (torch 2.13, see
Note [Shutting down]); `stop` shuts down the sockets of the group, and every rank that waits for this one fails within
milliseconds, and stops in turn. A rank that dies does the same, by its death.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from raysharding.distributed.comm.abort import between, closed_listeners, connections, shut_down
from raysharding.distributed.comm.device import device_module, is_accelerator
from raysharding.distributed.comm.json_collectives import let_gloo_end
from raysharding.distributed.comm.rendezvous import StoreAddress, check_reachable, connect_store, listen_as_gloo
from raysharding.distributed.comm.waiting import wait_for, wait_for_event, waits_for_ranks
from raysharding.errors import RendezvousError

T = TypeVar("T")

_POLL_S = 0.5
"""Longest time in seconds until a rank that waits in the store sees `stop`."""
_STORE_S = 15.0
"""Longest time to reach the store, in seconds."""
_MEET_S, _MEET_RANK_S = 5.0, 0.1
"""Longest time in seconds for ranks that are all there to connect, and for each rank: one may die in this moment."""
_PAUSE_S = 1e-3
"""Pause between two checks whether they have connected, in seconds; it takes milliseconds."""
_TRY_S = 3.0
"""Longest time in seconds of one try to reach the store."""
_TAG = 0


class PeerLostError(RuntimeError):
    """A rank of the spanning group is gone, has stopped, or did not answer in time."""


class SpanningGroup:
    """A process group over all ranks of two groups. Collective methods are called by all of them, in the same order.

    Args:
        address: Store of the source, the first of the two groups.
        name: Name of this group in the store, which no other group has had.
        rank: Rank in this group.
        sizes: Ranks of the source, which come first here, and of the target.
    """

    def __init__(self, address: StoreAddress, name: str, rank: int, sizes: tuple[int, int]) -> None:
        self.rank = rank
        self.sizes = sizes
        self.world_size = sum(sizes)
        self.until = 0.0
        """Time (`time.monotonic`) at which waits end; the caller sets it for each operation."""
        self._address = address
        self._name = name
        self._num_exchanges = 0
        self._stopped = threading.Event()
        self._sockets: list[Any] = []
        self._store: Any = None
        self._gloo: Any = None
        self._device_backend: Any = None

    def join(self, node_ip: str) -> None:
        """Connect to all other ranks; collective.

        Args:
            node_ip: Address of this node.

        Raises:
            PeerLostError: A rank did not arrive before `until`.
            RendezvousError: The store cannot be reached, or nodes cannot connect to each other.
        """
        self._store = PrefixStore(f"{self._address.prefix}/{self._name}", self._connect(node_ip))
        with listen_as_gloo(self.rank, node_ip) as listener:
            addresses = [(host, port) for host, port in self.exchange(listener.getsockname()[:2])]
            check_reachable(self.exchange, self.rank, addresses, min(_STORE_S, self.left_s))
        before = set(connections())
        let_gloo_end()
        with closed_listeners():
            self._gloo = self._meet()
        made = [one for one in connections() if one not in before]
        every = [[((a, b), (c, d)) for (a, b), (c, d) in some] for some in self.exchange(made)]
        self._sockets = between(dict(enumerate(every)))[self.rank]

    @waits_for_ranks
    def _meet(self) -> Any:
        """Return gloo's group, made on a thread that is left alone after `stop` or the deadline.

        gloo waits five times its timeout for a rank that died after it had given its address, and nothing ends that.
        """
        store, made = PrefixStore("gloo", self._store), Future[Any]()
        limit_s = min(_MEET_S + self.world_size * _MEET_RANK_S, self.left_s)

        def make() -> None:
            try:
                made.set_result(ProcessGroupGloo(store, self.rank, self.world_size, timedelta(seconds=limit_s)))
            except Exception as error:  # noqa: BLE001 - raised below
                made.set_exception(error)

        threading.Thread(target=make, name="raysharding-meet", daemon=True).start()
        until = time.monotonic() + limit_s
        while not made.done() and not self._stopped.is_set():
            if time.monotonic() >= until:
                raise PeerLostError("did not answer in time")
            time.sleep(_PAUSE_S)
        return self._attempt(made.result)

    def _connect(self, node_ip: str) -> Store:
        """Connect to the store, which listens already: in tries that are short, because `stop` ends none of them."""
        last = time.monotonic() + min(_STORE_S, self.left_s) - _TRY_S
        while True:
            try:
                return connect_store(self._address, self.rank, node_ip, min(_TRY_S, self.left_s))
            except RendezvousError:
                if self._stopped.is_set() or time.monotonic() >= last:
                    raise

    def add_device(self, device: torch.device) -> None:
        """Send tensors of an accelerator through its own backend from now on; collective.

        Run on the simulated device, and with NCCL 2.30 between ranks that shared one GPU.
        """
        store = PrefixStore(f"{device.type}/{self._num_exchanges}", self._store)
        name = dist.Backend.default_device_backend_map[device.type]
        # As `new_group` does it: NCCL is torch's own, others have registered a function.
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is not None:
            make = partial(plugin.creator_fn, store, self.rank, self.world_size, self._timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            make = partial(dist.ProcessGroupNCCL, store, self.rank, self.world_size, options)
        self._device_backend = self._attempt(make)
        # Every rank calls this: NCCL leaves undefined what happens if the first operation is a message.
        self.wait(self._attempt(lambda: self._device_backend.allreduce([torch.zeros(1, device=device)])))
        self.wait_for_device(device)

    def name_of(self, rank: int) -> str:
        """Return a rank's name in its own group, for errors."""
        num_sources = self.sizes[0]
        return f"rank {rank} of the source" if rank < num_sources else f"rank {rank - num_sources} of the target"

    @property
    def left_s(self) -> float:
        """Seconds until `until`, at least a millisecond: to torch, 0 means no deadline."""
        return max(1e-3, self.until - time.monotonic())

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.left_s)

    def exchange(self, value: Any) -> list[Any]:
        """Exchange JSON values through the store; collective. Returns the values of all ranks, by rank.

        For the values of a first meeting: they are large, and few. `stop` ends the wait within half a second.
        """
        self._num_exchanges += 1
        keys = [f"{self._num_exchanges}/{rank}" for rank in range(self.world_size)]
        self._attempt(lambda: self._store.set(keys[self.rank], json.dumps(value)))
        # Every rank sets its key before it waits: none waits for a rank that waits for it.
        self._wait_for_keys(keys)
        return [json.loads(found) for found in self._attempt(lambda: self._store.multi_get(keys))]

    @waits_for_ranks
    def _wait_for_keys(self, keys: list[str]) -> None:
        while not self._attempt(lambda: self._store.check(keys)):
            if time.monotonic() >= self.until:
                missing = [self.name_of(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                raise PeerLostError(f"{', '.join(missing)} did not come")
            try:
                self._store.wait(keys, timedelta(seconds=min(_POLL_S, self.left_s)))
            except dist.DistStoreError:
                continue  # not there yet
            except dist.DistNetworkError as error:
                raise PeerLostError("rank 0 of the source, which serves the store, is gone") from error

    def maxima(self, *values: int) -> list[int]:
        """Return the largest of each value over the ranks; collective, the same on every rank that returns."""
        found = torch.tensor(values)
        try:
            # Every rank calls this at the same points, failed or not; one that cannot has stopped, which ends the wait.
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MAX), self._timeout
            self.wait(self._attempt(lambda: self._gloo.allreduce([found], options)))
        except PeerLostError as error:
            raise PeerLostError(f"a rank of either group {error}") from error
        maxima: list[int] = found.tolist()
        return maxima

    def send(self, data: torch.Tensor, rank: int) -> dist.Work:
        """Start to send uint8 data, on the CPU or on the device of `add_device`, to a rank."""
        work: dist.Work = self._attempt(lambda: self._backend(data).send([data], rank, _TAG))
        return work

    def receive(self, memory: torch.Tensor, rank: int) -> dist.Work:
        """Start to receive into uint8 memory; messages of a rank arrive in the order in which it sent them."""
        work: dist.Work = self._attempt(lambda: self._backend(memory).recv([memory], rank, _TAG))
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a message; on an accelerator, let the current stream wait for it.

        Raises:
            PeerLostError: A rank is gone, or `until` has passed.
        """
        self._attempt(lambda: wait_for(work, self._timeout))

    def wait_for_device(self, device: torch.device) -> None:
        """Wait on the host for all messages and copies queued on an accelerator; nothing on the CPU.

        Raises:
            PeerLostError: `until` has passed.
        """
        if not is_accelerator(device):
            return
        event = torch.Event(device.type)
        event.record(device_module(device).current_stream(device))
        try:
            wait_for_event(event, self.left_s)
        except TimeoutError as error:
            raise PeerLostError("a rank of either group did not answer in time") from error

    def _backend(self, data: torch.Tensor) -> Any:
        return self._device_backend if is_accelerator(data.device) else self._gloo

    def _attempt(self, operation: Callable[[], T]) -> T:
        if self._stopped.is_set():
            raise PeerLostError("has stopped this copy")
        try:
            return operation()
        except RuntimeError as error:  # torch's errors of backends and stores
            # Not torch's words: a group whose own ranks are all there must not be taken for one that has lost some.
            late = "timed out" in str(error).lower()
            raise PeerLostError("did not answer in time" if late else "is gone, or has stopped") from error

    def stop(self) -> None:
        """End all waits in this group, on this rank and on all that wait for it. From any thread."""
        self._stopped.set()
        shut_down(self._sockets)
        if self._device_backend is not None:
            self._device_backend.abort()

    def close(self) -> None:
        """Stop, and free the backends."""
        self.stop()
        self._gloo = self._device_backend = self._store = None
