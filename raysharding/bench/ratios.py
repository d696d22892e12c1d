"""Figures from loads: medians over rounds, and ratios taken round by round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from raysharding.bench.load import Load, Mode
from raysharding.bench.rounds import Results

RATIOS = (
    ("accelerate", "scatter"),
    ("torch", "scatter"),
    ("fastsafetensors", "scatter"),
    ("scatter", "scatter_floor"),
    ("scatter_wire", "scatter_floor"),
    ("broadcast", "scatter_floor"),
    ("local", "preadv_floor"),
    ("dcp", "local"),
    ("transformers_forward", "mmap_forward"),
    ("auto", "pinned_floor"),
    ("safetensors_cuda", "auto"),
)
"""(arm, base) pairs that a table ends with, as far as both were measured."""
GROWTHS = (("scatter", "scatter_floor"), ("scatter_wire", "scatter_floor"))
"""(arm, floor) pairs whose growth with the world size is compared."""


@dataclass(frozen=True)
class Figure:
    """A median over rounds, and its range."""

    median: float
    low: float
    high: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Of at least one value."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class NamedFigure:
    """A ratio, and what it is of."""

    mode: Mode
    world_size: int
    """The larger one, for a growth."""
    name: str
    figure: Figure


@dataclass(frozen=True)
class Group:
    """The loads that count of one mode and world size."""

    mode: Mode
    world_size: int
    loads: Mapping[str, Sequence[Load]]
    """Arm → loads, in order of the rounds."""

    def seconds(self, arm: str) -> Figure:
        """Time of an arm."""
        return Figure.of([load.seconds for load in self.loads[arm]])

    def ratio(self, arm: str, base: str) -> Figure | None:
        """Time of `arm` in times of `base`, round by round; `None` where no round has both."""
        values = [own / other for own, other in self._pairs(arm, base)]
        return Figure.of(values) if values else None

    def _pairs(self, arm: str, base: str) -> Iterator[tuple[float, float]]:
        bases = {load.round: load.seconds for load in self.loads.get(base, ())}
        for load in self.loads.get(arm, ()):
            if load.round in bases:
                yield load.seconds, bases[load.round]


def groups(loads: Sequence[Load]) -> list[Group]:
    """Loads by mode and world size, those that do not count left out."""
    found: dict[tuple[Mode, int], dict[str, list[Load]]] = {}
    for load in loads:
        # In the order of the first round, whether it counts or not.
        own = found.setdefault((load.mode, load.world_size), {}).setdefault(load.arm, [])
        if load.counted:
            own.append(load)
    counted = {key: {arm: own for arm, own in arms.items() if own} for key, arms in found.items()}
    return [Group(mode, size, arms) for (mode, size), arms in counted.items() if arms]


def named_ratios(loads: Sequence[Load]) -> list[NamedFigure]:
    """All of `RATIOS` and `GROWTHS` that the loads give."""
    made = groups(loads)
    found: list[NamedFigure] = []
    for group in made:
        for arm, base in RATIOS:
            if (figure := group.ratio(arm, base)) is not None:
                found.append(NamedFigure(group.mode, group.world_size, f"{arm} ÷ {base}", figure))
    for mode in {group.mode: None for group in made}:
        sizes = sorted((group for group in made if group.mode == mode), key=lambda group: group.world_size)
        for small, large in pairwise(sizes):
            found += _growths(small, large)
    return found


def _growths(small: Group, large: Group) -> Iterator[NamedFigure]:
    for arm, floor in GROWTHS:
        # (arm at large ÷ arm at small) ÷ (floor at large ÷ floor at small), each within one round.
        own, base = _growth(small, large, arm), _growth(small, large, floor)
        values = [own[index] / base[index] for index in own if index in base]
        if values:
            name = f"growth of {arm} from W={small.world_size} to {large.world_size} ÷ {floor}'s"
            yield NamedFigure(large.mode, large.world_size, name, Figure.of(values))


def _growth(small: Group, large: Group, arm: str) -> dict[int, float]:
    before = {load.round: load.seconds for load in small.loads.get(arm, ())}
    return {load.round: load.seconds / before[load.round] for load in large.loads.get(arm, ()) if load.round in before}


def json_lines(results: Results) -> list[str]:
    """Operations, ratios and what was left out, a line of JSON each; the loads have lines of their own."""
    lines = [json.dumps({"kind": "operations", **asdict(item)}) for item in results.operations]
    lines += [json.dumps({"kind": "ratio", **asdict(item)}) for item in named_ratios(results.loads)]
    for (world_size, arm), why in results.skipped.items():
        lines.append(json.dumps({"kind": "left out", "world_size": world_size, "arm": arm, "why": why}))
    return lines
