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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from raysharding.models import AdapterNames, KeyMap, Target, differing_ties, map_keys, misfit, missing_rules, path_of

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
class Outline:
    """Match of checkpoint and module, as sent to every rank as JSON."""

    checkpoint: str
    """The checkpoint, as the caller named it."""
    checkpoint_bytes: int
    """Bytes of the files' tensors."""
    file_locations: Mapping[str, Any] | None
    """`FileLocations` of rank 0 as JSON; `None` for a state dict in its memory, and for random weights."""
    extents: tuple[Any, ...] | None
    """Extents of the tensors in the files, by `extents_to_json`; `None` if only rank 0 reads."""
    tensors: tuple[tuple[str, str], ...]
    """(canonical FQN, wire dtype such as `bfloat16`) of the loaded tensors: first sharded tensors that are ranges of
    files, in file order, then replicated tensors and tensors that rank 0 computes."""
    num_ranged: int
    """Number of first tensors, which any reader can read. Rank 0 reads the rest."""
    initialise: tuple[str, ...]
    """Canonical FQNs of tensors that the checkpoint lacks and that need a value."""
    missing: tuple[str, ...]
    """See `KeyMap.missing`."""
    unexpected: tuple[str, ...]
    """See `KeyMap.unexpected`."""
    ignored: tuple[str, ...]
    """See `KeyMap.ignored`."""
    tied: tuple[str, ...]
    """Other names of tied tensors."""
    converted: tuple[str, ...]
    """`FQN: operations` of tensors that transformers' operations compute."""
    kept: tuple[str, ...] = ()
    """FQNs of adapters that keep their values, since the checkpoint holds their base."""
    warnings: tuple[str, ...] = ()
    """See `LoadReport.warnings`."""
    base: str | None = None
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
    initialise: tuple[str, ...]
    """Canonical FQNs of tensors that the checkpoint lacks and that need a value."""
    manifest: Manifest | None
    """Manifest of the saved files; only under `verify="full"`."""
    kept: tuple[str, ...]
    """See `Outline.kept`."""
    warnings: tuple[str, ...]
    """See `LoadReport.warnings`."""


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
    outline: Outline | None
    """The outline on rank 0; `None` on other ranks."""
    error: Exception | None
    """Error of this rank, or `None`."""


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


def propose_load(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    checkpoint: Origin,
    loading: Loading,
) -> Proposal:
    """Describe this rank's module, and on rank 0 match it with the checkpoint. Not collective.

    Args:
        module: The sharded module; on meta if the load is to allocate it.
        tensors: Its `module_tensors`.
        checkpoint: Path or URI, which rank 0 opens; an open checkpoint; or a state dict in rank 0's memory.
        loading: Options, the same on every rank.

    Returns:
        The proposal; it holds an error, if any, which `agree_on_plan` raises.
    """
    layouts: dict[str, TensorLayout] = {}
    digests: tuple[str, ...] = ()
    on_meta: list[str] = []
    match: CheckpointMatch | None = None
    outline: Outline | None = None
    error: Exception | None = None
    try:
        layouts = {fqn: tensor_layout(fqn, tensor) for fqn, tensor in tensors.items()}
        on_meta = [fqn for fqn, tensor in tensors.items() if tensor.is_meta]
        persistent = sorted(persistent_names(module))
        own = [(item.fqn, item.shape, item.dtype, item.num_shards) for item in layouts.values()]
        digests = tuple(
            hashlib.sha256(repr(item).encode()).hexdigest() for item in ((own, on_meta, persistent), loading)
        )
        if get_rank() == 0:
            match = _match(module, checkpoint, loading)
            outline = _outline(match, loading, layouts)
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome
        error = raised
    return Proposal(layouts, digests, frozenset(on_meta), match, outline, error)


