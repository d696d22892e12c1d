"""Figures from loads: medians over rounds, and ratios within each round.

Also formats the results of a benchmark as readable lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from raysharding.units import GIB, MIB
from tests.bench.rounds import Load, Operations, Results

OURS = ("auto", "local", "scatter", "scatter_wire", "broadcast", "mmap", "mmap_forward")
"""raysharding's own arms."""
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
    ("auto", "read_threads_floor"),
    ("local", "pinned_floor"),
    ("local", "read_threads_floor"),
    ("safetensors_cuda", "auto"),
)
"""(arm, base) pairs whose ratios end a table, if both were measured."""
GROWTHS = (("scatter", "scatter_floor"), ("scatter_wire", "scatter_floor"))
"""(arm, floor) pairs whose growth with the world size is compared."""


@dataclass(frozen=True)
class Figure:
    """A median over rounds, with minimum and maximum."""

    median: float
    low: float
    high: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Return the figure of one or more values."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class NamedFigure:
    """A ratio with its name, mode and world size."""

    mode: str
    world_size: int
    """World size; for a growth, the larger one."""
    name: str
    figure: Figure


@dataclass(frozen=True)
class Group:
    """The counted loads of one mode and world size."""

    mode: str
    world_size: int
    loads: Mapping[str, Sequence[Load]]
    """Arm → loads, in order of the rounds."""

    def seconds(self, arm: str) -> Figure:
        """Return an arm's time in seconds."""
        return Figure.of([load.seconds for load in self.loads[arm]])

    def ratio(self, arm: str, base: str) -> Figure | None:
        """Return the time of `arm` ÷ the time of `base`, within each round; `None` if no round has both."""
        values = [own / other for own, other in self._pairs(arm, base)]
        return Figure.of(values) if values else None

    def _pairs(self, arm: str, base: str) -> Iterator[tuple[float, float]]:
        bases = {load.round: load.seconds for load in self.loads.get(base, ())}
        for load in self.loads.get(arm, ()):
            if load.round in bases:
                yield load.seconds, bases[load.round]


def groups(loads: Sequence[Load]) -> list[Group]:
    """Group the counted loads by mode and world size."""
    found: dict[tuple[str, int], dict[str, list[Load]]] = {}
    for load in loads:
        # In the order of the first round, even if that round does not count.
        own = found.setdefault((load.mode, load.world_size), {}).setdefault(load.arm, [])
        if load.counted:
            own.append(load)
    counted = {key: {arm: own for arm, own in arms.items() if own} for key, arms in found.items()}
    return [Group(mode, size, arms) for (mode, size), arms in counted.items() if arms]


def named_ratios(loads: Sequence[Load]) -> list[NamedFigure]:
    """Return those of `RATIOS` and `GROWTHS` that the loads allow."""
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
    """Return operations, ratios and skipped arms, each as a line of JSON. `load_line` writes the loads."""
    lines = [json.dumps({"kind": "operations", **asdict(item)}) for item in results.operations]
    lines += [json.dumps({"kind": "ratio", **asdict(item)}) for item in named_ratios(results.loads)]
    for (world_size, arm), why in results.skipped.items():
        lines.append(json.dumps({"kind": "left out", "world_size": world_size, "arm": arm, "why": why}))
    return lines


NOTES = """\
wire: bytes sent over the ranks' own loopback, headers included. read: bytes that read calls returned, all ranks,
without memory maps. touched: memory faulted in, all ranks. x: multiples of the checkpoint's bytes. ops: collectives
that rank 0 entered + messages between two ranks. above: peak of host memory above the shard, of the largest rank, in
MiB, in fresh processes. Ratios are taken within each round: median (min – max)."""


def table(results: Results, checkpoint_bytes: int, base: str) -> str:
    """Return the whole table: a block for each mode and world size, the ratios, skipped arms, and the notes.

    Args:
        results: Results of the benchmark.
        checkpoint_bytes: Bytes of the checkpoint's tensors.
        base: Arm that a column of ratios divides by, if it was measured; otherwise the first arm.
    """
    lines: list[str] = []
    for group in groups(results.loads):
        operations = {item.arm: item for item in results.operations if item.world_size == group.world_size}
        lines += [*_block(group, operations, checkpoint_bytes, base), ""]
    for item in named_ratios(results.loads):
        lines.append(f"{item.mode} W={item.world_size}  {item.name}: {_ranged(item.figure)}")
    lines += [f"left out: W={size} {arm}: {why}" for (size, arm), why in results.skipped.items()]
    if any(load.wire_bytes is None for load in results.loads):
        lines.append("wire: not counted, because this needs root (a network namespace of the ranks' own)")
    return "\n".join((*lines, NOTES))


