"""The plan of a load: rank 0 matches checkpoint and module from headers, and all ranks make the same buckets.

Note: which rank plans what.
    Only rank 0 reads headers and matches keys: transformers' tables and operations take a tenth of a second in every
    process that uses them, and the other ranks do not need the byte ranges of tensors. They need an `Outline`: the
    tensors in the order of transfer, with dtypes, and the tensors to initialise. The ranks then compare the basis of
    the outline: the tensors of their modules, the options, and the files that they see.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint import (
    Checkpoint,
    CheckpointFile,
    FileReader,
    Manifest,
    check_manifest,
    open_checkpoint,
    read_manifest,
)
from raysharding.checkpoint.format import MANIFEST_NAME, Checksums
from raysharding.config import Loading
from raysharding.distributed.comm import agree, broadcast_json, get_rank, get_world_size
from raysharding.distributed.fully_shard import ShardMap, TensorLayout, persistent_names, tensor_layout
from raysharding.distributed.loading.mmap import mappable
from raysharding.distributed.loading.readers import (
    FileLocations,
    FileVisibility,
    ReadPlan,
    check_visibility,
    plan_reads,
    rank_0_reads,
    with_local_files,
)
from raysharding.distributed.loading.state_dict_source import Rank0StateDict, StateDictSource
from raysharding.distributed.transfer import (
    BUCKET_BYTES,
    STRAIGHT_BYTES,
    BucketPlan,
    CheckpointSource,
    Extent,
    Extents,
    MemoryPeak,
    PlannedTensor,
    Request,
    TensorSource,
    as_memory,
    extents_from_json,
    extents_of,
    extents_to_json,
    plan_buckets,
    wire_dtype,
)
from raysharding.errors import CheckpointError, PlanError
from raysharding.models import AdapterNames, KeyMap, differing_ties, map_keys, misfit, missing_rules, path_of

Progress = Callable[[str, int, int, str], None]
"""Called as `progress(phase, bytes_done, bytes_total, last FQN)`; phases are `plan`, `stream`, `finalize`."""


def silent(phase: str, done: int, total: int, tensor: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class LoadContext:
    """One load on one rank."""

    module: nn.Module
    """The sharded root module."""
    loading: Loading
    """Options; the same on every rank."""
    progress: Progress
    """Receives the progress of the load."""
    stall_s: float
    """Longest wait for a byte of the files, and for one bucket of another rank, in seconds."""
    shards: ShardMap
    """Which rank holds which shard."""
    device: torch.device
    """Device of the messages."""
    peak: MemoryPeak
    """Peak memory since the start of the load."""
    checksums: Checksums | None
    """Receives the bytes that this rank reads; `None` unless `verify="full"`."""
    started: float
    """Time of the call, by `time.perf_counter`."""


Origin = Checkpoint | str | os.PathLike[str] | Rank0StateDict
"""Source of the values of a load."""


@dataclass(frozen=True)
class Matched:
    """What a checkpoint and a module have for each other, as a load reports it."""

    checkpoint: str
    """The checkpoint, as the caller named it."""
    checkpoint_bytes: int
    """Bytes of the files' tensors."""
    missing: tuple[str, ...]
    """FQNs without a tensor in the checkpoint."""
    unexpected: tuple[str, ...]
    """Checkpoint keys that no FQN takes."""
    ignored: tuple[str, ...]
    """Checkpoint keys and FQNs that do not count as missing or unexpected."""
    initialised: tuple[str, ...]
    """FQNs that were initialised by the module's own rule."""
    tied: tuple[str, ...]
    """FQNs that share the parameter of another FQN."""
    converted: tuple[str, ...]
    """`FQN: operations` of tensors that transformers' operations computed on rank 0."""
    kept: tuple[str, ...]
    """FQNs of LoRA adapters that stay as they were, in effect: the checkpoint holds their base model."""
    warnings: tuple[str, ...]
    """What may be wrong with the result: adapters that name another base model, a head without values in
    the files. A group's driver warns of it, too."""


