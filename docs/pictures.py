"""Draws the pictures of docs/pages/images: what is shown on the pages is what ran.

    python docs/pictures.py                      # all of them: needs raysharding[plot], nbclient, and a chromium
    python docs/pictures.py load curve --out DIR # some of them, elsewhere

`load` samples the processes of four ranks while they load a checkpoint, `curve` trains a small model, `notebook` runs
cells in a kernel and has a browser draw their outputs. Seconds are those of the machine that drew the picture.
"""

from __future__ import annotations

import argparse
import html
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
import ray
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from nbclient import NotebookClient
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import Loading, LoadReport, ShardedModelGroup

IMAGES = Path(__file__).parent / "pages" / "images"
COLOURS = ("#2a6f97", "#c1440e", "#6a4c93", "#2d6a4f")
RANKS = 4
MIB = 1 << 20
STYLE = """body { font: 14px sans-serif; margin: 12px; overflow: hidden }
pre { font-size: 13px; margin: 0 } .cell { margin: 0 0 14px }
.in { background: #f5f5f5; border: 1px solid #ddd; padding: 6px 8px; margin-bottom: 6px } .out { padding-left: 10px }
table { border-collapse: collapse; font-size: 12px; margin: 4px 0 } td, th { padding: 3px 8px; text-align: right }
tr:nth-child(even) { background: #f5f5f5 }"""
CELLS = (
    """import ray, torch
from raysharding import ShardedModelGroup
ray.init("local", num_cpus=2, log_to_driver=False, logging_level="error")
group = ShardedModelGroup.from_checkpoint("llama", world_size=2, device="cpu", progress=False)
group.load_report""",
    "view = group.watch(refresh_s=0.2)",
    """numbers = torch.arange(512).remainder(60).reshape(32, 16).tolist()
rows = [{"input_ids": row, "labels": row} for row in numbers]
group.set_optimizer(torch.optim.AdamW, lr=3e-3)
group.fit(rows, batch_size=8, epochs=20, progress=False)""",
)


def write_model(path: Path, width: int, layers: int) -> None:
    """A Llama with random weights; its bytes grow with the square of `width`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)


@dataclass
class Series:
    """Samples of one process."""

    seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    def sample(self, pid: int) -> None:
        """Add what the kernel says about the process now: bytes that it read, and memory that no file backs."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        self.seconds.append(time.monotonic())
        self.read_bytes.append(int(io["rchar"]))
        self.memory_bytes.append(sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024)


def rank_pids() -> set[int]:
    """Return the process ids of this program's ranks on this machine."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name().startswith("ray::RankActor"):
                found.add(child.pid)
    return found


class Sampler(threading.Thread):
    """Samples this program's ranks, from the moment when all of them are there until `end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.series: dict[int, Series] = {}
        """Process id → its samples."""
        self._earlier = rank_pids()  # of a group that is ending
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        """Find the processes, then sample them every few milliseconds."""
        while len(self.series) < RANKS and not self._done.wait(0.05):
            self.series |= {pid: Series() for pid in rank_pids() - self._earlier - set(self.series)}
        while not self._done.wait(0.004):
            for pid, one in self.series.items():
                one.sample(pid)

    def end(self) -> dict[int, Series]:
        """Stop, and return the samples."""
        self._done.set()
        self.join()
        return self.series


def draw_load(out: Path, folder: Path, width: int) -> None:
    """Bytes read and memory of four ranks over the time of a load: one reader that scatters, and four that read."""
    write_model(folder / "large", width, 12)
    ways = {
        "scatter: rank 0 reads, the others receive": Loading(transport="scatter", num_readers=1),
        "local: each rank reads its own part": Loading(transport="local"),
    }
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.subplots(2, len(ways), sharex="col", sharey="row")
    for column, (title, loading) in enumerate(ways.items()):
        sampler = Sampler()
        try:
            with ShardedModelGroup.from_checkpoint(
                folder / "large", world_size=RANKS, device="cpu", loading=loading, progress=False
            ) as group:
                series = sampler.end()
                report = group.load_report
                assert report is not None, "the group has loaded"
                draw_ranks(axes[:, column], [series[info.pid] for info in group.ranks], report)
                axes[1, column].axhline(max(report.shard_bytes) / MIB, color="grey", linestyle="--", linewidth=1)
        finally:
            sampler.end()
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel("seconds")
    axes[0, 0].set_ylabel("read from files, MiB")
    axes[1, 0].set_ylabel("memory above the start, MiB")
    axes[0, 0].legend(fontsize=8, frameon=False)
    size = report.checkpoint_bytes / MIB
    figure.suptitle(f"A checkpoint of {size:,.0f} MiB to {RANKS} ranks; dashed: a rank's shard", fontsize=11)
    figure.savefig(out / "load.png", dpi=100)


