"""Times loads of one checkpoint by raysharding's transports and by its peers, in fresh processes, on this machine.

    python tests/bench/loading.py --world-size 4 --rounds 5 --arms accelerate,torch,scatter,broadcast

Every round starts new processes for each arm, so that the first touch of memory counts for all alike; the order of the
arms rotates. A load's time runs from the barrier after sharding on meta to the last rank's barrier after the load.
Ratios are taken round by round against the base arm. Every arm must give the same bytes on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("accelerate", "torch", "scatter", "broadcast")
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Load:
    """One measured load."""

    round: int
    arm: str
    seconds: float
    """From the first rank's start to the last rank's end."""
    shard_bytes: int
    """Largest shard of a rank."""
    extra_bytes: int
    """Largest over the ranks: peak RssAnon + RssShmem above the start, less the shard."""
    high_water_bytes: int
    """Largest over the ranks: VmHWM above the start; counts mapped file pages too."""
    digests: tuple[int, ...]
    """One for each rank."""


def python(*arguments: str) -> list[str]:
    """Command line of a module of this repository under this interpreter, without the peers' deprecation warnings."""
    return [sys.executable, "-W", "ignore", "-m", *arguments]


def environment() -> dict[str, str]:
    """One thread for each rank; no hub; this checkout importable."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def run_load(round_index: int, arm: str, checkpoint: Path, args: argparse.Namespace) -> Load:
    """Start a process for each rank, wait for their records, and leave none behind."""
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        shared = ["--arm", arm, "--world-size", str(args.world_size), "--store", f"{scratch}/store"]
        shared += ["--checkpoint", str(checkpoint), "--bucket-mib", str(args.bucket_mib)]
        try:
            for rank in range(args.world_size):
                command = python("tests.bench.rank", "--rank", str(rank), *shared)
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True))
            outputs = [process.communicate(timeout=args.timeout_s)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if any(process.returncode for process in ranks):
        codes = [process.returncode for process in ranks]
        raise SystemExit(f"arm {arm}, round {round_index}: ranks ended with {codes}; their errors are above")
    records = [json.loads(output.splitlines()[-1]) for output in outputs]
    return Load(
        round=round_index,
        arm=arm,
        seconds=max(record["end_s"] for record in records) - min(record["start_s"] for record in records),
        shard_bytes=max(record["shard_bytes"] for record in records),
        extra_bytes=max(record["extra_bytes"] for record in records),
        high_water_bytes=max(record["high_water_bytes"] for record in records),
        digests=tuple(record["digest"] for record in records),
    )


def run_rounds(args: argparse.Namespace, arms: Sequence[str], checkpoint: Path) -> list[Load]:
    """All rounds; the order of the arms rotates so that none always follows the same one."""
    loads: list[Load] = []
    for round_index in range(args.rounds):
        turn = round_index % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            loads.append(run_load(round_index, arm, checkpoint, args))
            if args.json:
                print(json.dumps(asdict(loads[-1])), flush=True)
    if len({load.digests for load in loads}) != 1:
        raise SystemExit(f"the arms loaded different bytes: {sorted({(load.arm, load.digests) for load in loads})}")
    return loads


def table(loads: Sequence[Load], arms: Sequence[str], base: str) -> str:
    """arm, median seconds, range, ratio to the base arm (median of the rounds' ratios, range), extra memory."""
    seconds = {(load.round, load.arm): load.seconds for load in loads}
    rounds = sorted({load.round for load in loads})
    lines = [f"{'arm':<12}{'median s':>9}  {'min – max':>13}  {'times ' + base:>14}  {'range':>13}  {'extra MiB':>9}"]
    for arm in arms:
        own = [seconds[index, arm] for index in rounds]
        ratios = [seconds[index, arm] / seconds[index, base] for index in rounds]
        extra = max(load.extra_bytes for load in loads if load.arm == arm) / MIB
        lines.append(
            f"{arm:<12}{statistics.median(own):>9.2f}  {min(own):>5.2f} – {max(own):<5.2f}  "
            f"{statistics.median(ratios):>14.2f}  {min(ratios):>5.2f} – {max(ratios):<5.2f}  {extra:>9.0f}"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated, of " + ", ".join(ARMS))
    parser.add_argument("--base", default="scatter", help="arm that the ratios divide by; default scatter")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face directory; default: one is made, and removed")
    parser.add_argument("--size-gib", type=float, default=1.78, help="size of the checkpoint that is made")
    parser.add_argument("--bucket-mib", type=int, default=32, help="bucket size of our transports; default 32")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time of one load's processes")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON for each load")
    args = parser.parse_args()
    unknown = set(args.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"unknown arms {sorted(unknown)}: choose from {', '.join(ARMS)}")
    return args


def main() -> None:
    """Make or take a checkpoint, run the rounds, print the table."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    arms = args.arms.split(",")
    base = args.base if args.base in arms else arms[-1]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch, "llama")
            made = python("tests.bench.checkpoints", str(checkpoint), "--size-gib", str(args.size_gib))
            subprocess.run(made, cwd=ROOT, env=environment(), check=True)
        checkpoint = checkpoint.resolve()
        size_gib = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / GIB
        loads = run_rounds(args, arms, checkpoint)
        print(
            f"{size_gib:.2f} GiB, world size {args.world_size}, gloo, {args.rounds} rounds of fresh processes, ", end=""
        )
        print(f"{os.cpu_count()} cores; shard {max(load.shard_bytes for load in loads) / MIB:.0f} MiB")
        print(table(loads, arms, base))


if __name__ == "__main__":
    main()
