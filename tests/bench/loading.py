"""Times loads of one checkpoint by raysharding's transports, by its peers and by two floors, on this machine.

    python tests/bench/loading.py --mode warm,fresh --arms accelerate,torch,scatter,scatter_floor --plot out.png

`warm`: all arms in one set of processes, whose memory was touched before; the first round does not count. `fresh`: new
processes for each load, so that the first touch of memory counts, and memory is sampled. The order of the arms rotates.
A load's time runs from the barrier after sharding on meta to the last rank's barrier after the load. Ratios are taken
round by round. Every arm must give the same bytes on every rank. `raysharding bench` is the same without the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this file is run by its path, too

from raysharding.bench.network import private_network  # noqa: E402
from raysharding.bench.plot import save_plot  # noqa: E402
from raysharding.bench.rank_set import BenchError, Setup, ended_by_sigterm  # noqa: E402
from raysharding.bench.ratios import (  # noqa: E402
    json_lines,
    progress_line,
    table,
)
from raysharding.bench.rounds import Load, Results, Rounds, load_line  # noqa: E402
from raysharding.checkpoint import open_checkpoint  # noqa: E402
from tests.bench.fresh import Memory, measure_fresh  # noqa: E402

KINDS = ("dense", "fp32", "small", "huge", "odd", "fp8")
"""What `tests.bench.checkpoints` makes."""
ARMS = "accelerate,torch,fastsafetensors,dcp,scatter,broadcast,local,scatter_floor,preadv_floor"


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="warm", help="warm, fresh, or warm,fresh; default warm")
    parser.add_argument("--world-size", default="4", help="ranks; several, as in 2,8, give the growth between them")
    parser.add_argument("--rounds", type=int, help="rounds that count; default 9 warm, 5 fresh")
    parser.add_argument("--arms", default=ARMS, help=f"default {ARMS}; others: a wrong name lists them")
    parser.add_argument("--base", default="scatter", help="arm that a column of ratios divides by; default scatter")
    parser.add_argument("--kind", default="dense", choices=KINDS, help="kind of the checkpoint; default dense")
    parser.add_argument("--checkpoint", type=Path, help="directory of that kind; default: one is made, and removed")
    parser.add_argument("--size-gib", type=float, help="size of the checkpoint that is made; default: the kind's own")
    parser.add_argument("--loading", type=json.loads, default={}, help="fields of Loading for all our arms, as JSON")
    parser.add_argument("--replicate-size", type=int, default=1, help="HSDP replicas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time of one load")
    parser.add_argument("--shared-network", action="store_true", help="do not make a network namespace for the ranks")
    parser.add_argument("--json", action="store_true", help="lines of JSON on stdout; the table goes to stderr then")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args()
    if not set(args.mode.split(",")) <= {"warm", "fresh"}:
        parser.error(f"--mode {args.mode}: give warm, fresh, or warm,fresh")
    return args


@contextmanager
def checkpoint_directory(args: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint that was named, or a new one."""
    if args.checkpoint is not None:
        yield args.checkpoint.resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, args.kind)
        command = [sys.executable, "-m", "tests.bench.checkpoints", str(directory), "--kind", args.kind]
        command += [] if args.size_gib is None else ["--size-gib", str(args.size_gib)]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, check=True)
        yield directory


def python_path() -> str:
    """This checkout first, so that processes find `tests`."""
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)


def print_load(num_rounds: int, as_json: bool, load: Load) -> None:
    """One load is done: a line to stderr, or JSON to stdout."""
    print(progress_line(load, num_rounds), file=sys.stderr, flush=True)
    if as_json:
        print(load_line(load), flush=True)


def measure(args: argparse.Namespace, directory: Path) -> tuple[Results, list[Memory]]:
    """Run all rounds of all modes; the memory is that of the fresh loads."""
    options = {"checkpoint": str(directory), "kind": args.kind, "loading": args.loading}
    options |= {"replicate_size": args.replicate_size, "device_type": args.device}
    os.environ["PYTHONPATH"] = python_path()
    results, memory = Results(), list[Memory]()
    with private_network() as network, tempfile.TemporaryDirectory() as scratch:
        descriptor = None if args.shared_network else network
        sizes = [int(size) for size in args.world_size.split(",")]
        for mode in args.mode.split(","):
            num_rounds = args.rounds or (9 if mode == "warm" else 5)
            progress = partial(print_load, num_rounds, args.json)
            more = {"memory": scratch} if mode == "fresh" else {}
            setup = Setup("tests.bench.arms:make_case", options | more, args.timeout_s, descriptor)
            rounds = Rounds(setup, args.arms.split(","), sizes, num_rounds, progress)
            if mode == "fresh":
                memory += measure_fresh(rounds, Path(scratch), results)
            else:
                rounds.measure(results)
    return results, memory


def main() -> None:
    """Make or take a checkpoint, run the rounds, print the table."""
    args = parse_arguments()
    with ended_by_sigterm(), checkpoint_directory(args) as directory:
        try:
            results, memory = measure(args, directory)
        except BenchError as error:
            raise SystemExit(f"bench: {error}") from error
        num_bytes = open_checkpoint(directory).num_bytes
        if args.json:
            print("\n".join(json_lines(results)))
            print("\n".join(json.dumps({"kind": "memory", **asdict(item)}) for item in memory))
        head = f"{args.kind}, {os.cpu_count()} cores, {args.device}"
        report = "\n".join((head, table(results, num_bytes, args.base), *map(str, memory)))
        print(report, file=sys.stderr if args.json else sys.stdout)
        if args.plot is not None:
            save_plot(args.plot, results, f"{args.kind}, {num_bytes / (1 << 30):.2f} GiB")


if __name__ == "__main__":
    main()