def agree_on_plan(
    proposal: Proposal, error: Exception | None, loading: Loading, shards: ShardMap, device: torch.device
) -> LoadPlan:
    """Exchange proposals and plan the buckets; collective.

    Args:
        proposal: Proposal of this rank.
        error: Another error of this rank, or `None`.
        loading: See `propose_load`.
        shards: Which rank holds which shard.
        device: Device of the messages.

    Raises:
        CheckpointError: On every rank, if the headers are unreadable or unsafe, or readers see different files.
        PlanError: On every rank, if the checkpoint does not fit, or ranks differ in module or options.
    """
    outline, by_rank, found = _exchange(proposal, proposal.error or error, loading)
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
    mapped = _mapped(planned, proposal, extents) if loading.mmap else []
    names = {layout.fqn for layout, _ in mapped}
    streamed = [item for item in planned if item.layout.fqn not in names]
    num_ranged = sum(item.layout.fqn not in names for item in planned[: outline.num_ranged])
    # A rank that reads for others needs their segments; otherwise lengths suffice.
    reads_for_others = reads and (read_plan.transport != "local" or (shards.rank == 0 and num_ranged < len(streamed)))
    wanted = None if reads_for_others else (shards.shard_index,)
    alone = read_plan.transport == "local" and shards.num_shards == shards.world_size and device.type == "cpu"
    fits = [item.layout.num_shards > 0 and item.wire_dtype == item.layout.dtype for item in streamed]
    first_bytes = _bucket_bytes(loading, read_plan, shards, alone and all(fits[:num_ranged]))
    rest_bytes = loading.bucket_bytes or BUCKET_BYTES
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
    proposal: Proposal, error: Exception | None, loading: Loading
) -> tuple[Outline, list[FileVisibility], tuple[CheckpointFile, ...]]:
    """Receive rank 0's outline, and exchange digests and visibility of files; collective.

    Returns:
        The outline, the visibility of the files on each rank (empty if not needed), and the files of this rank.
    """
    # Every rank calls this, after an error too, where rank 0 sends `None`: the others would wait in the broadcast.
    received = broadcast_json(None if proposal.outline is None else vars(proposal.outline))
    outline = None if received is None else Outline.from_json(received)
    visibility: FileVisibility | None = None
    found: tuple[CheckpointFile, ...] = ()
    if outline is not None and outline.file_locations is not None:
        visibility, found = check_visibility(loading, FileLocations.from_json(outline.file_locations))
    # Before any data collective: ranks with different plans would send and receive different sizes, and hang.
    answers = agree(error, (proposal.digests, None if visibility is None else asdict(visibility)))
    _compare_ranks([digests for digests, _ in answers])
    assert outline is not None, "rank 0 said why there is none"
    return outline, [FileVisibility(**value) for _, value in answers if value is not None], found


def _all_extents(match: CheckpointMatch | None, outline: Outline) -> Mapping[str, Extents]:
    """Return FQN → extents; empty on ranks that do not need them."""
    if match is not None:
        return {fqn: extents_of(match.checkpoint, match.keys.targets[fqn]) for fqn, _ in outline.tensors}
    if outline.extents is None:
        return {}
    return {fqn: extents_from_json(item) for (fqn, _), item in zip(outline.tensors, outline.extents, strict=True)}


def _bucket_bytes(loading: Loading, read_plan: ReadPlan, shards: ShardMap, straight: bool) -> int:
    """Return the size of a bucket. Parts of ranks that all read for themselves share only the bucket's number."""
    if read_plan.transport != "local":
        return loading.bucket_bytes or BUCKET_BYTES
    return shards.num_shards * (loading.bucket_bytes or (STRAIGHT_BYTES if straight else BUCKET_BYTES))


def _mapped(
    planned: Sequence[PlannedTensor], proposal: Proposal, extents: Mapping[str, Extents]
) -> list[tuple[TensorLayout, Extent]]:
    """Return the tensors that can be mapped. Each file range is mapped for one tensor, as writes are separate."""
    mapped: dict[tuple[int, int], tuple[TensorLayout, Extent]] = {}
    for item in planned:
        extent = mappable(item.layout, item.wire_dtype, extents[item.layout.fqn])
        if extent is not None and item.layout.fqn in proposal.on_meta:
            mapped.setdefault((extent.file, extent.offset), (item.layout, extent))
    return list(mapped.values())


def _match(module: nn.Module, origin: Origin, loading: Loading) -> CheckpointMatch:
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
    initialise = keys.initialise if state_dict is None else _settable(module, keys, loading)
    kept = () if adapters is None else tuple(sorted(adapters.added.difference(keys.targets, initialise)))
    if (new := [name for name in keys.missing if name in keys.heads]) and not opened.is_random:
        warned += (f"{opened.path} has no {', '.join(new)}: initialised, and of no use before a training",)
    cure, own = keys.cure, [name for name in keys.missing if name not in keys.initialise and state_dict is None]
    if own:  # of a module that is real: a head that was trained, of which no checkpoint says anything
        keeps = f"keeps the model's own {', '.join(own[:4])}{', ...' if own[4:] else ''}, with what was trained of it"
        warned += (f"a load of {opened.path} {keeps}: missing there",)
        cure = cure or f"strict=False accepts missing or unexpected keys, and {keeps}; nothing is changed now"
    match = CheckpointMatch(opened, keys, state_dict, initialise, manifest, kept, warned)
    if problems := _problems(module, match, loading):
        raise misfit(opened.path, problems, cure)
    return match


def _settable(module: nn.Module, keys: KeyMap, loading: Loading) -> tuple[str, ...]:
    """Return the tensors to initialise in a load of a state dict; parameters that it lacks stay, as with torch.

    These are non-persistent buffers on meta, which no state dict holds. A buffer without a rule is an error under
    `strict`, and otherwise stays on meta: the module's owner may set it.
    """
    names = tuple(name for name in keys.initialise if name not in keys.missing)
    if loading.strict or not missing_rules(module, names, loading.seed):
        return names
    return tuple(name for name in names if not missing_rules(module, [name], loading.seed))


