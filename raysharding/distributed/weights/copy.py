"""`WeightCopy`: one rank's part in copies of the weights of one group into another.

Note [A failed copy]: a rank that fails stops the spanning group, and every rank of both groups leaves its waits. Then
each group agrees in its own process group, which no copy touches. The source has changed nothing, and later calls are
right: its ranks return that the other group was lost, or all raise what one of them raised. The target raises on all
ranks alike: with its earlier weights, if no rank had written, or if the copy was staged; else its weights are mixed,
and the group is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raysharding.distributed.comm import (
    PeerLostError,
    SpanningGroup,
    StoreAddress,
    agree,
    any_rank,
    device_uuid,
    is_accelerator,
    passes_shared_device,
)
from raysharding.distributed.fully_shard import mark_recovery, message_device, reshard
from raysharding.distributed.loading import Progress
from raysharding.distributed.saving import model_contents
from raysharding.distributed.transfer import MemoryPeak, host_identity
from raysharding.distributed.weights.copy_plan import Bucket, CopyPlan, Pair, bucket_bytes, plan_copy
from raysharding.distributed.weights.links import NUM_SLOTS, Link, connect_links
from raysharding.distributed.weights.model_layout import ModelLayout, differences
from raysharding.distributed.weights.plan_shards import PlanShards, base_tensors
from raysharding.errors import PlanError, RayshardingError, said
from raysharding.models import adapter_scale


@dataclass(frozen=True, slots=True)
class CopySpec:
    """One copy of weights from one group to another, as sent to a rank."""

    token: str
    """Identifies a pair of groups, whose connections and plan the ranks keep."""
    number: int
    """Number of this copy between the pair."""
    driver: str
    """Identifies the process that asks for the copy."""
    pair: str
    """Identifies source, target, and if adapters are merged: all that the tokens of several drivers have in common."""
    is_source: bool
    """True on the ranks of the group that the weights come from."""
    address: StoreAddress
    """Store of the source, where the ranks of both groups meet the first time."""
    num_sources: int
    """Ranks of the source."""
    num_targets: int
    """Ranks of the target."""
    rendezvous_s: float
    """Longest time of the first meeting, in seconds."""
    limit_s: float
    """Longest time of the whole copy, in seconds: shorter than the driver's deadline, so that a rank whose peers hang
    gives up before the driver gives up the rank."""
    bucket_bytes: int
    """Bytes that a rank sends, or receives, in one round."""
    merge: bool = False
    """True to merge LoRA adapters of the source into the weights."""
    staged: bool = False
    """True if the target receives beside its own weights."""
    kept: tuple[str, ...] = ()
    """Tokens of all pairs that the driver knows; the ranks forget its others, whose other group is gone."""

    @property
    def key(self) -> str:
        """Identity of this copy."""
        return f"{self.token}/{self.number}"


class WeightCopy:
    """Connections and plan of one pair of groups on one rank, for any number of copies, until one fails.

    Args:
        spec: The first copy.
        rank: Rank in the own group.
        node_ip: Address of this node.
    """

    def __init__(self, spec: CopySpec, rank: int, node_ip: str) -> None:
        self.spec = spec
        """The first copy."""
        self._is_source = spec.is_source
        self._rank = rank
        self._node_ip = node_ip
        number = rank if spec.is_source else spec.num_sources + rank
        self._is_through_device = False
        self._span = SpanningGroup(spec.address, f"copy/{spec.key}", number, (spec.num_sources, spec.num_targets))
        self._is_joined = False
        self._own_layout: dict[str, Any] | None = None
        self._layout = ModelLayout({}, {})
        self._plan = CopyPlan((), (), {}, 0)
        self._links: dict[Pair, Link] = {}
        self._shards: PlanShards | None = None
        self._has_written = False
        self._is_planned = False
        self._version = 0
        self.is_stopped = False
        """True if a copy failed: the next one between the groups needs new connections."""
        self.running = ""
        """Identity of the copy that runs, or ran last."""

    def stop(self) -> None:
        """End the copy that runs, on this rank and on all that wait for it. From any thread."""
        self.is_stopped = True
        self._span.stop()
        for link in list(self._links.values()):
            link.stop()

    def close(self) -> None:
        """Stop, and free connections and buffers."""
        self.stop()
        self._links = {}
        self._span.close()

    def run(self, module: nn.Module, spec: CopySpec, progress: Progress, version: int = 0) -> dict[str, Any]:
        """Copy once; collective over the ranks of both groups.

        Args:
            module: The module of this rank's group.
            spec: The copy.
            progress: Called as by `load_checkpoint`.
            version: Version of the weights of this rank's group.

        Returns:
            Figures of this rank, `weights_version` of the source, and `lost`: on the source why the target may not
            have the weights; `None` if it has.

        Raises:
            PlanError: On all ranks of both groups: the modules do not fit together. Nothing has changed.
            RendezvousError: On all ranks of a group: the groups cannot connect. Nothing has changed.
            RuntimeError: On all ranks of a group: the copy failed; see the note.
        """
        begun, peak = time.monotonic(), MemoryPeak(message_device(module))
        self._has_written = self._is_planned = False
        self._span.until, self._version = begun + spec.limit_s, version
        error = self._attempt(lambda: self._prepare(module, spec))
        plan_s = time.monotonic() - begun
        if self._is_source and spec.merge:
            error = self._gather_adapters(module, error)
        error = error or self._attempt(lambda: self._stream(module, progress, peak))
        lost = self._agree_in_source(error) if self._is_source else self._agree_in_target(error)
        self._shards = None  # staged weights, adapters
        return {
            "is_planned": self._is_planned,
            "plan_s": plan_s,
            "seconds": time.monotonic() - begun,
            "host_bytes": peak.host_bytes,
            "shared_bytes": sum(link.num_bytes for link in self._links.values() if link.is_shared),
            "wire_bytes": sum(link.num_bytes for link in self._links.values() if not link.is_shared),
            "is_through_device": self._is_through_device,
            "num_tensors": len(self._plan.names),
            "num_bytes": self._plan.num_bytes,
            "weights_version": self._version,
            "lost": lost,
        }

    def _attempt(self, part: Callable[[], None]) -> Exception | None:
        """Run a part of the copy; after an error stop the ranks that wait for this one, and return the error.

        Each kind of error is handled once the own group has agreed.
        """
        try:
            part()
        except Exception as error:  # noqa: BLE001 - see above
            self.stop()
            return error
        return None

    def _prepare(self, module: nn.Module, spec: CopySpec) -> None:
        """Connect and plan, unless that is done and still right. Collective over both groups.

        Raises:
            PlanError: The modules do not fit together.
        """
        reshard(module)
        if not self._is_joined:
            until = self._span.until
            self._span.until = min(until, time.monotonic() + spec.rendezvous_s)
            self._span.join(self._node_ip)
            self._is_joined, self._span.until = True, until
        described, tensors = self._describe(module, spec)
        # Every rank of both groups calls this first: none sends before all are in the call.
        version = self._version if self._is_source else 0
        is_planned, self._version = self._span.maxima(described != self._own_layout, version)
        self._is_planned = bool(is_planned)
        if self._is_planned:
            self._plan_anew(module, spec, described)
        staged = spec.staged and not self._is_source
        self._shards = PlanShards(self._plan, self._layout, tensors, staged=staged)

    def _plan_anew(self, module: nn.Module, spec: CopySpec, described: dict[str, Any]) -> None:
        """Exchange layouts, plan, and connect the pairs; collective over both groups.

        Raises:
            PlanError: The modules do not fit together.
        """
        self._own_layout = described
        about = {
            "host": host_identity(),
            "device": _device_of(module),
            "shares": passes_shared_device(message_device(module)),
            "model": described if self._rank == 0 or "problem" in described else None,
        }
        every = self._span.exchange(about)
        source, target = _checked([one["model"] for one in every if one["model"] is not None], spec.merge)
        all_hosts = [one["host"] for one in every]
        hosts = all_hosts[: spec.num_sources], all_hosts[spec.num_sources :]
        of = (self._rank, None) if self._is_source else (None, self._rank)
        self._plan = plan_copy(source, target, hosts, spec.bucket_bytes, of)
        self._layout = source if self._is_source else target
        devices = [one["device"] for one in every]
        device = None
        is_one_kind = all(devices) and len({kind for kind, *_ in devices}) == 1
        is_apart = len(set(map(tuple, filter(None, devices)))) == len(devices)
        if is_one_kind and (is_apart or all(one["shares"] for one in every)):
            # Other backends of accelerators, and an NCCL before 2.30, refuse two ranks on one device: groups that share
            # devices pass host memory then.
            device = message_device(module)
            self._span.add_device(device)
        self._is_through_device = device is not None
        self._links = connect_links(self._span, self._plan, hosts, device)

    def _describe(self, module: nn.Module, spec: CopySpec) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return as JSON what the other group must know, or why this group's tensors cannot be copied; and the tensors.

        The tensors have the names that both groups use.
        """
        try:
            tensors = base_tensors(module) if self._is_source and spec.merge else model_contents(module)[0]
            layout = ModelLayout.of(tensors)
        except ValueError as error:
            return {"problem": str(error), "is_source": self._is_source}, {}
        described = {"layout": layout.to_json(), "adapters": adapter_scale(module), "is_source": self._is_source}
        return described, tensors

    def _gather_adapters(self, module: nn.Module, error: Exception | None) -> Exception | None:
        """Gather the adapters on every rank of the source; return the error that ends the copy, `None` without one.

        Args:
            module: The module.
            error: Error of this rank so far.
        """
        # Every rank of the source calls this, after an error too: the gather needs them all.
        if any_rank(error is not None):
            self.stop()
            return error or PeerLostError("another rank of the source has stopped")
        assert self._shards is not None, "prepared"
        return self._attempt(partial(self._shards.merge, module, self._span.left_s))

    def _stream(self, module: nn.Module, progress: Progress, peak: MemoryPeak) -> None:
        """Send, or receive, all buckets."""
        assert self._shards is not None, "prepared"
        if self.is_stopped:
            raise PeerLostError("this rank has stopped the copy")  # perhaps before it had links to stop
        for link in self._links.values():
            link.begin()
        total = sum(bucket_bytes(one) for buckets in self._plan.buckets.values() for one in buckets)
        progress("stream", 0, total, "")
        done = 0
        own = sorted(self._plan.buckets.items())
        turn = self._rank % max(1, len(own))
        own = own[turn:] + own[:turn]  # not all ranks turn to the same one first
        for index in range(max((len(buckets) for _, buckets in own), default=0)):
            for pair, buckets in own:
                if index < len(buckets):
                    move = self._send if self._is_source else self._receive
                    move(self._links[pair], buckets, index, self._shards)
                    done += bucket_bytes(buckets[index])
            peak.sample()
            progress("stream", done, total, "")
        for pair, buckets in own if self._is_source else ():
            self._links[pair].end(len(buckets))
        self._span.wait_for_device(message_device(module))

    def _send(self, link: Link, buckets: tuple[Bucket, ...], index: int, shards: PlanShards) -> None:
        slot = link.wait_free(index)
        for segment in buckets[index]:
            shards.in_slot(slot, segment).copy_(shards.values(segment))
        link.post(index, bucket_bytes(buckets[index]))

    def _receive(self, link: Link, buckets: tuple[Bucket, ...], index: int, shards: PlanShards) -> None:
        ahead = range(min(NUM_SLOTS, len(buckets))) if index == 0 else [index + NUM_SLOTS - 1]
        for later in ahead:
            if later < len(buckets):
                link.expect(later, bucket_bytes(buckets[later]))
        slot = link.take(index, bucket_bytes(buckets[index]))
        self._has_written = self._has_written or not shards.is_staged
        for segment in buckets[index]:
            shards.values(segment).copy_(shards.in_slot(slot, segment))
        link.release(index)

    def _agree_in_source(self, error: Exception | None) -> str | None:
        """Wait until the target has the weights; return why that is not known, the same on every rank of the source.

        Raises:
            RuntimeError: On every rank of the source, if one failed by itself. None has changed.
        """
        lost = str(error) if isinstance(error, PeerLostError) else None
        if error is None:
            lost = self._finish()
        is_typed = isinstance(error, RayshardingError)
        raised = None if error is None or lost is not None or is_typed else _text_of(error)
        # Every rank of the source calls this, whatever happened to it: the others would wait in the all-gather.
        outcomes = agree(error if is_typed else None, {"lost": lost, "raised": raised})
        reasons = [f"rank {rank}: {one['raised']}" for rank, one in enumerate(outcomes) if one["raised"] is not None]
        found = [one["lost"] for one in outcomes if one["lost"] is not None]
        if reasons or found:
            self.stop()
        if reasons:
            failure = RuntimeError(f"the copy stopped; this group, its source, is as before ({'; '.join(reasons)})")
            mark_recovery(failure, usable=True, torn=False)
            raise failure from (None if isinstance(error, PeerLostError) else error)
        return found[0] if found else None

    def _agree_in_target(self, error: Exception | None) -> str | None:
        """Take the weights if every rank has received its own, and tell the source; else raise on every rank.

        Returns:
            Why the source may not have heard; `None` if it has.

        Raises:
            RuntimeError: On every rank of the target; see the note.
        """
        is_typed = isinstance(error, RayshardingError)
        failed = None if error is None else _text_of(error)
        try:
            # Every rank of the target calls this, whatever happened to it: the others would wait in the all-gather.
            outcomes = agree(error if is_typed else None, {"failed": failed, "has_written": self._has_written})
        except RuntimeError as gone:  # a rank of the target
            if isinstance(gone, RayshardingError) or not self._has_written:
                raise
            raise _failure(True, [failed or "another rank of this group is gone"]) from gone
        reasons = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(outcomes) if one["failed"] is not None]
        if reasons:
            self.stop()
            is_mixed = any(one["has_written"] for one in outcomes)
            cause = None if isinstance(error, PeerLostError) else error
            raise _failure(is_mixed, reasons) from cause
        assert self._shards is not None, "prepared, as there was no error"
        self._shards.take_staged()
        lost = self._finish()
        if lost is not None:
            self.stop()
        return lost

    def _finish(self) -> str | None:
        """Meet all ranks of both groups at the end; return why that failed. The target has taken the weights before."""
        try:
            self._span.maxima(0)
        except PeerLostError as error:
            return str(error)
        return None


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, PeerLostError) else f"{type(error).__name__}: {said(error)}"


