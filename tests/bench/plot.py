"""Plot of a benchmark's results as a PNG: seconds of each arm, floors as dashed lines."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tests.bench.ratios import OURS, Group, groups
from tests.bench.rounds import Results

OWN, PEER = "#2a6f97", "#a7b4bd"
FLOOR_COLOURS = ("#c1440e", "#6a4c93", "#2d6a4f")


def save_plot(path: str | PathLike[str], results: Results, title: str) -> None:
    """Draw one row for each mode and world size.

    Args:
        path: PNG to write.
        results: Results of the benchmark.
        title: Title of the plot.
    """
    rows = groups(results.loads)
    heights = [1.2 + 0.42 * len(_arms(group)) for group in rows]
    figure = Figure(figsize=(9, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=13)
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=heights)
    for group, (row,) in zip(rows, axes, strict=True):
        _draw_seconds(row, group)
    figure.savefig(path, dpi=130, format="png")


def _arms(group: Group) -> list[str]:
    """Return the arms that load, slowest first, which puts the fastest bar on top."""
    arms = [arm for arm in group.loads if not arm.endswith("_floor")]
    return sorted(arms, key=lambda arm: -group.seconds(arm).median)


def _colours(arms: Sequence[str]) -> list[str]:
    return [OWN if arm in OURS else PEER for arm in arms]


def _draw_seconds(axes: Axes, group: Group) -> None:
    arms = _arms(group)
    figures = [group.seconds(arm) for arm in arms]
    medians = [figure.median for figure in figures]
    whiskers = [[f.median - f.low for f in figures], [f.high - f.median for f in figures]]
    bars = axes.barh(
        arms, medians, xerr=whiskers, color=_colours(arms), error_kw={"elinewidth": 1, "capsize": 3}, height=0.65
    )
    axes.bar_label(bars, [f"{median:.2f} s" for median in medians], padding=5)
    handles: list[Artist] = []
    if len(set(_colours(arms))) > 1:
        handles += [Patch(color=colour, label=label) for colour, label in ((OWN, "raysharding"), (PEER, "others"))]
    floors = [arm for arm in group.loads if arm.endswith("_floor")]
    for floor, colour in zip(floors, FLOOR_COLOURS, strict=False):
        seconds = group.seconds(floor).median
        label = f"{floor.replace('_', ' ')} {seconds:.2f} s"
        handles.append(axes.axvline(seconds, color=colour, linestyle="--", linewidth=1.5, label=label))
    if handles:
        # The bars at the top are short, so the legend fits there.
        axes.legend(handles=handles, loc="upper right", fontsize=9, framealpha=0.9)
    num_rounds = max(len(loads) for loads in group.loads.values())
    axes.set_title(f"{group.mode}, {group.world_size} ranks: median of {num_rounds} rounds, min – max", fontsize=10)
    axes.set_xlabel("seconds to the last rank's shard")
    axes.set_xlim(0, max((figure.high for figure in figures), default=1.0) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
