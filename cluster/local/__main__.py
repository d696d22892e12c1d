"""Runs a program on host 0 of a Ray cluster of several hosts, all of them on this machine.

    python -m cluster.local --hosts 3 -- python examples/quickstart.py
    python -m cluster.local --hosts 3 --rate-mbit 800 -- bash       # a shell on host 0; `ray status` works in it

The program finds the cluster and its token in its environment: `ray.init()` joins it. Each host has an address, a host
name, /tmp/ray and /dev/shm of its own, and sees this machine's other files; there is no way from them to the internet.
Needs root (network namespaces) and the commands `ip` and `tc`. Everything is gone when the program ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster.local.hosts import Hosts, HostsError
from cluster.local.ray_hosts import RayHosts


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3, help="number of hosts; default 3")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray hands out on each host; default 2")
    parser.add_argument("--rate-mbit", type=float, help="every link's rate, each way; default: no limit")
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    return parser.parse_args(arguments)


def main() -> int:
    """Make the cluster, run the program, take everything away; returns the program's exit status."""
    args = parse_arguments()
    try:
        with (
            Hosts(args.hosts, rate_mbit=args.rate_mbit) as hosts,
            RayHosts(list(hosts), cpus_per_host=args.cpus) as rays,
        ):
            addresses = ", ".join(f"{host.name} {host.address}" for host in hosts)
            print(f"Ray at {rays.address} on {addresses}", file=sys.stderr)
            return rays.popen(hosts[0], args.command).wait()
    except (HostsError, ValueError) as error:
        print(f"no cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