def _device_of(module: nn.Module) -> list[str] | None:
    """Return kind, host and identity of the accelerator that a module's messages leave from; `None` on the CPU."""
    device = message_device(module)
    found = device_uuid(device) if is_accelerator(device) else None
    return None if found is None else [device.type, *host_identity(), found]


def _checked(models: list[dict[str, Any]], merge: bool) -> tuple[ModelLayout, ModelLayout]:
    """Return the layouts of source and target, from the same JSON on every rank of both: all raise, or none.

    Raises:
        PlanError: With everything that does not fit.
    """
    problems = [
        f"{'the source' if one['is_source'] else 'the target'}: {one['problem']}" for one in models if "problem" in one
    ]
    if not problems:
        mine, theirs = (one["adapters"] for one in models)
        source, target = (ModelLayout.from_json(one["layout"]) for one in models)
        if mine is not None and theirs is None and not merge:
            problems = ["the source has LoRA adapters, the target none: give merge=True to merge them on the way"]
        elif theirs is not None and (mine is None or merge):
            what = "the merged weights of the source" if merge else "the weights of the source, which has none"
            problems = [f"the target has LoRA adapters, under which {what} do not belong: copy adapters into adapters"]
        elif mine != theirs and not merge:
            problems = [f"the adapters have another scale: {mine} in the source, {theirs} in the target"]
        else:
            problems = list(differences(source, target))
    if problems:
        raise PlanError("the groups hold different models:", problems=problems)
    return source, target


def _failure(is_mixed: bool, reasons: list[str]) -> RuntimeError:
    """Return the error of a target, with what it left: mixed weights, or the earlier ones."""
    why = "; ".join(reasons)
    if is_mixed:
        error = RuntimeError(
            "mixed weights: the copy stopped when parts of this group had the new weights and others the old; "
            f"restart() brings the last files ({why})"
        )
    else:
        error = RuntimeError(f"the copy stopped before this group took a weight: it holds its earlier ones ({why})")
    mark_recovery(error, usable=not is_mixed, torn=is_mixed)
    return error
