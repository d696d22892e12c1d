"""The architecture, enforced: what each module is for, and what it may import.

A module imports only from modules on lower floors; files of one package may import each other, but not in a circle.
The imports are read from the source, those inside functions and under `TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "raysharding"


class Floor(NamedTuple):
    """One row of the table."""

    number: int
    third_party: frozenset[str]
    purpose: str


def _floor(number: int, third_party: str, purpose: str) -> Floor:
    return Floor(number, frozenset(third_party.split()), purpose)


FLOORS = {
    "errors": _floor(0, "", "the error tree; every class survives pickling"),
    "tree": _floor(0, "torch", "walks over nested dicts, lists, tuples and dataclasses, with the path of each leaf"),
    "config": _floor(1, "torch", "frozen dataclasses: Sharding, Loading, Placement, Timeouts"),
    "batch": _floor(1, "torch numpy", "Split, PerRank, Out; rows dealt out over the ranks"),
    "checkpoint": _floor(1, "torch safetensors pyarrow", "what is in the files; byte readers; the safetensors writer"),
    "data": _floor(2, "torch pyarrow numpy", "rows to train on: where they are, their order, who takes which"),
    "outputs": _floor(2, "torch", "the ranks' outputs put together again, in row order"),
    "models": _floor(2, "torch transformers peft", "config.json or a callable → module on meta; keys, wrap plan"),
    "distributed": _floor(
        3, "torch accelerate numpy", "the SPMD layer: mesh, FSDP2, plan, transports, loading, saving, training"
    ),
    "worker": _floor(4, "torch", "everything that one rank does"),
    "group": _floor(
        5, "torch ray numpy tqdm matplotlib mlflow wandb", "placement, supervision, calls; the only user of ray"
    ),
    "bench": _floor(5, "torch matplotlib", "times loads beside floors, in processes of its own, without Ray"),
    "__main__": _floor(7, "", "`python -m raysharding`"),
    "cli": _floor(6, "torch ray tqdm", "the command line"),
    "__init__": _floor(6, "", "the public names, imported when first used"),
}


def room(module: str) -> str:
    """Row of the table that a dotted module name belongs to: its first part below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import anywhere in `tree`, relative ones resolved; a submodule counts as itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join((*above, base) if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule in a package, given as module name → source; a package's own file ends in `.__init__`."""
    modules = {name.removesuffix(".__init__") for name in sources}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        module, is_package = name.removesuffix(".__init__"), name.endswith(".__init__")
        if room(module) not in FLOORS:
            found.append(f"{name}: not in the floor table of tests/test_layering.py")
            continue
        graph[module] = set()
        for line, target in imported(ast.parse(source), module, is_package, modules):
            where = f"{name}:{line} imports {target}"
            if target.split(".")[0] == PACKAGE:
                found.extend(_wrong_floor(where, module, target))
                graph[module].add(target)
            elif target.split(".")[0] not in sys.stdlib_module_names | FLOORS[room(module)].third_party:
                allowed = ", ".join(sorted(FLOORS[room(module)].third_party)) or "the standard library only"
                found.append(f"{where}: {room(module)} may use {allowed}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("imports in a circle: " + " → ".join(error.args[1]))
    return found


def _wrong_floor(where: str, module: str, target: str) -> Iterator[str]:
    own, other = room(module), room(target)
    if other not in FLOORS:
        yield f"{where}: {other} is not in the floor table"
    elif own != other and FLOORS[other].number >= FLOORS[own].number:
        numbers = FLOORS[own].number, FLOORS[other].number
        yield f"{where}: floor {numbers[0]} may import only from lower floors, {other} is on {numbers[1]}"


def package_sources() -> dict[str, str]:
    """The package as it lies in the checkout."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}


def test_package_keeps_its_floors() -> None:
    assert violations(package_sources()) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("config", "import raysharding.group", "floor 1 may import only from lower floors"),
        ("config", "def f():\n    from raysharding.worker import Worker", "floor 1 may import only from lower floors"),
        ("config", "from raysharding.batch import Split", "batch is on 1"),
        ("distributed.mesh", "from ..group import Call", "floor 3 may import only from lower floors"),
        ("distributed.mesh", "from raysharding import Split", "__init__ is on 6"),
        ("distributed.mesh", "import ray", "distributed may use accelerate, numpy, torch"),
        ("worker", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray.util", "worker may use torch"),
        (
            "distributed.fsdp",
            "import importlib\nimportlib.import_module('transformers')",
            "distributed may use accelerate, numpy, torch",
        ),
        ("errors", "import torch", "the standard library only"),
        ("helpers", "", "not in the floor table"),
    ],
)
def test_broken_rule_is_found(module: str, source: str, message: str) -> None:
    assert any(message in found for found in violations({f"{PACKAGE}.{module}": source}))


def test_circle_is_found() -> None:
    circle = {"raysharding.group.a": "from . import b", "raysharding.group.b": "from raysharding.group.a import x"}
    assert [found.split(":")[0] for found in violations(circle)] == ["imports in a circle"]


def test_own_package_is_no_violation() -> None:
    fine = {"raysharding.group.__init__": "from .a import x", "raysharding.group.a": "import os, ray, torch.nn"}
    assert violations(fine) == []


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter in which raysharding is importable; show its errors if it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_distributed_needs_no_ray() -> None:
    run_python(BLOCK.format(blocked=("ray",)) + "import raysharding.distributed, raysharding.worker")


def test_distributed_needs_no_transformers() -> None:
    run_python(BLOCK.format(blocked=("ray", "transformers")) + "import raysharding.distributed, raysharding.models")


def test_group_is_missing_only_when_used() -> None:
    code = """
import raysharding
raysharding.Split
try:
    raysharding.ShardedModelGroup
except ModuleNotFoundError as error:
    assert error.name == "ray", error
else:
    raise SystemExit("the group came without ray")
"""
    run_python(BLOCK.format(blocked=("ray",)) + code)


def test_import_is_lazy() -> None:
    heavy = ("torch", "ray", "transformers", "pyarrow")
    run_python(f"import sys, raysharding\nassert not {{*{heavy!r}}} & {{*sys.modules}}, sorted(sys.modules)")
