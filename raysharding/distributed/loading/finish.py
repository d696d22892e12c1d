"""The end of a load: values that the checkpoint lacks, checks of all values, and the ranks' agreement on the outcome.

Checked are finite values, the checksums of the manifest, and that replicas hold the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from raysharding.checkpoint import Checksums, mismatches
from raysharding.distributed.comm import agree, all_gather_json
from raysharding.distributed.fully_shard import ShardMap, local_tensor, tensor_layout
from raysharding.distributed.loading.context import LoadContext
from raysharding.distributed.loading.plan import LoadPlan
from raysharding.distributed.transfer import as_memory
from raysharding.errors import CheckpointError
from raysharding.models import Initialiser

CHUNK_BYTES = 4 << 20
"""So much is looked at in one go: it stays in the cache."""
_MAX_LINES = 20


def finish(
    context: LoadContext,
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    error: Exception | None,
    measured: Mapping[str, Any],
) -> Sequence[Mapping[str, Any]]:
    """Initialise what the checkpoint lacks, check the values, and agree on the outcome; collective.

    Args:
        context: This load.
        plan: What was loaded.
        tensors: FQN → tensor of the module.
        error: Why this rank's stream failed, if it did.
        measured: What this rank has measured, by field of the report.

    Returns:
        What each rank measured, in rank order.

    Raises:
        Exception: On every rank, when one failed: no rank is left with a module that looks well.
    """
    started = perf_counter()
    if error is None:
        error = _complete(context, plan, tensors)
    initialise_s = perf_counter() - started
    digest = ""
    if context.checksums is not None:
        agree(error)  # what was not read cannot be compared
        error = _compare_checksums(context, context.checksums, plan, tensors)
    if context.loading.digest:
        agree(error)
        digest = digest_module(tensors, plan.outline.checkpoint)
    peak = context.peak
    peak.sample()
    shard_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
    # Every rank comes here, failed or not: the others wait to hear of it.
    own = {
        **measured,
        "digest": digest,
        "initialise_s": initialise_s,
        "shard_bytes": shard_bytes,
        "peak_extra_bytes": max(0, peak.host_bytes - (0 if peak.device_bytes else shard_bytes)),
        "peak_device_bytes": peak.device_bytes,
        "seconds": perf_counter() - context.started,
    }
    return agree(error, own)


def _complete(context: LoadContext, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> Exception | None:
    """Initialise what the checkpoint lacks, and look at what it brought; this rank alone."""
    total = plan.buckets.payload_bytes
    context.progress("finalize", total, total, "")
    try:
        _initialise(context, plan.outline.initialise, tensors)
        if context.loading.verify == "finite":
            loaded = [fqn for fqn, _ in plan.outline.tensors]
            check_finite(tensors, loaded, plan.outline.checkpoint, _checked(context, len(tensors)))
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        return error
    return None


def _checked(context: LoadContext, num_tensors: int) -> Callable[[int, str], None]:
    """Progress of what is looked at once more: it takes as long as reading where files are mapped."""
    return lambda index, fqn: context.progress("finalize", index, num_tensors, fqn)


def _initialise(context: LoadContext, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give what the checkpoint lacks its values: full tensors by the module's own rule, then this rank's part."""
    if not names:
        return
    initialiser = Initialiser(context.module, context.loading.seed)
    for name in names:
        full = initialiser.value(name)
        start, stop = tensor_layout(name, tensors[name]).local_range(context.shards.shard_index)
        local_tensor(tensors[name]).view(-1).copy_(full.reshape(-1)[start:stop])


def _compare_checksums(
    context: LoadContext, checksums: Checksums, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]
) -> Exception | None:
    """Compare with the manifest what was read, and what is mapped; collective."""
    on_tensor = _checked(context, len(tensors))
    for index, layout in enumerate(plan.mapped):
        on_tensor(index, layout.fqn)
        extents = plan.extents[layout.fqn]
        assert extents is not None, f"{layout.fqn}: mapped from ranges"
        first = layout.local_range(context.shards.shard_index)[0] * layout.dtype.itemsize
        offset = extents[0].offset - extents[0].key_offset + first
        checksums.add(extents[0].key, offset, as_memory(local_tensor(tensors[layout.fqn]).view(-1)))
    try:
        check_checksums(checksums, plan)
    except CheckpointError as error:
        return error
    return None


def check_finite(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], path: str, on_tensor: Callable[[int, str], None]
) -> None:
    """Look for NaN and infinity in this rank's part of floating tensors; no collective, no memory.

    Args:
        tensors: FQN → tensor of the module.
        names: FQNs to look at.
        path: Names the checkpoint in the error.
        on_tensor: Called with number and FQN before each tensor.

    Raises:
        CheckpointError: One holds a value that is not finite; names the tensor and the element.
    """
    for index, name in enumerate(names):
        on_tensor(index, name)
        tensor = tensors[name]
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        local = local_tensor(tensor)
        for start, chunk in _chunks(torch.view_as_real(local) if local.is_complex() else local):
            values = chunk.float() if chunk.itemsize == 1 else chunk
            # One pass without temporaries; NaN is the minimum and the maximum of whatever holds one.
            if bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
                continue
            first = start + int(torch.isfinite(values).logical_not().nonzero()[0])
            what = f"element {first} of this rank's shard is {values[first - start].item()}: not finite"
            raise CheckpointError(f"{what}; verify='header' loads it all the same", path=path, tensor=name)


def check_checksums(checksums: Checksums, plan: LoadPlan) -> None:
    """Compare what all ranks read with the manifest; collective, the error is rank 0's.

    Raises:
        CheckpointError: On rank 0: bytes differ from what was saved; lists the tensors.
    """
    # Every rank comes here, whatever it read: rank 0 waits for all of them.
    every = all_gather_json(checksums.pieces())
    if plan.match is None:
        return
    manifest = plan.match.manifest
    assert manifest is not None, "verify='full' does not get here without one"
    whole = Checksums()
    for pieces in every:
        whole.merge(pieces)
    targets = plan.match.keys.targets
    keys = dict.fromkeys(key for fqn, _ in plan.outline.tensors for key in targets[fqn].sources)
    lines = mismatches(manifest, whole, keys)
    if lines:
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        listed = "\n  ".join(lines[:_MAX_LINES] + more)
        what = f"{len(lines)} tensors are not what was saved: restore the files\n  {listed}"
        raise CheckpointError(what, path=plan.outline.checkpoint)


def digest_module(tensors: Mapping[str, torch.Tensor], path: str) -> str:
    """One number for all values of a module, the same at every world size and on every mesh; collective.

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
    whole = Checksums()
    # Every rank needs all parts, to come to the same answer.
    for pieces in all_gather_json(own.pieces()):
        whole.merge(pieces)
    text = hashlib.sha256()
    differing = []
    for name, tensor in sorted(tensors.items()):
        num_bytes = tensor.numel() * tensor.itemsize
        value = whole.value(name, num_bytes) if num_bytes else 0
        if value is None:
            differing.append(f"{name}: {whole.problem(name, num_bytes)}")
        text.update(f"{name} {value}\n".encode())
    if differing:
        listed = "\n  ".join(differing[:_MAX_LINES])
        raise CheckpointError(f"ranks hold different values of {len(differing)} tensors:\n  {listed}", path=path)
    return text.hexdigest()[:16]


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, 1-D chunk) of a contiguous tensor."""
    flat = tensor.view(-1)
    step = CHUNK_BYTES // tensor.itemsize
    for start in range(0, flat.numel(), step):
        yield start, flat[start : start + step]
