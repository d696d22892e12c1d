"""`map_keys`: maps checkpoint tensors to parameters and buffers, and lists all mismatches.

`differing_ties`: finds tied tensors for which the checkpoint holds two different values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from raysharding.checkpoint.format import TensorInfo
from raysharding.errors import PlanError
from raysharding.models.block_tensor import MAX_RUNS, BlockTensor, Run
from raysharding.models.conversion import Conversion, Routing, declared_ties, part_outside_base, route
from raysharding.models.stand_in import clean_name

Kind = Literal["parameter", "buffer"]

MIN_RUN_BYTES = 4096
"""Mean length of ranges in bytes below which reading ranges costs more than reading and converting whole sources."""
FEW_RUNS = 256
"""Number of ranges up to which a tensor is read as ranges, however short."""


@dataclass(frozen=True)
class Target:
    """One parameter or buffer, and its sources in the checkpoint."""

    fqn: str
    """Canonical FQN."""
    shape: tuple[int, ...]
    """Full shape."""
    dtype: torch.dtype
    """dtype in the module."""
    kind: Kind
    """`"parameter"` or `"buffer"`."""
    source_dtype: torch.dtype
    """dtype of the source values: the file's dtype; the widest, if the sources' dtypes differ."""
    sources: tuple[str, ...]
    """Checkpoint keys of the sources."""
    runs: tuple[Run, ...] | None
    """Contiguous ranges that fill the target, ascending in the target; `None` if `convert` must compute the value."""
    operations: str = ""
    """transformers' operations on the sources, such as `MergeModulelist+Concatenate`; empty for a plain copy."""
    _conversion: Conversion | None = field(default=None, repr=False, compare=False)

    def convert(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Compute the value with transformers' own operations. Called only if `runs` is `None`.

        Args:
            read: Checkpoint key → whole tensor on CPU, in the file's dtype. Called once for every source; all sources
                are in memory at the same time.

        Returns:
            The full tensor on CPU, contiguous, in `source_dtype`.
        """
        assert self.runs is None, f"{self.fqn}: the ranges are known"
        assert self._conversion is not None, f"{self.fqn}: only a conversion has no ranges"
        value = self._conversion.run(lambda key: read(key).to(self.source_dtype))[self.fqn]
        assert isinstance(value, torch.Tensor), f"{self.fqn}: tensors in, tensors out"
        assert tuple(value.shape) == self.shape, f"{self.fqn}: planned as {self.shape}, came as {tuple(value.shape)}"
        return value.contiguous()


@dataclass(frozen=True)
class KeyMap:
    """Mapping of a checkpoint to a module. Equal on every rank that has the same module and the same headers."""

    targets: Mapping[str, Target]
    """Canonical FQN → target with its sources, in module order."""
    aliases: Mapping[str, str]
    """Other FQNs of tied tensors → canonical FQN."""
    missing: tuple[str, ...]
    """Canonical FQNs of parameters and persistent buffers without a source, except those in `ignored`."""
    unexpected: tuple[str, ...]
    """Checkpoint keys without a target, except those in `ignored`."""
    ignored: tuple[str, ...]
    """FQNs and checkpoint keys that the model allows to be missing or unexpected: those that its class names, keys of
    non-persistent buffers, second names of tied tensors."""
    initialise: tuple[str, ...]
    """Canonical FQNs of tensors on meta without a source, which need an initial value: missing ones, ignored missing
    ones, non-persistent buffers. Tensors that are already real are not included and keep their values."""
    problems: tuple[str, ...]
    """One line for each mismatch that is an error even under `strict=False`."""
    heads: frozenset[str] = frozenset()
    """Those of `missing` and `unexpected` that are no mismatch: heads that only one of two model classes has."""
    cure: str = ""
    """Advice if the names in the files have a prefix too much or too little."""
    doubled: tuple[Target, ...] = ()
    """Targets for second names of tied tensors, if the checkpoint holds both names. A rank that can read the files must
    check that the values are equal, with `differing_ties`."""

    def mismatches(self, *, strict: bool) -> list[str]:
        """Return the mismatches that headers show, one line each.

        Args:
            strict: Include missing and unexpected keys, without `heads`, not only `problems`. A checkpoint of which the
                model takes nothing is a mismatch in any case.
        """
        if not strict:
            foreign = self.unexpected if not self.targets else ()
            none = [f"none of its {len(foreign)} keys is the model's: {foreign[0]}, ..."] if foreign else []
            return [*self.problems, *none]
        both = (("missing from", self.missing), ("unexpected in", self.unexpected))
        lines = [f"{what} the checkpoint: {name}" for what, names in both for name in names if name not in self.heads]
        return [*self.problems, *lines]


def misfit(path: str, problems: Sequence[str], cure: str = "") -> PlanError:
    """Return the error for a checkpoint at `path` that does not fit its model.

    Args:
        path: The checkpoint.
        problems: A line each.
        cure: What to change, if it is known. Default: `strict=False`, for keys that it accepts.
    """
    if not cure and any(line.startswith(("missing from", "unexpected in")) for line in problems):
        cure = "strict=False accepts missing or unexpected keys"
    why = f" ({cure})" if cure else ""
    return PlanError(f"{path} does not fit the model; {len(problems)} problems{why}:", problems=problems)


@dataclass(frozen=True)
class _Entry:
    """A tensor of the module."""

    tensor: torch.Tensor
    kind: Kind
    persistent: bool


@dataclass
class _Feed:
    """Source of one target: a whole tensor of the checkpoint, or the result of a conversion."""

    sources: tuple[str, ...]
    conversion: Conversion | None = None
    result: BlockTensor | torch.Tensor | None = None
    """Result of the conversion; a tensor on meta, if the conversion takes more than blocks."""


def map_keys(
    module: nn.Module,
    tensors: Mapping[str, TensorInfo],
    key_mapping: Mapping[str, str] | None,
    config: Mapping[str, Any] | None = None,
) -> KeyMap:
    """Match a checkpoint's headers to a module; reads no tensor.

    A tensor without a source is initialised only if it is on meta. In a module that is already real (a second load
    into the same module) such a tensor keeps its value: it is in `missing`, but not in `initialise`.

    Args:
        module: Plain or transformers, on meta or real, before or after `fully_shard`.
        tensors: Checkpoint key → header entry.
        key_mapping: Regular expression on checkpoint keys → replacement, applied before the model's own mapping.
        config: config.json of the checkpoint: what of the model is a new head. Default: nothing is.

    Returns:
        The map, which lists mismatches instead of raising them.

    Raises:
        PlanError: `key_mapping` is malformed.
    """
    part = part_outside_base(module, config)
    keys = _Mapper(module, tensors, key_mapping).map(part)
    fits = keys.heads.issuperset((*keys.missing, *keys.unexpected))
    for prefix, cure in () if fits else _prefix_mappings(keys).items():
        cured = _Mapper(module, tensors, {**(key_mapping or {}), **cure}).map(part)
        if 2 * (len(cured.missing) + len(cured.unexpected)) < len(keys.missing) + len(keys.unexpected):
            whose = "the model's names, and not the keys," if "^" in cure else "the keys, and not the model's names,"
            return replace(keys, cure=f"{whose} begin with {prefix!r}: give Loading(key_mapping={cure!r})")
    return keys


def _prefix_mappings(keys: KeyMap) -> dict[str, dict[str, str]]:
    """Return prefix → `key_mapping` that may cure missing names and unexpected keys that differ by this prefix."""
    mappings: dict[str, dict[str, str]] = {}
    for key in keys.unexpected[:8]:
        for dot in (index for index, letter in enumerate(key, 1) if letter == "."):
            if any(f".{name}".endswith(f".{key[dot:]}") for name in keys.missing):
                mappings[key[:dot]] = {"^" + re.escape(key[:dot]): ""}
        mappings |= {name[: -len(key)]: {"^": name[: -len(key)]} for name in keys.missing if name.endswith(f".{key}")}
    return mappings


class _Mapper:
    """State of one `map_keys` call."""

    def __init__(
        self, module: nn.Module, tensors: Mapping[str, TensorInfo], key_mapping: Mapping[str, str] | None
    ) -> None:
        self._tensors = tensors
        self._entries = _entries(module)
        self._aliases = _aliases(self._entries)
        self._ties = declared_ties(module)
        self._vocab_size = getattr(getattr(module, "config", None), "vocab_size", None)
        held = {fqn: entry.tensor for fqn, entry in self._entries.items() if entry.persistent}
        self._routing: Routing = route(module, held, tensors, key_mapping)
        self._feeds: dict[str, _Feed] = {}
        self._problems: list[str] = []
        self._ignored: list[str] = []
        self._unexpected: list[str] = []
        self._doubled: list[Target] = []

    def map(self, part: Callable[[str], str | None]) -> KeyMap:
        for fqn, keys in self._routing.renamed.items():
            self._feed(fqn, _Feed((keys[0],)))
            if len(keys) > 1:
                self._problems.append(f"{fqn}: {len(keys)} checkpoint keys map to it: {', '.join(map(repr, keys))}")
        for conversion in self._routing.conversions.values():
            self._feed_converted(conversion)
        self._sort_unmatched()
        self._resolve_aliases()
        self._copy_declared_ties()
        self._copy_trained()
        targets = self._targets()
        missing, initialise = self._missing()
        heads = self._heads(missing, part)  # may find problems
        return KeyMap(
            targets=targets,
            aliases=self._aliases,
            missing=tuple(missing),
            unexpected=tuple(self._unexpected),
            ignored=tuple(dict.fromkeys(self._ignored)),
            initialise=tuple(initialise),
            problems=tuple(self._problems),
            heads=heads,
            doubled=tuple(alias for alias in self._doubled if self._aliases[alias.fqn] in targets),
        )

    def _feed(self, fqn: str, feed: _Feed) -> None:
        if fqn in self._feeds:
            both = ", ".join(map(repr, (*self._feeds[fqn].sources[:2], *feed.sources[:2])))
            self._problems.append(f"{fqn}: has more than one source in the checkpoint, among them {both}")
            return
        self._feeds[fqn] = feed

    def _feed_converted(self, conversion: Conversion) -> None:
        """Run a conversion on blocks, or on meta tensors if it needs more than blocks, to determine its results."""
        infos = {key: self._tensors[key] for key in conversion.sources}
        try:
            results = conversion.run(lambda key: BlockTensor.of_source(key, infos[key].shape, infos[key].dtype))
        except Exception:  # noqa: BLE001 - transformers' operations raise any type
            # Not an error yet: the operations may need tensors. A failure on meta tensors is reported as a problem.
            wide = _widest([info.dtype for info in infos.values()])
            try:
                results = conversion.run(lambda key: torch.empty(infos[key].shape, dtype=wide, device="meta"))
            except Exception as exc:  # noqa: BLE001 - transformers' operations raise any type
                listed = ", ".join(f"{key!r} {tuple(info.shape)}" for key, info in list(infos.items())[:4])
                self._problems.append(
                    f"{conversion.layer_name}: {conversion.operations} of {len(infos)} checkpoint tensors fails "
                    f"({listed}{', ...' if len(infos) > 4 else ''}): {exc}"
                )
                return
        for fqn, value in results.items():
            if fqn not in self._entries:
                self._problems.append(f"{fqn}: a result of {conversion.operations}, but the model has no such tensor")
                continue
            self._feed(fqn, _Feed(conversion.sources, conversion, value))

    def _sort_unmatched(self) -> None:
        """Collect unexpected keys, and as ignored those that the model declares unneeded."""
        pattern = self._routing.ignore_unexpected
        for key, renamed in self._routing.unmatched.items():
            entry = self._entries.get(renamed) or self._entries.get(key)
            non_persistent = entry is not None and not entry.persistent
            allowed = pattern is not None and pattern.search(renamed) is not None
            (self._ignored if non_persistent or allowed else self._unexpected).append(key)

    def _resolve_aliases(self) -> None:
        """Feed each tied tensor once: from its canonical name, else from the first other name in the checkpoint.

        Other names that the checkpoint holds must match too, and are kept for `differing_ties`.
        """
        for alias, canonical in self._aliases.items():
            feed = self._feeds.pop(alias, None)
            if feed is None:
                continue
            if canonical in self._feeds:
                self._ignored.extend(feed.sources)
                second = self._target(alias, self._entries[alias], feed)
                self._doubled += [second] if second is not None else []
            else:
                self._feeds[canonical] = feed

    def _copy_declared_ties(self) -> None:
        """Feed both tensors of a declared tie from the same source if the model does not share the tensor."""
        for one, other in self._ties.items():
            pair = [self._aliases.get(name, name) for name in (one, other)]
            if pair[0] == pair[1] or not all(name in self._entries for name in pair):
                continue
            for empty, full in (pair, pair[::-1]):
                if empty not in self._feeds and full in self._feeds:
                    self._feeds[empty] = self._feeds[full]

    def _copy_trained(self) -> None:
        """Feed a trained copy of a module (`modules_to_save`), or of some rows, from the module's own sources."""
        copied = {copy: (original, None) for copy, original in self._routing.copies.items()}
        for copy, (original, rows) in {**copied, **self._routing.rows}.items():
            original = self._aliases.get(original, original)
            if not self._entries[copy].tensor.is_meta:
                continue  # the copy is real and may have been trained; it keeps its value, as adapters do
            if copy not in self._feeds and copy not in self._aliases and original in self._feeds:
                self._feeds[copy] = feed = self._feeds[original]
                if rows is not None:
                    info = self._tensors[feed.sources[0]]
                    whole = BlockTensor.of_source(info.name, info.shape, info.dtype)
                    table: Any = whole if feed.result is None else feed.result
                    parts = torch.cat([table.narrow(0, row, 1) for row in rows])
                    self._feeds[copy] = _Feed(feed.sources, None, parts)

    def _targets(self) -> dict[str, Target]:
        targets = {}
        for fqn, entry in self._entries.items():
            feed = self._feeds.get(fqn)
            if feed is not None and (target := self._target(fqn, entry, feed)) is not None:
                targets[fqn] = target
        return targets

    def _target(self, fqn: str, entry: _Entry, feed: _Feed) -> Target | None:
        infos = [self._tensors[key] for key in feed.sources]
        wanted, wide = tuple(entry.tensor.shape), _widest([info.dtype for info in infos])
        shape = infos[0].shape if feed.result is None else tuple(feed.result.shape)
        operations = feed.conversion.operations if feed.conversion is not None else ""
        if shape != wanted or category(wide) != category(entry.tensor.dtype):
            self._problems.append(_misfit_of(fqn, entry, feed, shape, wide) + self._vocabulary(shape, wanted))
            return None
        runs = _runs(feed, wanted, wide)
        sources = feed.sources
        if runs is not None and feed.conversion is not None:
            sources = tuple(dict.fromkeys(run.source for run in runs)) or feed.sources
        return Target(
            fqn, wanted, entry.tensor.dtype, entry.kind, wide, sources, runs, operations, _conversion=feed.conversion
        )

    def _vocabulary(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        """Return what to change if a table of the checkpoint has another number of tokens than config.json says."""
        if found[1:] != wanted[1:] or not found or wanted[0] != self._vocab_size:
            return ""
        return (
            f"; {found[0]} tokens, by added tokens and resize_token_embeddings, where config.json has "
            f"vocab_size={wanted[0]}: give config_overrides={{'vocab_size': {found[0]}}}, or correct config.json"
        )

    def _heads(self, missing: Sequence[str], part: Callable[[str], str | None]) -> frozenset[str]:
        """Return the new heads' FQNs, and the keys of heads that the model lacks."""
        base, trained = self._routing.base, set(self._routing.copies.values())
        held = {None, *(part(base.get(fqn, fqn)) for fqn in self._feeds)}
        # A head of which the files hold a part is incomplete; one that is real was loaded or trained: it is not new.
        new = [fqn for fqn in missing if self._entries[fqn].tensor.is_meta and part(base.get(fqn, fqn)) not in held]
        self._problems += [
            f"{base.get(fqn, fqn)}: new, and saves of adapters would not hold it: LoraConfig(modules_to_save=[...])"
            for fqn in new
            if base and fqn not in trained
        ]
        return frozenset([*new, *(key for key in self._unexpected if part(self._routing.unmatched[key]))])

    def _missing(self) -> tuple[list[str], list[str]]:
        missing: list[str] = []
        initialise: list[str] = []
        refused = {line.split(":", 1)[0] for line in self._problems}
        for fqn, entry in self._entries.items():
            if fqn in self._aliases or fqn in self._feeds:
                continue
            if entry.persistent and fqn not in refused:
                pattern, name = self._routing.ignore_missing, self._routing.base.get(fqn, fqn)
                allowed = fqn in self._routing.optional or (pattern is not None and pattern.search(name) is not None)
                (self._ignored if allowed else missing).append(fqn)
            if entry.tensor.device.type == "meta":
                initialise.append(fqn)
        return missing, initialise


def _misfit_of(fqn: str, entry: _Entry, feed: _Feed, found: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the line for a target whose shape or kind of dtype differs from its source's."""
    count = len(feed.sources)
    source = repr(feed.sources[0]) if count == 1 else f"{count} tensors, the first {feed.sources[0]!r}"
    wanted = tuple(entry.tensor.shape)
    if found == wanted:
        return f"{fqn}: the checkpoint's {source} is {dtype}, the model's {entry.kind} is {entry.tensor.dtype}"
    made = f" after {feed.conversion.operations}" if feed.conversion is not None else ""
    return f"{fqn}: the checkpoint's {source} has shape {found}{made}, the model's {entry.kind} {wanted}"


def _entries(module: nn.Module) -> dict[str, _Entry]:
    """Return FQN → entry, with all names of shared tensors; parameters and buffers of one module are adjacent."""
    entries: dict[str, _Entry] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{found}." if (found := clean_name(prefix)) else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                entries[dot + name] = _Entry(parameter, "parameter", True)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                entries[dot + name] = _Entry(buffer, "buffer", name not in owner._non_persistent_buffers_set)
    return entries


def _aliases(entries: Mapping[str, _Entry]) -> dict[str, str]:
    canonical: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for fqn, entry in entries.items():
        first = canonical.setdefault(id(entry.tensor), fqn)
        if first != fqn:
            aliases[fqn] = first
    return aliases


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return a dtype that can represent all dtypes. Float8 has no type promotion, so it counts as float32."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    wide = [torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype for dtype in dtypes]
    return reduce(torch.promote_types, wide)


def category(dtype: torch.dtype) -> str:
    """Return the kind of a dtype's values. A load converts within a kind only."""
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype == torch.bool else "integer"


def _runs(feed: _Feed, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Run, ...] | None:
    num_elements = math.prod(shape)
    if feed.result is None:
        return (Run(feed.sources[0], 0, 0, num_elements),) if num_elements else ()
    if isinstance(feed.result, torch.Tensor):
        return None
    most = min(MAX_RUNS, max(FEW_RUNS, num_elements * dtype.itemsize // MIN_RUN_BYTES))
    runs = feed.result.runs(most if feed.conversion is not None else num_elements)  # rows are read one by one
    if runs is not None:
        assert sum(run.num_elements for run in runs) == num_elements, "blocks of equal shape fill the target"
    return runs


COMPARE_BYTES = 8 << 20
"""Bytes of each of the two values that are in memory at the same time."""

ReadElements: TypeAlias = Callable[[str, int, int, torch.Tensor], None]
"""`read(fqn, start, stop, out)`: fills the 1-D `out` with elements of the flattened target, in `out`'s dtype."""


def differing_ties(keys: KeyMap, read: ReadElements) -> tuple[str, ...]:
    """Compare the values of tied names that are both in the checkpoint. Called on the rank that reads the files.

    transformers does not tie a pair whose values differ, even if config.json ties it; here a difference is a mismatch,
    reported before anything is loaded. Values are compared in the module's dtype, up to the first difference.

    Args:
        keys: Result of `map_keys`.
        read: Reads elements of the targets in `keys.targets` and `keys.doubled`.

    Returns:
        One line for each pair that differs. Cost: both values are read once; 16 MiB of memory.
    """
    problems = []
    for second in keys.doubled:
        canonical = keys.aliases[second.fqn]
        if not _equal(second, canonical, read):
            sources = [", ".join(map(repr, target.sources[:2])) for target in (keys.targets[canonical], second)]
            problems.append(
                f"{second.fqn}: the model ties it to {canonical}, but the checkpoint's {sources[0]} and {sources[1]} "
                "hold different values: set tie_word_embeddings to false in config.json, or pass as model= a callable "
                "whose model does not tie them; if they should be tied, remove one of the two from the checkpoint"
            )
    return tuple(problems)


def _equal(second: Target, canonical: str, read: ReadElements) -> bool:
    num_elements = math.prod(second.shape)
    step = COMPARE_BYTES // second.dtype.itemsize
    buffers = [torch.empty(min(step, num_elements), dtype=second.dtype) for _ in range(2)]
    for start in range(0, num_elements, step):
        stop = min(start + step, num_elements)
        values = [buffer[: stop - start] for buffer in buffers]
        for fqn, value in zip((canonical, second.fqn), values, strict=True):
            read(fqn, start, stop, value)
        # Equal bytes first, because equal NaNs are no difference; then equal values, because 0 and -0 are none either.
        as_bytes = [value.view(torch.uint8) for value in values]
        if not torch.equal(*as_bytes) and not torch.equal(*values):
            return False
    return True
