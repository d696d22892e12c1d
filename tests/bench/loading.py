"""Times loads of one checkpoint by raysharding's transports, by its peers and by two floors, on this machine.

    python -m tests.bench.loading --mode warm,fresh --arms accelerate,torch,scatter,scatter_floor --plot out.png
    python -m tests.bench.loading --checkpoint path/to/checkpoint --arms local,scatter,scatter_floor,preadv_floor

`warm`: all arms in one set of processes, whose memory was touched before; the first round does not count. `fresh`: new
processes for each load, so that the first touch of memory counts, and memory is sampled. The order of the arms rotates.
A load's time runs from the barrier after sharding on meta to the last rank's barrier after the load. Ratios are taken
round by round. Every arm must give the same bytes on every rank. The floors bound a load's time from below. As root,
the ranks get a network namespace of their own, whose loopback counts the bytes that they send.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from raysharding.checkpoint import open_checkpoint
from raysharding.errors import RayshardingError
from raysharding.units import format_bytes
from tests.bench.network import private_network
from tests.bench.rank_set import ROOT, BenchError, Setup, ended_by_signals
from tests.bench.ratios import conclusion, groups, json_lines, progress_line, table
from tests.bench.rounds import Load, Results, Rounds, load_line

KINDS = ("dense", "fp32", "small", "huge", "odd", "fp8")
"""What `tests.bench.checkpoints` makes."""
ARMS = "accelerate,torch,fastsafetensors,dcp,scatter,broadcast,local,scatter_floor,preadv_floor"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="warm", help="warm, fresh, or warm,fresh; default warm")
    parser.add_argument("--world-size", default="4", help="ranks; several, as in 2,8, give the growth between them")
    parser.add_argument("--rounds", type=int, help="rounds that count; default 9 warm, 5 fresh")
    parser.add_argument("--arms", default=ARMS, help=f"default {ARMS}; others: a wrong name lists them")
    parser.add_argument("--base", default="scatter", help="arm that a column of ratios divides by; default scatter")
    parser.add_argument("--kind", default="dense", choices=KINDS, help="kind of the checkpoint; default dense")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="directory of that kind; dense: any model of a config.json; default: one is made, and removed",
    )
    parser.add_argument("--size-gib", type=float, help="size of the checkpoint that is made; default: the kind's own")
    parser.add_argument("--loading", type=json.loads, default={}, help="fields of Loading for all our arms, as JSON")
    parser.add_argument("--replicate-size", type=int, default=1, help="HSDP replicas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "sim"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time of one load")
    parser.add_argument("--shared-network", action="store_true", help="do not make a network namespace for the ranks")
    parser.add_argument("--json", action="store_true", help="lines of JSON on stdout; the table goes to stderr then")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args(arguments)
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
        subprocess.run(command, cwd=ROOT, check=True)
        yield directory


def print_load(num_rounds: int, as_json: bool, load: Load) -> None:
    """One load is done: a line to stderr, or JSON to stdout."""
    print(progress_line(load, num_rounds), file=sys.stderr, flush=True)
    if as_json:
        print(load_line(load), flush=True)


def measure(args: argparse.Namespace, directory: Path) -> Results:
    """Run all rounds of all modes; `auto` is loaded once, warm, to record its choice of transport."""
    options = {"checkpoint": str(directory), "kind": args.kind, "loading": args.loading}
    options |= {"replicate_size": args.replicate_size, "device_type": args.device}
    results = Results()
    with private_network() as network:
        descriptor = None if args.shared_network else network
        setup = Setup("tests.bench.arms:make_case", options, args.timeout_s, descriptor)
        sizes, arms = [int(size) for size in args.world_size.split(",")], args.arms.split(",")
        for mode in args.mode.split(","):
            num_rounds = args.rounds or (9 if mode == "warm" else 5)
            progress = partial(print_load, num_rounds, args.json)
            rounds = Rounds(setup, arms, sizes, num_rounds, progress, once=[] if "auto" in arms else ["auto"])
            (rounds.measure_fresh if mode == "fresh" else rounds.measure)(results)
    if not groups(results.loads):
        raise BenchError("\n  ".join((f"{directory}: no arm could load it:", *dict.fromkeys(results.skipped.values()))))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Make or take a checkpoint, run the rounds, print the table and what `auto` takes."""
    args = parse_arguments(arguments)
    if args.plot is not None:
        from tests.bench.plot import save_plot  # here, so that a missing matplotlib is told before the rounds
    with ended_by_signals(), checkpoint_directory(args) as directory:
        try:
            num_bytes = open_checkpoint(directory).num_bytes
            results = measure(args, directory)
        except RayshardingError as error:
            raise SystemExit(f"bench: {error}") from error
        if args.json:
            print("\n".join(json_lines(results)))
        head = f"{args.kind}, {os.cpu_count()} cores, {args.device}"
        report = "\n".join((head, table(results, num_bytes, args.base), *conclusion(results)))
        print(report, file=sys.stderr if args.json else sys.stdout)
        if args.plot is not None:
            save_plot(args.plot, results, f"{args.kind}, {format_bytes(num_bytes)}")


if __name__ == "__main__":
    main()