@dataclass(frozen=True)
class Outline(Matched):
    """Match of checkpoint and module, as sent to every rank as JSON."""

    file_locations: Mapping[str, Any] | None
    """`FileLocations` of rank 0 as JSON; `None` for a state dict in its memory, and for random weights."""
    extents: tuple[Any, ...] | None
    """Extents of the tensors in the files, by `extents_to_json`; `None` if only rank 0 reads."""
    tensors: tuple[tuple[str, str], ...]
    """(canonical FQN, wire dtype such as `bfloat16`) of the loaded tensors: first sharded tensors that are ranges of
    files, in file order, then replicated tensors and tensors that rank 0 computes."""
    num_ranged: int
    """Number of first tensors, which any reader can read. Rank 0 reads the rest."""
    base: str | None
    """Path that the adapters' saves name as their base from now on, if it changes."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outline:
        """Make an outline from JSON, where tuples are lists."""
        plain: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
        plain["tensors"] = tuple(map(tuple, value["tensors"]))
        return cls(**plain)


@dataclass(frozen=True)
class CheckpointMatch:
    """Match of checkpoint and module, on rank 0 only."""

    checkpoint: Checkpoint
    """The open checkpoint."""
    keys: KeyMap
    """Map of checkpoint keys to FQNs."""
    state_dict: Rank0StateDict | None
    """The values, if they are in memory and not in files."""
    manifest: Manifest | None
    """Manifest of the saved files; only under `verify="full"`."""
    outline: Outline
    """What the other ranks need to know of it."""


@dataclass(frozen=True)
class Proposal:
    """Information of one rank before the exchange with the others."""

    layouts: Mapping[str, TensorLayout]
    """FQN → layout of every tensor of this rank's module."""
    digests: tuple[str, ...]
    """Digests of module and options, which must be equal on all ranks."""
    on_meta: frozenset[str]
    """FQNs of tensors without memory."""
    match: CheckpointMatch | None
    """The match on rank 0; `None` on other ranks."""


@dataclass(frozen=True)
class LoadPlan:
    """The complete plan, before data moves."""

    outline: Outline
    """The same on every rank."""
    read_plan: ReadPlan
    """Readers and transport; the same on every rank."""
    buckets: BucketPlan
    """Buckets of the tensors, first those of file ranges; the same on every rank."""
    files: tuple[CheckpointFile, ...] | None
    """The files as this rank sees them, none for a state dict; `None` on ranks that do not read."""
    extents: Mapping[str, Extents]
    """FQN → extents in the files; empty on ranks that do not need them."""
    mapped: tuple[tuple[TensorLayout, Extent], ...]
    """Tensors that are not streamed, because each rank maps its shard; the same on every rank."""
    match: CheckpointMatch | None
    """The match, on rank 0; `None` on other ranks."""
    is_straight: bool
    """True if every rank reads directly into its shard, so that no rank has a ring; the same on every rank."""


def propose_load(module: nn.Module, tensors: Mapping[str, torch.Tensor], origin: Origin, loading: Loading) -> Proposal:
    """Describe this rank's module, and on rank 0 match it with the checkpoint. Not collective.

    Args:
        module: The sharded module; on meta if the load is to allocate it.
        tensors: Its `module_tensors`.
        origin: Path or URI, which rank 0 opens; an open checkpoint; or a state dict in rank 0's memory.
        loading: Options, the same on every rank.
    """
    layouts = {fqn: tensor_layout(fqn, tensor) for fqn, tensor in tensors.items()}
    on_meta = [fqn for fqn, tensor in tensors.items() if tensor.is_meta]
    own = [(item.fqn, item.shape, item.dtype, item.num_shards) for item in layouts.values()]
    described = (own, on_meta, sorted(persistent_names(module))), loading
    digests = tuple(hashlib.sha256(repr(item).encode()).hexdigest() for item in described)
    match = _match(module, origin, loading, layouts) if get_rank() == 0 else None
    return Proposal(layouts, digests, frozenset(on_meta), match)


def agree_on_plan(proposal: Proposal | None, error: Exception | None, context: LoadContext) -> LoadPlan:
    """Exchange proposals and plan the buckets; collective.

    Args:
        proposal: Proposal of this rank; `None` after an error.
        error: Error of this rank, or `None`.
        context: The load.

    Raises:
        CheckpointError: On every rank, if the headers are unreadable or unsafe, or readers see different files.
        PlanError: On every rank, if the checkpoint does not fit, or ranks differ in module or options.
    """
    loading, shards = context.loading, context.shards
    outline, by_rank, found = _exchange(proposal, error, loading)
    assert proposal is not None, "this rank would have raised its error"
    why = "rank 0 holds the state dict" if outline.tensors else "no weights are read"
    read_plan = ReadPlan(loading.transport, (0,), why)
    if outline.file_locations is not None:
        there = FileLocations.from_json(outline.file_locations)
        piece_bytes = outline.checkpoint_bytes // max(1, len(outline.tensors) * shards.num_shards)
        read_plan = plan_reads(loading, there, by_rank, found, piece_bytes)
    extents = _all_extents(proposal.match, outline)
    files = found if proposal.match is None else proposal.match.checkpoint.files
    reads = shards.rank in read_plan.readers
    planned = [PlannedTensor(proposal.layouts[fqn], getattr(torch, dtype)) for fqn, dtype in outline.tensors]
    mapped = mappable(planned, extents, proposal.on_meta) if loading.mmap else []
    names = {layout.fqn for layout, _ in mapped}
    streamed = [item for item in planned if item.layout.fqn not in names]
    num_ranged = sum(item.layout.fqn not in names for item in planned[: outline.num_ranged])
    # A rank that reads for others needs their segments; otherwise lengths suffice.
    reads_for_others = reads and (read_plan.transport != "local" or (shards.rank == 0 and num_ranged < len(streamed)))
    wanted = None if reads_for_others else (shards.shard_index,)
    alone = read_plan.transport == "local" and shards.num_shards == shards.world_size and context.device.type == "cpu"
    fits = [item.layout.num_shards > 0 and item.wire_dtype == item.layout.dtype for item in streamed]
    rest_bytes = loading.bucket_bytes or BUCKET_BYTES
    first_bytes = loading.bucket_bytes or (STRAIGHT_BYTES if alone and all(fits[:num_ranged]) else BUCKET_BYTES)
    if read_plan.transport == "local":  # parts of ranks that all read for themselves share only the bucket's number
        first_bytes *= shards.num_shards
    buckets = plan_buckets(streamed, shards.num_shards, first_bytes, num_ranged, wanted, rest_bytes)
    return LoadPlan(
        outline,
        read_plan,
        buckets,
        files if reads else None,
        extents,
        tuple(mapped),
        proposal.match,
        is_straight=alone and all(fits),
    )