def _block(group: Group, operations: dict[str, Operations], checkpoint_bytes: int, base: str) -> list[str]:
    base = base if base in group.loads else next(iter(group.loads))
    num_rounds = max(len(loads) for loads in group.loads.values())
    title = f"{group.mode}, {group.world_size} ranks, {num_rounds} rounds, {checkpoint_bytes / MIB:,.0f} MiB"
    header = (
        f"{'arm':<20}{'s':>7}  {'min – max':>13}  {'÷ ' + base:>14}  {'min – max':>13}  {'GiB/s':>6}{'wire x':>8}"
        f"{'read x':>8}{'touched x':>11}{'above':>8}{'ops':>13}"
    )
    return [title, header, *(_row(group, arm, base, operations.get(arm), checkpoint_bytes) for arm in group.loads)]


def _row(group: Group, arm: str, base: str, operations: Operations | None, checkpoint_bytes: int) -> str:
    loads = group.loads[arm]
    seconds, ratio = group.seconds(arm), group.ratio(arm, base)
    wire = [load.wire_bytes for load in loads if load.wire_bytes is not None]
    read = max(load.read_bytes for load in loads) / checkpoint_bytes
    touched = max(load.fault_bytes for load in loads) / checkpoint_bytes
    above = [load.extra_bytes for load in loads if load.extra_bytes is not None]
    columns = (
        f"{arm:<20}{seconds.median:>7.3f}  {_range(seconds):>13}  ",
        f"{ratio.median:>14.2f}  {_range(ratio):>13}  " if ratio is not None else f"{'':>31}",
        f"{checkpoint_bytes / seconds.median / GIB:>6.2f}",
        f"{max(wire) / checkpoint_bytes:>8.3f}" if wire else f"{'-':>8}",
        f"{read:>8.3f}{touched:>11.3f}",
        f"{median(above) / MIB:>8,.0f}" if above else f"{'-':>8}",
        f"{operations.collectives:>6} + {operations.messages:<5}" if operations else f"{'-':>13}",
    )
    return "".join(columns).rstrip()


def _range(figure: Figure) -> str:
    return f"{figure.low:.2f} – {figure.high:.2f}"


def _ranged(figure: Figure) -> str:
    return f"{figure.median:.2f} ({_range(figure)}), {figure.num_rounds} rounds"


def progress_line(load: Load, num_rounds: int) -> str:
    """Return one load as a line of progress."""
    where = f"round {load.round}/{num_rounds}" if load.counted else "warm-up"
    return f"{load.mode} W={load.world_size} {where}: {load.arm} {load.seconds:.3f} s"


def conclusion(results: Results) -> list[str]:
    """A line for each warm world size: `auto`'s transport, its speed, ratio to the floor, and any faster transport."""
    lines: list[str] = []
    for group in (group for group in groups(results.loads) if group.mode == "warm"):
        autos = (load for load in results.loads if (load.arm, load.world_size) == ("auto", group.world_size))
        report = next((load.report for load in autos if load.report), None)
        if report is None:
            continue
        name = report["transport"]
        line = f"auto takes {name} at W={group.world_size} ({report['transport_reason']})"
        if name in group.loads:
            seconds = group.seconds(name).median
            line += f": {seconds:.2f} s, {report['checkpoint_bytes'] / seconds / GIB:.2f} GiB/s"
            for floor in (base for arm, base in RATIOS if arm == name and base.endswith("_floor")):
                if (ratio := group.ratio(name, floor)) is not None:
                    line += f", {ratio.median:.2f} × the {floor.replace('_', ' ')} ({_range(ratio)})"
            transports = [arm for arm in group.loads if arm in OURS and not arm.startswith("mmap")]
            fastest = min(transports, key=lambda arm: group.seconds(arm).median)
            if fastest != name:
                line += f"; here {fastest} was faster, {group.seconds(fastest).median:.2f} s"
        lines.append(line)
    return lines
