"""How much of raysharding somebody who steps through a call would see: modules of which a function ran, by room.

    python -m tests.bench.executed              # this tree
    python -m tests.bench.executed /other/tree  # another one, of the same public names

Driver and rank 0 together, for `from_checkpoint`, a load into the group and one `forward`, with W = 2. Imports are not
counted, nor what runs on threads that Ray makes in C++ (the actor's control methods), which no Python profiler sees.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WAIT_S = 30.0

# Runs at the start of every process that has the folder in its PYTHONPATH: the driver and the ranks.
_RECORDER = """
import os, sys, threading, time

folder, tree = os.environ["EXECUTED_FOLDER"], os.environ["EXECUTED_TREE"] + "/raysharding/"
seen = set()

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(tree):
        name = frame.f_code.co_filename[len(tree):]
        if name not in seen and not is_import(frame):
            seen.add(name)

def is_import(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(tree):
            return True
        frame = frame.f_back
    return False

def answer():
    done = ""
    while True:
        time.sleep(0.02)
        try:
            with open(folder + "/ask") as ask:
                asked = ask.read()
        except OSError:
            continue
        if asked != done:
            found, done = sorted(seen), asked
            seen.clear()
            part = f"{folder}/{asked}-{os.getpid()}"
            with open(part + ".part", "w") as out:
                out.write("\\n".join(found))
            os.rename(part + ".part", part)

threading.Thread(target=answer, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
"""


def _collect(folder: Path, name: str, pids: list[int]) -> set[str]:
    """Have the processes write down what has run in them since the last time."""
    (folder / "asking").write_text(name)
    (folder / "asking").rename(folder / "ask")
    until = time.monotonic() + _WAIT_S
    parts = [folder / f"{name}-{pid}" for pid in pids]
    while not all(part.exists() for part in parts):
        if time.monotonic() > until:
            raise TimeoutError(f"{parts} were not written within {_WAIT_S:g} s")
        time.sleep(0.02)
    return {line for part in parts for line in part.read_text().splitlines()}


def _show(what: str, found: set[str]) -> None:
    floors = collections.Counter(name.partition("/")[0] for name in found)
    rooms = collections.Counter(name.rpartition("/")[0] for name in found if name.count("/") > 1)
    print(f"{what}: " + ", ".join(f"{floor}/ {floors[floor]}" for floor in ("group", "distributed")))
    for room, count in sorted(rooms.items()):
        print(f"    {room:32s}{count:4d}")


def measure(folder: Path) -> None:
    """Run a group, and print what ran. In a process that the recorder watches."""
    import ray
    import torch
    from safetensors.torch import save_file
    from torch import nn

    from raysharding import Placement, ShardedModelGroup, Split

    path = folder / "model.safetensors"
    save_file(nn.Linear(8, 8).state_dict(), path)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "EXECUTED_FOLDER", "EXECUTED_TREE")}
    placement = Placement(runtime_env={"env_vars": variables})
    _collect(folder, "start", [os.getpid()])
    with ShardedModelGroup.from_checkpoint(
        path, model=lambda: nn.Linear(8, 8), world_size=2, device="cpu", placement=placement, progress=False
    ) as group:
        pids = [os.getpid(), group.ranks[0].pid]
        _show("from_checkpoint", _collect(folder, "made", pids))
        group.load(path)
        _show("load", _collect(folder, "loaded", pids))
        group.forward(Split(torch.ones(4, 8)))
        _collect(folder, "first", pids)
        group.forward(Split(torch.ones(4, 8)))
        _show("forward", _collect(folder, "forward", pids))


def main() -> None:
    """Start a process that the recorder watches, in the tree that is asked for."""
    if "EXECUTED_FOLDER" in os.environ:
        measure(Path(os.environ["EXECUTED_FOLDER"]))
        return
    tree = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ".")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_RECORDER)
        variables = {"PYTHONPATH": f"{folder}:{tree}", "EXECUTED_FOLDER": folder, "EXECUTED_TREE": tree}
        subprocess.run([sys.executable, __file__], env={**os.environ, **variables}, cwd=tree, check=True)


if __name__ == "__main__":
    main()
