"""The last step of a load: initialise tensors that the checkpoint lacks, check values, agree on the outcome.

The checks are: values are finite, checksums match the manifest, replicas hold equal values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from raysharding.checkpoint import mismatches
from raysharding.checkpoint.format import Checksums
from raysharding.distributed.comm import agreeing, all_gather_json, get_world_size
from raysharding.distributed.fully_shard import ShardMap, local_tensor, over_ranks_of, tensor_layout
from raysharding.distributed.loading.plan import LoadContext, LoadPlan
from raysharding.distributed.transfer import as_memory, full_memory, gather_into
from raysharding.errors import CheckpointError
from raysharding.models import Initialiser, first_magnitude, magnitude_layer

CHUNK_BYTES = 4 << 20
"""Bytes per chunk of a check, which fit into the cache."""


def finish(
    context: LoadContext,
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    error: Exception | None,
    measured: Mapping[str, Any],
) -> Sequence[Mapping[str, Any]]:
    """Initialise tensors that the checkpoint lacks, check values, and agree on the outcome; collective.

    Args:
        context: The load.
        plan: Plan of the load.
        tensors: FQN → tensor of the module.
        error: Error of this rank's stream, or `None`.
        measured: Measurements of this rank, by field of the report.

    Returns:
        Measurements of all ranks, in rank order.

    Raises:
        Exception: On every rank, if one failed: no rank keeps a module that seems loaded.
    """
    started = perf_counter()
    layers = {name: magnitude_layer(context.module, name) for name in plan.outline.initialised}
    with agreeing():  # magnitudes are computed from all weights, and checksums of all bytes
        if error is not None:
            raise error
        context.progress("finalize", plan.buckets.total_bytes, plan.buckets.total_bytes, "")
        if ruled := [name for name, layer in layers.items() if layer is None]:
            initialiser = Initialiser(context.module, context.loading.seed)
            for name in ruled:
                _keep_part(context, name, tensors[name], initialiser.value(name))
        if context.loading.verify == "finite":
            _check_finite(context, plan, tensors)
    _initialise_magnitudes(context, layers, tensors)
    initialise_s = perf_counter() - started
    if context.checksums is not None:
        _compare_checksums(context, context.checksums, plan, tensors)
    digest = digest_module(tensors, plan.outline.checkpoint) if context.loading.digest else ""
    context.peak.sample()
    held = [local_tensor(tensor) for tensor in tensors.values()]
    in_host = sum(tensor.nbytes for tensor in held if tensor.device.type == "cpu")
    own = {
        **measured,
        "digest": digest,
        "initialise_s": initialise_s,
        "shard_bytes": sum(tensor.nbytes for tensor in held),
        "peak_extra_bytes": max(0, context.peak.host_bytes - in_host),
        "peak_device_bytes": context.peak.device_bytes,
        "seconds": perf_counter() - context.started,
    }
    return all_gather_json(own)


def _keep_part(context: LoadContext, name: str, tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of a full tensor into its shard."""
    start, stop = tensor_layout(name, tensor).local_range(context.shards.shard_index)
    local_tensor(tensor).view(-1).copy_(full.reshape(-1)[start:stop])