def _exchange(
    proposal: Proposal | None, error: Exception | None, loading: Loading
) -> tuple[Outline, list[FileVisibility], tuple[CheckpointFile, ...]]:
    """Receive rank 0's outline, and exchange digests and visibility of files; collective.

    Returns:
        The outline, the visibility of the files on each rank (empty if not needed), and the files of this rank.
    """
    match = None if proposal is None else proposal.match
    # Every rank calls this, after an error too, where rank 0 sends `None`: the others would wait in the broadcast.
    received = broadcast_json(None if match is None else vars(match.outline))
    outline = None if received is None else Outline.from_json(received)
    visibility: FileVisibility | None = None
    found: tuple[CheckpointFile, ...] = ()
    if outline is not None and outline.file_locations is not None:
        visibility, found = check_visibility(loading, FileLocations.from_json(outline.file_locations))
    # Before any data collective: ranks with different plans would send and receive different sizes, and hang.
    answers = agree(error, (proposal and proposal.digests, None if visibility is None else asdict(visibility)))
    for index, what in enumerate(("built another model", "were given other options")):
        differing = [str(rank) for rank, (theirs, _) in enumerate(answers) if theirs[index] != answers[0][0][index]]
        if differing:
            who = f"ranks {', '.join(differing)} {what} than rank 0"
            raise PlanError(f"{who}: make the model and `Loading` the same on every rank")
    assert outline is not None, "rank 0 said why there is none"
    return outline, [FileVisibility(**value) for _, value in answers if value is not None], found


def _all_extents(match: CheckpointMatch | None, outline: Outline) -> Mapping[str, Extents]:
    """Return FQN → extents; empty on ranks that do not need them."""
    if match is not None:
        return {fqn: extents_of(match.checkpoint, match.keys.targets[fqn]) for fqn, _ in outline.tensors}
    if outline.extents is None:
        return {}
    return {fqn: extents_from_json(item) for (fqn, _), item in zip(outline.tensors, outline.extents, strict=True)}


def _match(module: nn.Module, origin: Origin, loading: Loading, layouts: Mapping[str, TensorLayout]) -> CheckpointMatch:
    state_dict = origin if isinstance(origin, Rank0StateDict) else None
    if isinstance(origin, Rank0StateDict):
        opened = origin.as_checkpoint()
    else:
        opened = with_local_files(origin) if isinstance(origin, Checkpoint) else open_checkpoint(origin)
    adapters = AdapterNames.of(module)
    warned: tuple[str, ...] = ()
    if opened.adapter is not None:
        if adapters is None:
            what = "holds LoRA adapters, and the model has none: from_checkpoint(path) makes the model with them"
            raise PlanError(f"{opened.path} {what}")
        adapters.check(opened)
        warned = adapters.other_base(opened)
    manifest = _manifest(opened) if loading.verify == "full" else None
    keys = map_keys(module, opened.tensors, loading.key_mapping, opened.config)
    if (new := [name for name in keys.missing if name in keys.heads]) and not opened.is_random:
        warned += (f"{opened.path} has no {', '.join(new)}: initialised, and of no use before a training",)
    cure, own = keys.cure, [name for name in keys.missing if name not in keys.initialise and state_dict is None]
    if own:  # of a module that is real: a head that was trained, of which no checkpoint says anything
        keeps = f"keeps the model's own {', '.join(own[:4])}{', ...' if own[4:] else ''}, with what was trained of it"
        warned += (f"a load of {opened.path} {keeps}: missing there",)
        cure = cure or f"strict=False accepts missing or unexpected keys, and {keeps}; nothing is changed now"
    if state_dict is not None:
        # No state dict holds non-persistent buffers. One on meta, without a rule, is an error under `strict`; otherwise
        # it stays on meta, and its owner may set it. Parameters that the state dict lacks stay, as with torch.
        settable = [name for name in keys.initialise if name not in keys.missing]
        if not loading.strict:
            settable = [name for name in settable if not missing_rules(module, [name], loading.seed)]
        keys = replace(keys, initialise=tuple(settable))
    kept = () if adapters is None else tuple(sorted(adapters.added.difference(keys.targets, keys.initialise)))
    is_base = kept and opened.adapter is None and state_dict is None
    base = path_of(opened) if is_base else None
    outline = _outline(opened, keys, loading, layouts, kept=kept, warnings=warned, base=base)
    match = CheckpointMatch(opened, keys, state_dict, manifest, outline)
    if problems := _problems(module, match, loading):
        raise misfit(opened.path, problems, cure)
    return match


