"""The results of a benchmark in lines for people."""

from __future__ import annotations

from raysharding.bench.load import Load, Operations
from raysharding.bench.ratios import Figure, Group, groups, named_ratios
from raysharding.bench.rounds import Results

MIB = 1 << 20
NOTES = """\
wire: sent over the ranks' own loopback, headers included. read: returned by read calls, all ranks, without what comes
through a memory map. touched: memory faulted in, all ranks. x: times the checkpoint's bytes. extra: peak RssAnon +
RssShmem above the start and the shard, largest rank, fresh only. ops: collectives that rank 0 entered + messages
between two ranks. Ratios are taken round by round: median (min – max)."""


def table(results: Results, checkpoint_bytes: int, base: str) -> str:
    """Everything: a block for each mode and world size, the ratios, what was left out, and the notes.

    Args:
        results: What was measured.
        checkpoint_bytes: Bytes of the checkpoint's tensors.
        base: Arm that a column of ratios divides by, where it was measured.
    """
    lines: list[str] = []
    for group in groups(results.loads):
        operations = {item.arm: item for item in results.operations if item.world_size == group.world_size}
        lines += [*_block(group, operations, checkpoint_bytes, base), ""]
    for item in named_ratios(results.loads):
        lines.append(f"{item.mode} W={item.world_size}  {item.name}: {_ranged(item.figure)}")
    lines += [f"left out: W={size} {arm}: {why}" for (size, arm), why in results.skipped.items()]
    if any(load.wire_bytes is None for load in results.loads):
        lines.append("wire: not counted, for that needs root (a network namespace of the ranks' own)")
    return "\n".join((*lines, NOTES))


def _block(group: Group, operations: dict[str, Operations], checkpoint_bytes: int, base: str) -> list[str]:
    base = base if base in group.loads else next(iter(group.loads))
    num_rounds = max(len(loads) for loads in group.loads.values())
    title = f"{group.mode}, {group.world_size} ranks, {num_rounds} rounds, {checkpoint_bytes / MIB:,.0f} MiB"
    header = (
        f"{'arm':<20}{'s':>7}  {'min – max':>13}  {'÷ ' + base:>14}  {'min – max':>13}  {'GiB/s':>6}{'wire x':>8}"
        f"{'read x':>8}{'touched x':>11}{'extra MiB':>11}{'ops':>13}"
    )
    return [title, header, *(_row(group, arm, base, operations.get(arm), checkpoint_bytes) for arm in group.loads)]


def _row(group: Group, arm: str, base: str, operations: Operations | None, checkpoint_bytes: int) -> str:
    loads = group.loads[arm]
    seconds, ratio = group.seconds(arm), group.ratio(arm, base)
    wire = [load.wire_bytes for load in loads if load.wire_bytes is not None]
    extra = [load.extra_bytes for load in loads if load.extra_bytes is not None]
    read = max(load.read_bytes for load in loads) / checkpoint_bytes
    touched = max(load.fault_bytes for load in loads) / checkpoint_bytes
    columns = (
        f"{arm:<20}{seconds.median:>7.3f}  {_range(seconds):>13}  ",
        f"{ratio.median:>14.2f}  {_range(ratio):>13}  " if ratio is not None else f"{'':>31}",
        f"{checkpoint_bytes / seconds.median / (1 << 30):>6.2f}",
        f"{max(wire) / checkpoint_bytes:>8.3f}" if wire else f"{'-':>8}",
        f"{read:>8.3f}{touched:>11.3f}",
        f"{max(extra) / MIB:>11.0f}" if extra else f"{'-':>11}",
        f"{operations.collectives:>6} + {operations.messages:<5}" if operations else f"{'-':>13}",
    )
    return "".join(columns).rstrip()


def _range(figure: Figure) -> str:
    return f"{figure.low:.2f} – {figure.high:.2f}"


def _ranged(figure: Figure) -> str:
    return f"{figure.median:.2f} ({_range(figure)}), {figure.num_rounds} rounds"


def progress_line(load: Load, num_rounds: int) -> str:
    """One load, while it goes on."""
    number = load.round + (load.mode == "fresh")  # the first warm round does not count
    where = f"round {number}/{num_rounds}" if load.counted else "warm-up"
    return f"{load.mode} W={load.world_size} {where}: {load.arm} {load.seconds:.3f} s"