def _initialise_magnitudes(
    context: LoadContext, layers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Compute DoRA's first magnitudes from loaded weights, which are gathered a layer at a time; collective."""
    everyone = range(get_world_size())
    for name, layer in layers.items():
        if layer is not None:
            held = dict(layer.named_parameters())
            # A rank without memory must not leave the others in the gather of this layer, or of the next.
            with agreeing():
                full = full_memory(held, on_cpu=True)
            gather_into(full, held, everyone, context.device, timeout_s=context.stall_s)
            with agreeing():
                _keep_part(context, name, tensors[name], first_magnitude(layer, full))


def _check_finite(context: LoadContext, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check this rank's shards of loaded floating tensors for NaN and infinity. Not collective; takes no memory.

    Raises:
        CheckpointError: A value is not finite; the error names tensor and element.
    """
    for index, (name, _) in enumerate(plan.outline.tensors):
        context.progress("finalize", index, len(tensors), name)  # takes as long as a read if files are mapped
        tensor = tensors[name]
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        local = local_tensor(tensor)
        for start, chunk in _chunks(torch.view_as_real(local) if local.is_complex() else local):
            values = chunk.float() if chunk.itemsize == 1 else chunk
            # One pass without temporaries; minimum and maximum of values with a NaN are NaN.
            if bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
                continue
            first = start + int(torch.isfinite(values).logical_not().nonzero()[0])
            what = f"element {first} of this rank's shard is {values[first - start].item()}: not finite"
            raise CheckpointError(
                f"{what}; verify='header' loads it all the same", path=plan.outline.checkpoint, tensor=name
            )


def _compare_checksums(
    context: LoadContext, checksums: Checksums, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Compare the bytes that all ranks read or mapped with the manifest; collective.

    Raises:
        CheckpointError: On every rank: bytes differ from those saved; lists the tensors.
    """
    with agreeing():
        for index, (layout, extent) in enumerate(plan.mapped):
            context.progress("finalize", index, len(tensors), layout.fqn)
            first = layout.local_range(context.shards.shard_index)[0] * layout.dtype.itemsize
            offset = extent.offset - extent.key_offset + first
            checksums.add(extent.key, offset, as_memory(local_tensor(tensors[layout.fqn]).view(-1)))
    whole = _merged(checksums)
    with agreeing():
        if plan.match is not None:
            manifest, targets = plan.match.manifest, plan.match.keys.targets
            assert manifest is not None, "verify='full' does not get here without one"
            keys = dict.fromkeys(key for fqn, _ in plan.outline.tensors for key in targets[fqn].sources)
            if lines := mismatches(manifest, whole, keys):
                what = f"{len(lines)} tensors are not what was saved: restore the files"
                raise CheckpointError("\n  ".join((what, *lines)), path=plan.outline.checkpoint)


def _merged(own: Checksums) -> Checksums:
    """Return the checksums of all ranks together; collective."""
    whole = Checksums()
    # Every rank calls this, whatever it read: the others would wait in the all-gather.
    for pieces in all_gather_json(own.pieces()):
        whole.merge(pieces)
    return whole


@over_ranks_of("tensors")
def digest_module(tensors: Mapping[str, torch.Tensor], path: str) -> str:
    """Return a digest of all values of a module, equal at every world size and on every mesh; collective.

    Args:
        tensors: FQN → tensor of the module.
        path: Names the checkpoint in the error.

    Returns:
        16 hex digits, of the CRC-32 of each tensor. Wire: some 50 bytes for each tensor and rank.

    Raises:
        CheckpointError: On every rank: replicas hold different values; lists the tensors.
    """
    own = Checksums()
    shard_index = ShardMap.of(tensors).shard_index
    for name, tensor in tensors.items():
        first = tensor_layout(name, tensor).local_range(shard_index)[0]
        for start, chunk in _chunks(local_tensor(tensor)):
            own.add(name, (first + start) * chunk.itemsize, as_memory(chunk.cpu()))
    whole = _merged(own)
    text = hashlib.sha256()
    differing = []
    for name, tensor in sorted(tensors.items()):
        num_bytes = tensor.numel() * tensor.itemsize
        value = whole.value(name, num_bytes) if num_bytes else 0
        if value is None:
            differing.append(f"{name}: {whole.problem(name, num_bytes)}")
        text.update(f"{name} {value}\n".encode())
    if differing:
        what = f"ranks hold different values of {len(differing)} tensors:"
        raise CheckpointError("\n  ".join((what, *differing)), path=path)
    return text.hexdigest()[:16]


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, 1-D chunk) of a contiguous tensor."""
    flat = tensor.view(-1)
    step = CHUNK_BYTES // tensor.itemsize
    for start in range(0, flat.numel(), step):
        yield start, flat[start : start + step]