def draw_ranks(axes: Sequence[Axes], series: Sequence[Series], report: LoadReport) -> None:
    """Draw the ranks' samples from the beginning of the load, which allocates the shards before it reads."""
    # Before it, the ranks have read what they import; the load's own bytes are the last.
    total = [sum(each) for each in zip(*(one.read_bytes for one in series), strict=False)]
    first = next(index for index, value in enumerate(total) if value > total[-1] - 0.99 * report.read_bytes)
    begun = series[0].seconds[first] - report.seconds
    start = next(index for index, value in enumerate(series[0].seconds) if value >= begun)
    for rank, one in enumerate(series):
        seconds = [value - one.seconds[start] for value in one.seconds[start:]]
        for ax, values in zip(axes, (one.read_bytes, one.memory_bytes), strict=True):
            above = [(value - values[start]) / MIB for value in values[start:]]
            ax.plot(seconds, above, color=COLOURS[rank], linewidth=1.4, label=f"rank {rank}")
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)


def draw_curve(out: Path, folder: Path, steps: int) -> None:
    """The curve of a `fit`, as `report.plot()` draws it: a model learns to count."""
    write_model(folder / "small", 64, 2)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(4096).remainder(61).reshape(256, 16).tolist()]
    with ShardedModelGroup.from_checkpoint(folder / "small", world_size=2, device="cpu", progress=False) as group:
        group.set_optimizer(torch.optim.AdamW, lr=3e-3)
        report = group.fit(rows, batch_size=16, max_steps=steps, epochs=100, shuffle=True, progress=False)
    report.plot(out / "curve.png")


def draw_notebook(out: Path, folder: Path) -> None:
    """A notebook's cells with the load's report, the live view, and the report of a `fit`, as a browser shows them."""
    write_model(folder / "llama", 64, 2)
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    page = "".join(
        f'<div class="cell"><div class="in"><pre>{html.escape(cell.source)}</pre></div>'
        f'<div class="out">{"".join(map(shown, cell.outputs))}</div></div>'
        for cell in cells
    )
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{page}")
    photograph(folder / "page.html", out / "notebook.png", folder, (860, 900))


def shown(output: nbformat.NotebookNode) -> str:
    """Return an output of a cell as HTML; what is written to stderr is left out."""
    data = output.get("data", {})
    return str(data.get("text/html") or f"<pre>{html.escape(data.get('text/plain', ''))}</pre>")


def photograph(page: Path, picture: Path, folder: Path, size: tuple[int, int]) -> None:
    """Have a browser draw a page into a PNG, and cut off what is empty below."""
    from PIL import Image, ImageChops

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("the picture of the notebook needs a browser: apt-get install chromium")
    switches = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    profile = tempfile.mkdtemp(dir=folder)
    window = f"--window-size={size[0]},{size[1]}"
    command = [browser, *switches.split(), "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
    command += [window, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    with Image.open(picture).convert("RGB") as image:
        box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
        image.crop((0, 0, image.width, min(image.height, box[3] + 12) if box else image.height)).save(
            picture, optimize=True
        )


def main() -> None:
    """Draw the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help="load, curve, notebook; default: all")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where they go (docs/pages/images)")
    parser.add_argument("--width", type=int, default=768, help="width of the model of `load`")
    parser.add_argument("--steps", type=int, default=200, help="steps of `curve`")
    chosen = parser.parse_args()
    names = chosen.pictures or ["load", "curve", "notebook"]
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "notebook" in names:
            draw_notebook(chosen.out, folder)
        if {"load", "curve"} & set(names) and not ray.is_initialized():
            ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
        if "load" in names:
            draw_load(chosen.out, folder, chosen.width)
        if "curve" in names:
            draw_curve(chosen.out, folder, chosen.steps)


if __name__ == "__main__":
    main()