def _manifest(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest beside the files, after a check against their headers."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        what = f"verify='full' needs the {MANIFEST_NAME} that raysharding's saves hold, and there is none: load with "
        raise CheckpointError(what + "verify='finite', or save it once with raysharding", path=checkpoint.path)
    check_manifest(manifest, checkpoint)
    return manifest


def _outline(match: CheckpointMatch, loading: Loading, layouts: Mapping[str, TensorLayout]) -> Outline:
    keys = match.keys
    # File order, so that the stream reads the disk forward.
    targets = sorted(keys.targets.values(), key=lambda target: _file_position(match.checkpoint, target))
    cut = {target.fqn for target in targets if target.runs is not None and layouts[target.fqn].num_shards}
    ranged = [target for target in targets if target.fqn in cut]
    computed = [target for target in targets if target.fqn not in cut]
    extents = None
    if get_world_size() > 1 and not rank_0_reads(loading):
        extents = tuple(extents_to_json(extents_of(match.checkpoint, target)) for target in (*ranged, *computed))
    is_base = match.kept and match.checkpoint.adapter is None and match.state_dict is None
    return Outline(
        checkpoint=match.checkpoint.path,
        checkpoint_bytes=match.checkpoint.num_bytes,
        file_locations=asdict(FileLocations.of(match.checkpoint.files)) if match.checkpoint.files else None,
        extents=extents,
        tensors=tuple((target.fqn, _wire_name(target)) for target in (*ranged, *computed)),
        num_ranged=len(ranged),
        initialise=match.initialise,
        missing=keys.missing,
        unexpected=keys.unexpected,
        ignored=keys.ignored,
        tied=tuple(keys.aliases),
        converted=tuple(f"{fqn}: {target.operations}" for fqn, target in keys.targets.items() if target.runs is None),
        kept=match.kept,
        warnings=match.warnings,
        base=path_of(match.checkpoint) if is_base else None,
    )


def _wire_name(target: Target) -> str:
    return str(wire_dtype(target.source_dtype, target.dtype)).removeprefix("torch.")


def _file_position(checkpoint: Checkpoint, target: Target) -> tuple[int, int]:
    """Return file and offset of the first source of a target."""
    info = checkpoint.tensors[target.sources[0]]
    return info.file, info.offset


def _problems(module: nn.Module, match: CheckpointMatch, loading: Loading) -> list[str]:
    """Return all problems of the load, a line each."""
    keys, is_strict = match.keys, loading.strict and not match.checkpoint.is_random
    # A state dict may have nothing of the model under `strict=False`, as with torch.
    is_torchs = match.state_dict is not None and not is_strict
    problems = list(keys.problems) if is_torchs else keys.mismatches(strict=is_strict)
    if is_strict and match.state_dict is not None:
        problems += match.state_dict.mismatches
    refused = {*keys.missing} - keys.heads if is_strict else set()
    problems += missing_rules(module, [name for name in match.initialise if name not in refused], loading.seed)
    if keys.doubled:
        # Headers do not show whether two tied names have the same value.
        targets = {**keys.targets, **{target.fqn: target for target in keys.doubled}}
        extents = {fqn: extents_of(match.checkpoint, target) for fqn, target in targets.items()}
        with FileReader(match.checkpoint.files) as reader:
            source = make_source(match, reader, extents, targets, loading.bucket_bytes or BUCKET_BYTES)
            problems += differing_ties(keys, partial(_read_elements, source))
    return problems


def make_source(
    match: CheckpointMatch | None,
    reader: FileReader,
    extents: Mapping[str, Extents],
    targets: Mapping[str, Target],
    cache_bytes: int,
    checksums: Checksums | None = None,
    piece_bytes: int | None = None,
) -> TensorSource:
    """Return the source of a load on this rank: its files, or on rank 0 a state dict."""
    tensors = {} if match is None else match.checkpoint.tensors
    if match is not None and match.state_dict is not None:
        return StateDictSource(tensors, extents, targets, cache_bytes, match.state_dict)
    return CheckpointSource(tensors, extents, targets, cache_bytes, reader, checksums, piece_bytes)


def _read_elements(source: TensorSource, fqn: str, start: int, stop: int, out: torch.Tensor) -> None:
    source.read([Request(fqn, start, stop, out.dtype, as_memory(out))])


def _compare_ranks(every: Sequence[Sequence[str]]) -> None:
    for index, what in enumerate(("built another model", "were given other options")):
        differing = [str(rank) for rank, digests in enumerate(every) if digests[index] != every[0][index]]
        if differing:
            raise PlanError(
                f"ranks {', '.join(differing)} {what} than rank 0: make the model and `Loading` the same on every rank"
            )