def _manifest(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest beside the files, after a check against their headers."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        what = f"verify='full' needs the {MANIFEST_NAME} that raysharding's saves hold, and there is none: load with "
        raise CheckpointError(what + "verify='finite', or save it once with raysharding", path=checkpoint.path)
    check_manifest(manifest, checkpoint)
    return manifest


def _outline(
    checkpoint: Checkpoint, keys: KeyMap, loading: Loading, layouts: Mapping[str, TensorLayout], **others: Any
) -> Outline:
    """Return the outline of a match; `others` are the fields that do not follow from the keys."""
    first = {target.fqn: checkpoint.tensors[target.sources[0]] for target in keys.targets.values()}
    # File order, so that the stream reads the disk forward.
    targets = sorted(keys.targets.values(), key=lambda target: (first[target.fqn].file, first[target.fqn].offset))
    cut = {target.fqn for target in targets if target.runs is not None and layouts[target.fqn].num_shards}
    ranged = [target for target in targets if target.fqn in cut]
    computed = [target for target in targets if target.fqn not in cut]
    extents = None
    if get_world_size() > 1 and not rank_0_reads(loading):
        extents = tuple(extents_to_json(extents_of(checkpoint, target)) for target in (*ranged, *computed))
    return Outline(
        checkpoint=checkpoint.path,
        checkpoint_bytes=checkpoint.num_bytes,
        file_locations=asdict(FileLocations.of(checkpoint.files)) if checkpoint.files else None,
        extents=extents,
        tensors=tuple(
            (target.fqn, str(wire_dtype(target.source_dtype, target.dtype)).removeprefix("torch."))
            for target in (*ranged, *computed)
        ),
        num_ranged=len(ranged),
        initialised=keys.initialise,
        missing=keys.missing,
        unexpected=keys.unexpected,
        ignored=keys.ignored,
        tied=tuple(keys.aliases),
        converted=tuple(f"{fqn}: {target.operations}" for fqn, target in keys.targets.items() if target.runs is None),
        **others,
    )


def _problems(module: nn.Module, match: CheckpointMatch, loading: Loading) -> list[str]:
    """Return all problems of the load, a line each."""
    keys, is_strict = match.keys, loading.strict and not match.checkpoint.is_random
    # A state dict may have nothing of the model under `strict=False`, as with torch.
    is_torchs = match.state_dict is not None and not is_strict
    problems = list(keys.problems) if is_torchs else keys.mismatches(strict=is_strict)
    if is_strict and match.state_dict is not None:
        problems += match.state_dict.mismatches
    refused = {*keys.missing} - keys.heads if is_strict else set()
    problems += missing_rules(module, [name for name in keys.initialise if name not in refused], loading.seed)
    if keys.doubled:
        # Headers do not show whether two tied names have the same value.
        targets = (*keys.targets.values(), *keys.doubled)
        extents = {target.fqn: extents_of(match.checkpoint, target) for target in targets}
        with FileReader(match.checkpoint.files) as reader:
            source = make_source(match, reader, extents)

            def read(fqn: str, start: int, stop: int, out: torch.Tensor) -> None:
                source.read([Request(fqn, start, stop, out.dtype, as_memory(out))])

            problems += differing_ties(keys, read)
    return problems


def make_source(
    match: CheckpointMatch | None,
    reader: FileReader,
    extents: Mapping[str, Extents],
    checksums: Checksums | None = None,
    piece_bytes: int | None = None,
) -> TensorSource:
    """Return the source of a load on this rank: its files, or on rank 0 a state dict."""
    if match is None:
        return CheckpointSource({}, extents, {}, reader, checksums, piece_bytes)
    tensors = match.checkpoint.tensors
    targets = {**match.keys.targets, **{target.fqn: target for target in match.keys.doubled}}
    if match.state_dict is not None:
        return StateDictSource(tensors, extents, targets, match.state_dict)
    return CheckpointSource(tensors, extents, targets, reader, checksums, piece_bytes)
