"""Times a load over slow links: one rank on each of several hosts, and only rank 0's host sees the checkpoint.

    python -m tests.bench.wire --hosts 3 --rate-mbit 800 --size-gib 0.3

Beside each round stands a raw floor in the same process group: gloo sends of the same bytes out of memory. The measure
is the time that the bytes which left rank 0's link, packet headers included, need at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.local.hosts import INTERFACE, Hosts, HostsError
from raysharding.units import MIB

ROOT = Path(__file__).resolve().parents[2]
FLOOR = "gloo-send"


@dataclass(frozen=True)
class Transfer:
    """One measured load, or one run of the floor."""

    round: int
    arm: str
    """The transport, or `FLOOR`."""
    seconds: float
    """From the barrier before to the last rank's barrier after."""
    stream_s: float
    """Of these, those in which bytes flowed; the rest is mostly planning, and does not grow with the tensors' sizes."""
    payload_bytes: int
    """The other ranks' shards: what has to leave rank 0's host."""
    sent_bytes: int
    """What left it, with packet headers."""
    rate_mbit: float

    @property
    def wire_s(self) -> float:
        """Time that the bytes sent need at the link's rate."""
        return self.sent_bytes * 8e-6 / self.rate_mbit

    @property
    def payload_s(self) -> float:
        """Time that the payload alone would need: headers are 4.6 % on top of it at an MTU of 1500."""
        return self.payload_bytes * 8e-6 / self.rate_mbit


def start_ranks(hosts: Hosts, checkpoint: Path, args: argparse.Namespace) -> list[subprocess.Popen[str]]:
    """A rank on each host; rank 0's standard input and output are pipes."""
    ranks = []
    for host in hosts:
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench.wire_rank", "--rank", str(host.index)]
        command += ["--world-size", str(len(hosts)), "--address", hosts[0].address, "--transport", args.transport]
        command += ["--checkpoint", str(checkpoint), "--kind", args.kind]
        command += ["--rounds", str(args.rounds), "--floor", FLOOR]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if host.index == 0 else {}
        ranks.append(host.popen(command, cwd=ROOT, env=environment(), text=True, **pipes))
    return ranks


def run_transfers(hosts: Hosts, checkpoint: Path, args: argparse.Namespace) -> list[Transfer]:
    """Run all rounds; rank 0 stops before and after each transfer, so that its link's counters can be read."""
    assert hosts.rate_mbit is not None
    ranks = start_ranks(hosts, checkpoint, args)
    reading, writing = ranks[0].stdout, ranks[0].stdin
    assert reading is not None
    assert writing is not None
    # At the deadline rank 0 is killed, its pipe ends, and the loop below with it.
    alarm = threading.Timer(args.timeout_s, ranks[0].kill)
    alarm.start()
    transfers: list[Transfer] = []
    before = hosts[0].link_bytes()
    try:
        for line in reading:
            record = json.loads(line)
            now = hosts[0].link_bytes()
            if "seconds" in record:
                sent_bytes = (now - before).sent
                transfers.append(Transfer(sent_bytes=sent_bytes, rate_mbit=hosts.rate_mbit, **record))
            before = now
            writing.write("go\n")
            writing.flush()
        codes = [rank.wait(timeout=30) for rank in ranks]
    finally:
        alarm.cancel()
    if any(codes) or not transfers:
        raise SystemExit(f"ranks ended with {codes} after {len(transfers)} transfers; their errors are above")
    return transfers


def environment() -> dict[str, str]:
    """gloo on the hosts' links; one thread for each rank; no hub; this checkout importable; no talk of host names."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return os.environ | own | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def table(transfers: Sequence[Transfer]) -> str:
    """For each arm: seconds, what left rank 0's link, the time that needs, and the ratios, medians of the rounds."""
    head = f"{'arm':<12}{'median s':>9}  {'min – max':>13}  {'MiB sent':>9}  {'need s':>7}  {'ratio':>6}"
    lines = [f"{head}  {'min – max':>13}  {'of stream':>9}  {'to payload':>10}"]
    for arm in dict.fromkeys(transfer.arm for transfer in transfers):
        own = [transfer for transfer in transfers if transfer.arm == arm]
        seconds = [transfer.seconds for transfer in own]
        median_s = statistics.median(seconds)
        ratios = [transfer.seconds / transfer.wire_s for transfer in own]
        of_stream = statistics.median(transfer.stream_s / transfer.wire_s for transfer in own)
        to_payload = statistics.median(transfer.seconds / transfer.payload_s for transfer in own)
        sent_mib = statistics.median(transfer.sent_bytes for transfer in own) / MIB
        need_s = statistics.median(transfer.wire_s for transfer in own)
        lines.append(
            f"{arm:<12}{median_s:>9.3f}  {min(seconds):>5.3f} – {max(seconds):<5.3f}  {sent_mib:>9.1f}"
            f"  {need_s:>7.3f}  {statistics.median(ratios):>6.3f}  {min(ratios):>5.3f} – {max(ratios):<5.3f}"
            f"  {of_stream:>9.3f}  {to_payload:>10.3f}"
        )
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3, help="number of hosts, one rank on each; default 3")
    parser.add_argument("--rate-mbit", type=float, default=800.0, help="every link's rate, each way; default 800")
    parser.add_argument("--mtu", type=int, default=1500, help="largest packet in bytes; default 1500")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face directory; default: one is made, and removed")
    parser.add_argument(
        "--kind", default="dense", help="of `checkpoints.KINDS`; default dense, any model of a config.json"
    )
    parser.add_argument("--size-gib", type=float, default=0.3, help="size of the checkpoint that is made; default 0.3")
    parser.add_argument("--transport", default="scatter", choices=("scatter", "broadcast"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time of all ranks; default 300")
    parser.add_argument("--json", action="store_true", help="also print one line of JSON for each transfer")
    args = parser.parse_args(arguments)
    if args.hosts < 2:
        parser.error("--hosts: give at least 2, since nothing crosses a link of one")
    return args


def main() -> None:
    """Make the hosts, run the rounds, print the table."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch, "llama")
            made = [sys.executable, "-m", "tests.bench.checkpoints", str(checkpoint), "--kind", args.kind]
            made += ["--size-gib", str(args.size_gib)]
            subprocess.run(made, cwd=ROOT, env=environment(), check=True)
        try:
            with Hosts(args.hosts, rate_mbit=args.rate_mbit, mtu=args.mtu) as hosts:
                transfers = run_transfers(hosts, checkpoint.resolve(), args)
        except HostsError as error:
            raise SystemExit(f"no hosts: {error}") from error
    if args.json:
        for transfer in transfers:
            print(json.dumps(asdict(transfer)))
    print(
        f"{args.hosts} hosts, links of {args.rate_mbit:g} Mbit/s each way, MTU {args.mtu}, gloo, {args.rounds} rounds"
    )
    print(table(transfers))


if __name__ == "__main__":
    main()
